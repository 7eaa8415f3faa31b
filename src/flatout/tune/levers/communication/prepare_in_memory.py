"""Items that come out the same each time are made once, and batches are cut from tensors.

What        A DataLoader's dataset is wrapped: an item that was made is kept; when all are there, a batch is one index operation.
            A collate function of the user's own gets the kept items. Worker processes are left out: nothing is left to do.
Guarantee   EXACT: the same batches bit for bit.
Refuses     Items that differ from time to time (augmentation), data that do not fit the memory, iterable datasets, loaders
            whose time goes into a collate function of their own, loaders whose workers are set up by a function.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import libcst as cst
from libcst import matchers as m

from flatout.core.errors import EditError, LeverRefused
from flatout.core.parts import lever
from flatout.core.records.evidence import Evidence, Loader
from flatout.core.records.finding import Finding
from flatout.core.records.lever import Candidate, Hooks, Parameters, string
from flatout.core.records.trial import TrialResult
from flatout.machine.cost.feeding import fetch_trial, fits_memory
from flatout.tune.rewrite.calls import LOADER, with_argument, with_calls
from flatout.tune.rewrite.enclosing_blocks import assignment
from flatout.tune.rewrite.imports import call_name, with_import, with_torch
from flatout.tune.rewrite.like_loaders import (
    loaders_of_like_images,
    loaders_of_same_split,
    returned,
    targets_of,
)
from flatout.tune.rewrite.loader_calls import WORKER_OPTIONS, LoaderCall, of_items_with_unknown_options
from flatout.tune.rewrite.source import (
    MODULE,
    SourcePlace,
    changed_places,
    code_of,
    editable_place,
    find,
    first_line,
    fresh_name,
    names_in,
    nodes_of,
    readable_place,
    several_places,
    spaced,
    statements,
    with_changes,
)

_ROWS: Final = "torch.utils.data.TensorDataset"
_ROWS_CLASS: Final = "TensorRows"
_ROWS_TEXT: Final = f"""class {_ROWS_CLASS}(TensorDataset):
    \"\"\"Cuts a whole batch of rows out of the tensors at once.\"\"\"

    def __getitems__(self, rows):
        rows = torch.tensor(rows)
        return [tensor[rows] for tensor in self.tensors]
