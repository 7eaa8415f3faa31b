"""One batch fetched as a loader would: its items, their collation, and what it would cost from memory."""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import is_dataclass
from statistics import median
from time import perf_counter
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from flatout.blocks.data.stored_images import innermost, stored_as
from flatout.check.observe.collectors.loaders import LoaderUse
from flatout.check.trials.context import Refused, Scene, TrialEntry
from flatout.check.trials.subprocess_copy import in_copy
from flatout.core.records.trial import TimeDataset, TrialResult
from flatout.core.tensors.nests import tensors_in
from flatout.machine.measure.timer import time_call

_FEW: Final = 16
_DEEPEST: Final = 6
"""Containers and objects inside one another: an item of a data set of graphs takes three."""
_ENOUGH_S: Final = 0.3
_MOST_TENSORS: Final = 20_000
_FACTS: Final = (
    "repeatable",
    "views",
    "takes_batches",
    "item_by_item",
    "stackable",
    "stored",
    "stored_grey",
    "stored_colour",
    "normalised",
)
_SEED: Final = 20_611


def run(trial: TimeDataset, scene: Scene) -> TrialResult:
    """`now_s`: fetching one batch as the loader does. `cured_s`: the same batch out of ready tensors.

    The data set is asked in a copy of the process. Parts: seconds of one 'item' and of 'collate', 'item_bytes', 'num_items', and
    'index' where one call with a list of indices gives the batch. Facts: 'repeatable' (the same items come out when asked again
    with other random numbers, so they can be prepared once), 'views' (items are rows of tensors or arrays that the data set
    holds), 'takes_batches' (a list of indices gives the collated batch), 'item_by_item' (the loader asks for single items),
    'stackable' (an item is a tuple of tensors, arrays and numbers, each as large in any item);
    'stored' where the items are, or are some of, images that torchvision stores in one array and that become tensors all at once;
    'stored_grey', 'stored_colour' and 'normalised' say how a whole dataset of those does.

    'repeatable' is left out where items cannot be compared. `cured_s` is then None, and where a batch holds no tensors: nobody
    knows what it would cost from memory.
    """
    use = scene.loaders[trial.loader]
    if not use.is_map_style:
        raise Refused("the dataset is an iterable and cannot be asked for an item")
    found = in_copy(lambda: _measure(use, scene.limit_s), limit_s=scene.limit_s, left_s=scene.left_s)
    return TrialResult(
        trial=trial,
        now_s=found.pop("now"),
        cured_s=found.pop("cured", None),
        facts={name: bool(found.pop(name)) for name in _FACTS if name in found},
        parts=found,
    )


class _FetchedItems(NamedTuple):
    """Items, the seconds they took, and which they were."""

    items: list[Any]
    seconds: float
    indices: list[int]


def _measure(use: LoaderUse, limit_s: float) -> dict[str, float]:
    dataset, num = use.dataset, len(use.dataset)
    batch = min(max(1, use.batch_size), num)
    chance = random.Random(_SEED)
    _fetch(dataset, chance.sample(range(num), min(2, num)), limit_s / 6)  # the first touch copies pages of the fork
    item_s: list[float] = []
    fetched = _FetchedItems([], 0.0, [])
    began = perf_counter()
    while not item_s or (perf_counter() - began < _ENOUGH_S and len(item_s) < 50):
        start = chance.randrange(max(1, num - batch + 1))
        indices = list(range(start, start + batch)) if "Sequential" in use.sampler else chance.sample(range(num), batch)
        fetched = _fetch(dataset, indices, limit_s / 3)
        item_s.append(fetched.seconds / len(fetched.items))
    items, share = fetched.items, batch / len(fetched.items)
    collate_s = 0.0
    collated: Any = items
    if use.collates:
        collate_s = _usual_s(lambda: use.collate(list(items)), limit_s) * share
        collated = use.collate(list(items))
    else:
        item_s = [_usual_s(lambda: dataset[fetched.indices], limit_s) / batch]
        collated = dataset[fetched.indices]
    again = _again(dataset, fetched.indices[: min(_FEW, len(items))], limit_s / 6)
    index_s = _indexed_s(dataset, fetched.indices, collated)
    memory_s = _from_memory_s(collated)
    now_s = median(item_s) * batch + collate_s
    if not use.collates:
        memory_s = now_s  # it is picked with one indexing already
    elif index_s is not None:
        memory_s = index_s * share
    elif memory_s is not None:
        memory_s *= share
    is_repeatable = _all_same(items, again)
    result: dict[str, float] = {
        "now": now_s,
        "item": median(item_s),
        "collate": collate_s,
        "item_bytes": sum(t.numel() * t.element_size() for t in tensors_in(collated)) / len(items),
        "num_items": num,
        "views": _are_views(dataset, items[0]),
        "takes_batches": index_s is not None,
        "item_by_item": use.collates,
        "stackable": _are_stackable(items),
    }
    stored = stored_as(dataset)
    if stored is not None and len(stored.normalised_by) <= 1:
        result |= {f"stored_{stored.colours}": 1.0, "normalised": float(bool(stored.normalised_by))}
    if stored_as(innermost(dataset)) is not None:
        result["stored"] = 1.0
    if index_s is not None:
        result["index"] = index_s * share
    if is_repeatable is not None:
        result["repeatable"] = is_repeatable
        if memory_s is not None:
            result["cured"] = min(memory_s, now_s)
    return result