"""
"""By a list a tensor reads its rows at less than half the speed that it has by a tensor, on a CPU."""
_CACHING_COST: Final = 0.1
"""Of the wait for items: what keeping them costs in an epoch whose items never come again."""
_ITEMS_FRACTION: Final = 0.2
"""With a collate function of their own, loaders must spend this share of a batch on its items, for the rest stays."""


def propose(evidence: Evidence, findings: Sequence[Finding]) -> Iterator[Candidate]:
    """Propose it for loaders that the step waits for and whose items a trial found repeatable."""
    able: list[tuple[Loader, float]] = []
    why = "no loader whose items come out the same each time and fit the memory"
    for index, loader in enumerate(evidence.loaders):
        result = fetch_trial(evidence, index)
        if loader.has_own_collate and result is not None and _items_fraction(loader, result) < _ITEMS_FRACTION:
            why = f"the time of {loader.dataset}'s batches goes into a collate function of their own, not into items"
        elif result is not None and loader.is_map_style and _is_repeatable(evidence, result):
            able.append((loader, _items_fraction(loader, result)))
    if not able:
        raise LeverRefused(why)
    loader, share = max(able, key=lambda pair: pair[0].wait_s * pair[0].fetches)
    savings = [f.saved_s for f in findings]
    waited_s = evidence.steps.phases.get("data", 0.0)
    low, high = max(savings, default=(0.0, waited_s))
    is_at_once = all(_is_stored(evidence, one) for one, _ in able)
    if not is_at_once and not loader.num_epochs:
        low = -_CACHING_COST * waited_s  # whether items come again was not seen
    constructor = evidence.source_of(_constructor(evidence, loader))
    datasets = tuple(sorted({one.dataset for one, _ in able}))
    yield Candidate(
        # a loader that is made in somebody else's file is wrapped all the same
        parameters={"datasets": datasets}
        | _places(evidence, loader, [one for one, _ in able])
        | _stored(evidence, loader),
        saved_s=(share * low, max(share * low, share * max(high, waited_s))),
        where=constructor,
        warm_up_steps=0 if is_at_once else max(_steps_per_epoch(evidence, one) for one, _ in able),
        because=f"each step waits for a batch of {loader.dataset}, whose items come out the same each time",
    )


def _places(evidence: Evidence, first: Loader, others: Sequence[Loader]) -> Parameters:
    """Where loaders are made whose items are prepared alike."""
    place = readable_place(evidence, evidence.source_of(_constructor(evidence, first)))
    if not place:
        return {}
    how = _stored(evidence, first)
    alike = [one for one in others if one is not first and _stored(evidence, one) == how]
    return several_places(
        [place, *(readable_place(evidence, evidence.source_of(_constructor(evidence, one))) for one in alike)]
    )


def _constructor(evidence: Evidence, loader: Loader) -> int:
    """The line at which to change the loader: its own, or that of the loader whose data set it took over."""
    return loader.taken_from if _is_taken_over(evidence, loader) else loader.constructed


def _is_taken_over(evidence: Evidence, loader: Loader) -> bool:
    """Whether a library made the loader over the data set of one that the script makes: Accelerate and Opacus do."""
    return loader.taken_from >= 0 and not editable_place(evidence, evidence.source_of(loader.constructed), edit)


def _is_stored(evidence: Evidence, loader: Loader) -> bool:
    """Whether all items become tensors at once, before the first step."""
    result = fetch_trial(evidence, evidence.loaders.index(loader))
    return result is not None and result.facts.get("stored", False) and not loader.has_own_collate


def _stored(evidence: Evidence, loader: Loader) -> Parameters:
    """How torchvision stores the images, where their tensors can be written as one formula; or that items can be stacked."""
    result = fetch_trial(evidence, evidence.loaders.index(loader))
    facts = result.facts if result is not None else {}
    colours = next((name for name in ("grey", "colour") if facts.get(f"stored_{name}")), None)
    if _is_taken_over(evidence, loader):
        return {"listed": True}
    if loader.has_own_collate:
        return {}
    if colours is None:
        return {"stacked": True} if facts.get("stackable") else {}
    return {"images": colours, "normalised": facts.get("normalised", False)}


def _steps_per_epoch(evidence: Evidence, loader: Loader) -> int:
    """Steps until each item of the loader's data set was made once."""
    result = fetch_trial(evidence, evidence.loaders.index(loader))
    num_items = result.parts.get("num_items", 0.0) if result is not None else 0.0
    each = loader.batch_size * loader.fetches
    return math.ceil(num_items / each) if each else 0


def _is_repeatable(evidence: Evidence, result: TrialResult) -> bool:
    facts = result.facts
    return bool(facts.get("repeatable") and facts.get("item_by_item", True)) and fits_memory(evidence, result)


def _items_fraction(loader: Loader, result: TrialResult) -> float:
    """The share of a batch's time that keeping takes away: all of it, or what is not the user's own collate function."""
    if not loader.has_own_collate or not result.now_s:
        return 1.0
    return max(0.0, 1.0 - result.parts.get("collate", 0.0) / result.now_s)


def apply(hooks: Hooks, parameters: Parameters) -> None:
    """Wrap the data sets of loaders in a cache of their items."""
    from torch.utils.data import DataLoader, IterableDataset

    from flatout.blocks.data.item_cache import CachedBatches, CachedItems, identity_collate

    names = parameters.get("datasets")
    wanted = names if isinstance(names, tuple) else ()

    def keep(kind: type, arguments: dict[str, Any]) -> None:
        dataset = arguments["dataset"]
        is_known = not wanted or type(dataset).__name__ in wanted
        is_iterated = isinstance(dataset, IterableDataset) or arguments.get("batch_size", 1) is None
        if not is_known or is_iterated or arguments.get("worker_init_fn") is not None:
            return
        if arguments.get("collate_fn") is None:
            arguments["dataset"], arguments["collate_fn"] = CachedBatches(dataset), identity_collate
        else:
            arguments["dataset"] = CachedItems(dataset)
        if arguments.get("persistent_workers"):
            lasting.append(arguments["dataset"])
        for name in WORKER_OPTIONS:
            arguments.pop(name, None)  # a worker's copy of what was kept would be lost with it
        hooks.note(LEVER.id)

    lasting: list[Any] = []
    hooks.at_construction(DataLoader, keep)
    hooks.replace(DataLoader, "__iter__", _once_seeded(DataLoader.__iter__, lasting))