def _usual_s(call: Callable[[], object], limit_s: float) -> float:
    return time_call(call, min_time_s=0.1, max_time_s=max(0.2, limit_s / 6)).call_s.value


def _fetch(dataset: Any, indices: list[int], limit_s: float) -> _FetchedItems:
    start = perf_counter()
    whole = getattr(dataset, "__getitems__", None)
    if callable(whole):
        items = list(whole(indices))
        return _FetchedItems(items, perf_counter() - start, indices)
    items = []
    for index in indices:
        items.append(dataset[index])
        if perf_counter() - start > limit_s:
            break
    return _FetchedItems(items, perf_counter() - start, indices[: len(items)])


def _again(dataset: Any, indices: list[int], limit_s: float) -> list[Any]:
    """The same items under other random numbers."""
    random.seed(1)
    torch.manual_seed(1)
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(1)
    return [copy.copy(item) for item in _fetch(dataset, indices, limit_s).items]


def _indexed_s(dataset: Any, indices: list[int], collated: Any) -> float | None:
    """Seconds of asking for all items with one list of indices; None when that does not give the collated batch."""
    try:
        batch = dataset[indices]
        if not _have_same_tensors(batch, collated):
            return None
    except Exception:  # noqa: BLE001  # a data set that takes one index raises what it likes on a list
        return None
    return time_call(lambda: dataset[indices], min_time_s=0.05, max_time_s=0.3).call_s.value


def _from_memory_s(collated: Any) -> float | None:
    """Seconds to pick one batch out of tensors four times as long; None where a batch holds no tensors to pick."""
    tensors = [t for t in tensors_in(collated) if t.dim() > 0 and t.numel() > 0]
    if not tensors:
        return None
    pool = [torch.cat([t] * 4) for t in tensors]
    indices = [torch.randperm(len(p))[: len(t)] for p, t in zip(pool, tensors, strict=True)]
    pairs = list(zip(pool, indices, strict=True))
    return time_call(lambda: [t[index] for t, index in pairs], min_time_s=0.05, max_time_s=0.3).call_s.value


def _are_stackable(items: list[Any]) -> bool:
    """Whether items are tuples of what becomes one tensor for all items, field by field."""
    fields = [[_layout_of(part) for part in item] if type(item) in (tuple, list) else [] for item in items]
    return bool(fields[0]) and None not in fields[0] and all(one == fields[0] for one in fields)


def _layout_of(part: Any) -> tuple[Any, ...] | None:
    """Type and shape of a tensor, an array or a number; None of anything else."""
    numpy: Any = sys.modules.get("numpy")
    if isinstance(part, Tensor):
        return (part.dtype, part.shape, part.device) if part.layout is torch.strided else None
    if numpy is not None and isinstance(part, (numpy.ndarray, numpy.generic)):
        return (part.dtype, part.shape) if part.dtype.kind in "biuf" else None
    return (type(part),) if type(part) in (bool, int, float) else None