def _once_seeded(original: Callable[[Any], Any], lasting: list[Any]) -> Callable[[Any], Any]:
    """`__iter__` of loaders: one whose workers would last draws a seed for them once, and not from every epoch's numbers."""
    import torch

    def __iter__(self: Any) -> Any:
        iterator = original(self)
        if any(dataset is self.dataset for dataset in lasting):
            self.generator = torch.Generator()
        return iterator

    return __iter__


def edit(text: str, parameters: Parameters) -> str:
    """Select rows of a TensorDataset, or of items that become one, by whole batches; put other items in a list.

    Other loaders in the file of the same items (those of tests and validation, between epochs) become the same: of images that
    torchvision stores alike, and of the other parts of a data set that was split.
    Raises EditError where the loader is not plainly made.
    """
    new, place = _with_one(text, parameters), find(text, parameters)
    others = loaders_of_like_images(place) if "images" in parameters else loaders_of_same_split(place)
    named = [(one["function"], one["code"]) for one in changed_places(parameters) if "code" in one]
    for other in others:
        where = {"function": other.scope or MODULE, "code": first_line(other.module, other.statement)}
        if tuple(where.values()) not in named:  # else its turn comes
            with contextlib.suppress(EditError):
                new = _with_one(new, {**parameters, **where})
    return new


def _with_one(text: str, parameters: Parameters) -> str:
    """The text with the loader that the parameters name changed."""
    place = find(text, parameters)
    target, value = assignment(place.statement) or (None, returned(place.statement))
    if not isinstance(value, cst.Call) or call_name(place.module, value.func) not in LOADER:
        raise EditError(f"'{string(parameters, 'code')}' does not make a loader alone")
    if target is not None and _dataset_is_read(place.module, target):
        raise EditError("the loader's dataset is read elsewhere")
    scope = place.function or place.module
    try:
        loader = LoaderCall(value, scope)
        dataset, has_collate = loader.dataset, loader.value("collate_fn") is not None
    except EditError:  # options that come from elsewhere: they go on to a loader of the same items
        loader, dataset, has_collate = None, value.args[0].value, False
        has_name = not value.args[0].star and not value.args[0].keyword and isinstance(dataset, cst.Name)
        if not has_name or (not parameters.get("stacked") and _is_rows(place.module, scope, dataset)):
            raise
    for word in ("worker_init_fn", "batch_sampler", "persistent_workers"):
        if loader is not None and loader.value(word) is not None:
            raise EditError(f"the loader is made with {word}")
    is_single = has_collate or bool(parameters.get("listed"))  # another loader takes its parts over, and expects items
    new: list[cst.BaseStatement] = []
    which = _which_loader(target)
    items = fresh_name(place.module, f"{which}items")
    is_rows = not is_single and _is_rows(place.module, scope, dataset)
    if not is_rows and not isinstance(dataset, cst.Name):
        name = fresh_name(place.module, f"{which}dataset")
        new += statements(f"{name} = {{dataset}}", dataset=dataset)
        dataset = cst.Name(name)
    are_tensors = is_rows or (not is_single and bool("images" in parameters or parameters.get("stacked")))
    if is_rows:
        tensors = code_of(dataset.with_changes(func=cst.Name("f"))) if isinstance(dataset, cst.Call) else ""
        new += statements(f"{items} = {_ROWS_CLASS}{tensors.removeprefix('f') or f'(*{code_of(dataset)}.tensors)'}")
    elif are_tensors:
        new += statements(f"{items} = {_ROWS_CLASS}({_whole(code_of(dataset), parameters)})")
    else:
        new += statements(f"{items} = [{code_of(dataset)}[i] for i in range(len({code_of(dataset)}))]")
    call = loader.of_items(items) if loader is not None else of_items_with_unknown_options(value, items)
    if are_tensors:
        call = with_argument(call, "collate_fn", cst.Name("list"))
    module = _with_loader(place, value, call, new)
    if are_tensors and not is_rows and "images" not in parameters:
        module = with_import(module, "torch.utils.data", "default_collate")
    return (_with_rows_class(module) if are_tensors else module).code


def _which_loader(target: cst.BaseExpression | None) -> str:
    """How the name of a loader begins, `test_` of a test_loader: names of what belongs to it begin alike."""
    name = target.value if isinstance(target, cst.Name) else ""
    return name.removesuffix("loader") if name.endswith("_loader") else ""


def _with_rows_class(module: cst.Module) -> cst.Module:
    """The file with the class that cuts whole batches, before its first use."""
    module, torch = with_torch(with_import(module, "torch.utils.data", "TensorDataset"))
    if any(one.name.value == _ROWS_CLASS for one in nodes_of(cst.ClassDef, module)):
        return module
    body = list(module.body)
    at = next(i for i, one in enumerate(body) if _ROWS_CLASS in names_in(one))
    (new,) = statements(_ROWS_TEXT.replace("torch.", f"{torch}."))
    return module.with_changes(body=[*body[:at], spaced(new, 2), spaced(body[at], 2), *body[at + 1 :]])


def _whole(data: str, parameters: Parameters) -> str:
    """All images and targets, as ToTensor and Normalize make them; or all items, stacked."""
    if "images" not in parameters:
        return f"*default_collate([{data}[i] for i in range(len({data}))])"
    is_grey = string(parameters, "images") == "grey"
    images = f"{data}.data[:, None]" if is_grey else f"torch.from_numpy({data}.data).permute(0, 3, 1, 2).contiguous()"
    images = f"{images}.float() / 255"
    targets = f"{data}.targets" if is_grey else f"torch.tensor({data}.targets)"
    normalised = f"{data}.transform.transforms[1]({images})" if parameters.get("normalised") else images
    return f"{normalised}, {targets}"


def _with_loader(
    place: SourcePlace, loader: cst.Call, call: cst.Call, before: Sequence[cst.BaseStatement]
) -> cst.Module:
    """The file with this call in the place of the loader's, and statements before it."""
    line = with_calls(cst.Module(body=[place.statement]), [loader], lambda _: call).body[0]  # type: ignore[list-item]
    assert isinstance(line, (cst.SimpleStatementLine, cst.BaseCompoundStatement))
    if not before:
        return with_changes(place.module, {place.statement: [line]})
    return with_changes(place.module, {place.statement: [*before, line.with_changes(leading_lines=())]})


def _dataset_is_read(module: cst.Module, loader: cst.BaseExpression) -> bool:
    """Whether something asks the loader for what the edit changes; how many items there are stays the same."""
    names = m.Name("dataset") | m.Name("batch_size") | m.Name("collate_fn") | m.Name("num_workers")
    found = m.findall(module, m.Attribute(attr=names))
    lengths = m.findall(module, m.Call(func=m.Name("len"), args=[m.Arg(m.Attribute(attr=m.Name("dataset")))]))
    counted = {id(call.args[0].value) for call in lengths}  # type: ignore[attr-defined]
    return any(code_of(f.value) == code_of(loader) for f in found if id(f) not in counted)  # type: ignore[attr-defined]


def _is_rows(module: cst.Module, scope: cst.CSTNode, dataset: cst.BaseExpression) -> bool:
    """Whether a name stands for a TensorDataset, wherever it is assigned."""
    constructor = [a for a in m.findall(scope, m.AnnAssign() | m.Assign()) if code_of(dataset) in targets_of(a)]
    values = [a.value for a in constructor]  # type: ignore[attr-defined]
    values = values or [dataset]
    return all(isinstance(v, cst.Call) and call_name(module, v.func) == _ROWS for v in values)


LEVER = lever(__name__, propose, apply=apply, edit=edit, title="Items made once, batches cut from tensors")