def _are_views(dataset: Any, item: Any) -> bool:
    """Whether all of an item that is worth copying lies in memory that the data set holds."""
    tensors = [t for t in tensors_in(item) if t.device.type == "cpu"]
    largest = max((t.numel() for t in tensors), default=0)
    spans = list(_spans(dataset))
    worth = [t for t in tensors if t.numel() > 1 or largest <= 1]
    return bool(worth) and all(any(start <= t.data_ptr() < end for start, end in spans) for t in worth)


def _spans(dataset: Any) -> Iterator[tuple[int, int]]:
    """Addresses of the tensors and arrays that a data set, or one that it wraps, holds in its attributes."""
    numpy: Any = sys.modules.get("numpy")
    waiting = [dataset]
    visited: set[int] = set()
    while waiting and len(visited) < _MOST_TENSORS:
        value = waiting.pop()
        if id(value) in visited:
            continue
        visited.add(id(value))
        if isinstance(value, Tensor):
            start = value.untyped_storage().data_ptr()
            yield start, start + value.untyped_storage().nbytes()
        elif numpy is not None and isinstance(value, numpy.ndarray):
            start = value.ctypes.data
            yield start, start + value.nbytes
        elif isinstance(value, (list, tuple)):
            waiting.extend(value[:_MOST_TENSORS])
        elif isinstance(value, dict):
            waiting.extend(list(value.values())[:_MOST_TENSORS])
        elif isinstance(value, torch.utils.data.Dataset):
            waiting.extend(vars(value).values())


def _have_same_tensors(a: Any, b: Any) -> bool:
    left, right = list(tensors_in(a)), list(tensors_in(b))
    return bool(left) and len(left) == len(right) and all(map(torch.equal, left, right))


def _all_same(items: list[Any], again: list[Any]) -> bool | None:
    """Whether these items are those, one by one; None where that cannot be known."""
    found = [_same(a, b) for a, b in zip(items, again, strict=False)]
    return False if False in found else None if None in found else True


def _same(a: Any, b: Any) -> bool | None:
    """Whether two items hold the same; None where they hold objects that can be compared by identity alone.

    Where there are tensors or arrays, they decide.
    """
    left, right = list(_leaves(a)), list(_leaves(b))
    if len(left) != len(right):
        return False
    equal = [_equal(x, y) for x, y in zip(left, right, strict=True)]
    if False in equal:
        return False
    has_data = any(_is_data(leaf) for leaf in left)
    return None if not has_data and (None in equal or not equal) else True


def _leaves(value: Any, depth: int = _DEEPEST) -> Iterator[Any]:
    """What lies in an item: in its containers, and in objects whose class does not say what equal means, in their state."""
    if not depth:
        yield _Unknown()
    elif isinstance(value, Mapping):
        for key in value:
            yield key
            yield from _leaves(value[key], depth - 1)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _leaves(part, depth - 1)
    elif not is_dataclass(value) and _has_comparison(type(value)):
        yield value
    else:
        state = _state_of(value)
        if state:
            yield from _leaves(state, depth - 1)
        else:
            yield _Unknown()


def _has_comparison(kind: type) -> bool:
    """Whether the class, or one that it is made of, says what equal means: else objects equal themselves alone."""
    return any("__eq__" in vars(base) for base in kind.__mro__ if base is not object)


def _state_of(value: Any) -> Any:
    """The state of an object: its own dict of it (batches of graphs have one), else its attributes."""
    whole = getattr(value, "to_dict", None)
    if callable(whole) and not isinstance(value, type):
        try:
            return whole()
        except Exception:  # noqa: BLE001  # the user's own method, which may need arguments
            return None
    return getattr(value, "__dict__", None)


class _Unknown:
    """A part of an item that cannot be compared."""


def _is_data(leaf: Any) -> bool:
    numpy: Any = sys.modules.get("numpy")
    return isinstance(leaf, Tensor) or (numpy is not None and isinstance(leaf, numpy.ndarray))


def _equal(a: Any, b: Any) -> bool | None:
    if isinstance(a, _Unknown) or isinstance(b, _Unknown):
        return None
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.equal(a, b)
    if _is_data(a) and _is_data(b):
        return bool(sys.modules["numpy"].array_equal(a, b))
    try:
        return bool(a == b)
    except Exception:  # noqa: BLE001  # a class whose comparison gives no one answer
        return None


TRIAL: Final = TrialEntry(TimeDataset, run)
