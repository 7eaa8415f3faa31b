"""What a query may see, as an algebra: structures joined by `&`, `|` and `~`.

Each structure says the same three times: as a function of one query and one key (`mod`, what FlexAttention calls a mask_mod), as
sets of keys by row (`bounds`), and by name (`signature`), which tells whether two masks can share compiled code.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Sequence
from copy import copy
from operator import and_, or_
from typing import Any, ClassVar, Final, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from flatout.blocks.kernels.attention.sets import KeySets, every_key
from flatout.core.errors import UsageError

_NUM_CACHED: Final = 32
"""Things made of one mask, for some lengths and devices at a time."""

Cached = TypeVar("Cached")
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(batch, head, query, key), integer tensors that broadcast, to bool."""


class Sizes(NamedTuple):
    """Sizes of the rows that sets are built for: R = batch x heads x queries, in this order. `device` is where they are made."""

    batch: int
    heads: int
    queries: int
    keys: int
    device: torch.device

    @property
    def num_rows(self) -> int:
        """Rows of queries of all samples and heads, R."""
        return self.batch * self.heads * self.queries

    def of_each_row(self, values: Tensor) -> Tensor:
        """(R,) from what broadcasts to (batch, heads, queries)."""
        return values.to(self.device).expand(self.batch, self.heads, self.queries).reshape(-1)

    def of_each_group(self, row: Tensor, lo: Tensor, hi: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Intervals (row, lo, hi) of one sample and head, repeated for all."""
        groups = torch.arange(self.batch * self.heads, device=self.device) * self.queries
        num = groups.numel()
        return (groups[:, None] + row).reshape(-1), lo.repeat(num), hi.repeat(num)

    @property
    def query(self) -> Tensor:
        """(queries,): 0, 1, 2, ..."""
        return torch.arange(self.queries, device=self.device)


class Bounds(NamedTuple):
    """Keys that are seen for certain, and keys that may be. One and the same object where nothing is left open."""

    surely: KeySets
    perhaps: KeySets

    @property
    def is_exact(self) -> bool:
        """Whether the sets are the mask."""
        return self.surely is self.perhaps


class Mask(ABC):
    """The keys that each query sees. Joined by `&` (both), `|` (either), `~` (not)."""

    def __init__(self, name: str, signature: Hashable, *, batch: int = 1, heads: int = 1) -> None:
        """`batch`, `heads`: samples and heads that it tells apart; 1 where it is the same for all.

        Signatures are equal for masks whose functions differ in nothing but the contents of tensors.
        """
        self.name, self.signature, self.batch, self.heads = name, signature, batch, heads
        self.parts: tuple[Mask, ...] = ()
        self.num_tokens: int | None = None  # queries and keys, where it is for no other number of them
        self.is_formula = True
        """Whether `mod` is arithmetic and indexing, which a kernel can do for each pair; else it is given the mask as bits."""
        self.has_contiguous_blocks = False
        """Whether full blocks lie side by side in each row and column of blocks, and so do partial ones, at all lengths that are
        multiples of the block: a block that is cut off counts as partial."""

    @abstractmethod
    def mod(self) -> MaskMod:
        """The mask as a function; its tensors are in the function's closure."""

    @abstractmethod
    def bounds(self, sizes: Sizes) -> Bounds:
        """The mask as sets of keys by row, as closely as they can be had in time proportional to the intervals."""

    def to(self, device: torch.device) -> Mask:
        """The same with its tensors there."""
        moved = copy(self)
        moved.__dict__ = {name: _moved(value, device) for name, value in vars(self).items() if name != "_cached"}
        return moved

    def blocks(self, sizes: Sizes, block: int) -> tuple[Tensor, Tensor, Tensor] | None:
        """(row, col, is_full) of the blocks that it touches, sorted; None where they follow from the bounds."""
        return None

    def keep(self, key: Hashable, make: Callable[[], Cached]) -> Cached:
        """What `make` makes of this mask, kept with it for the last keys asked for: layers and steps share it."""
        cached: dict[Hashable, Any] = self.__dict__.setdefault("_cached", {})
        if key not in cached:
            built = make()
            while len(cached) >= _NUM_CACHED:
                cached.pop(next(iter(cached)))
            cached[key] = built
        found: Cached = cached[key]
        return found

    def check(self, queries: int, keys: int) -> None:
        """Raise UsageError where the mask is for other lengths."""
        if self.num_tokens is not None and not queries == keys == self.num_tokens:
            raise UsageError(
                f"{self!r} is of {self.num_tokens} tokens, and there are {queries} queries and {keys} keys; "
                "give attention the tokens that it is made of"
            )
        for part in self.parts:
            part.check(queries, keys)

    def __and__(self, other: Mask) -> Mask:
        return Both(self, _mask(other))

    def __or__(self, other: Mask) -> Mask:
        return Either(self, _mask(other))

    def __invert__(self) -> Mask:
        return Not(self)

    def __rand__(self, other: Any) -> Mask:
        return Both(_mask(other), self)

    def __ror__(self, other: Any) -> Mask:
        return Either(_mask(other), self)

    def __repr__(self) -> str:
        return self.name

    def at(self, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        """Whether each query sees each key: bool, of the shape that the four indices broadcast to."""
        shape = torch.broadcast_shapes(b.shape, h.shape, q.shape, kv.shape)
        return torch.as_tensor(self.mod()(b, h, q, kv), device=q.device).expand(shape)

    def dense(self, queries: int, keys: int, device: torch.device | str = "cpu") -> Tensor:
        """(batch, heads, queries, keys), bool: for tests and small examples, since it is what a Mask is there to avoid."""
        here = torch.device(device)
        return self.to(here).at(*every_index(self.batch, self.heads, queries, keys, device=here))


def every_index(*sizes: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Samples, heads, queries and keys, each in a dimension of its own."""
    b, h, q, kv = (torch.arange(n, device=device) for n in sizes)
    return b[:, None, None, None], h[:, None, None], q[:, None], kv


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor there. One of the CPU is copied to a GPU from pinned memory, and nobody waits."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, tuple):
        return tuple(_moved(part, device) for part in value)
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    return value.to(device) if isinstance(value, Mask) else value


def _mask(candidate: Any) -> Mask:
    if not isinstance(candidate, Mask):
        raise UsageError(f"{candidate!r} is no mask; make one of a function with flatout.masks.custom(function)")
    return candidate


class _Joined(Mask):
    def __init__(self, name: str, *parts: Mask) -> None:
        signature = (type(self).__name__, *(part.signature for part in parts))
        super().__init__(name, signature, batch=_common("batch", parts), heads=_common("heads", parts))
        self.parts, self.is_formula = parts, all(part.is_formula for part in parts)


class _Pair(_Joined):
    symbol: ClassVar[str]
    joined: ClassVar[Callable[[Any, Any], Any]]

    def __init__(self, one: Mask, two: Mask) -> None:
        super().__init__(f"{_inner(one)} {self.symbol} {_inner(two)}", one, two)

    def mod(self) -> MaskMod:
        joined, one, two = type(self).joined, *(part.mod() for part in self.parts)
        return lambda b, h, q, kv: joined(one(b, h, q, kv), two(b, h, q, kv))

    def bounds(self, sizes: Sizes) -> Bounds:
        one, two = (part.bounds(sizes) for part in self.parts)
        surely = type(self).joined(one.surely, two.surely)
        is_exact = one.is_exact and two.is_exact
        return Bounds(surely, surely if is_exact else type(self).joined(one.perhaps, two.perhaps))


class Both(_Pair):
    """The pairs that both masks let through."""

    symbol = "&"
    joined = and_


class Either(_Pair):
    """The pairs that one of two masks lets through."""

    symbol = "|"
    joined = or_


class Not(_Joined):
    """The pairs that another mask hides."""

    def __init__(self, part: Mask) -> None:
        super().__init__(f"~{_inner(part)}", part)

    def mod(self) -> MaskMod:
        (one,) = (part.mod() for part in self.parts)
        return lambda b, h, q, kv: ~one(b, h, q, kv)

    def bounds(self, sizes: Sizes) -> Bounds:
        (one,) = (part.bounds(sizes) for part in self.parts)
        surely = ~one.perhaps
        return Bounds(surely, surely if one.is_exact else ~one.surely)


class Stacked(Mask):
    """One mask a head, or one a sample."""

    def __init__(self, masks: Sequence[Mask], *, by: Literal["batch", "heads"]) -> None:
        other = "heads" if by == "batch" else "batch"
        across = {getattr(mask, other) for mask in masks} - {1}
        if {getattr(mask, by) for mask in masks} != {1} or len(across) > 1:
            raise UsageError(f"masks to be stacked by {by} must be the same for all {by}, and of one size in {other}")
        name = f"per_{'head' if by == 'heads' else 'sample'}({', '.join(map(repr, masks))})"
        sizes = {by: len(masks), other: across.pop() if across else 1}
        super().__init__(name, ("stacked", by, *(mask.signature for mask in masks)), **sizes)
        self.by, self.parts, self.is_formula = by, tuple(masks), all(mask.is_formula for mask in masks)

    def mod(self) -> MaskMod:
        mods, by_head = [mask.mod() for mask in self.parts], self.by == "heads"

        def function(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            which = h if by_head else b
            visible = (which == 0) & mods[0](b, h, q, kv)
            for number, mod in enumerate(mods[1:], start=1):
                visible = visible | ((which == number) & mod(b, h, q, kv))
            return visible

        return function

    def bounds(self, sizes: Sizes) -> Bounds:
        of_one = sizes._replace(batch=1) if self.by == "batch" else sizes._replace(heads=1)
        parts = [mask.bounds(of_one) for mask in self.parts]
        surely = self._interleaved([part.surely for part in parts], sizes)
        if all(part.is_exact for part in parts):
            return exact(surely)
        return Bounds(surely, self._interleaved([part.perhaps for part in parts], sizes))

    def _interleaved(self, parts: list[KeySets], sizes: Sizes) -> KeySets:
        listed = []
        for number, part in enumerate(parts):
            row, lo, hi = part.listed()
            if self.by == "heads":
                sample, query = row // sizes.queries, row % sizes.queries
                row = (sample * sizes.heads + number) * sizes.queries + query
            else:
                row = row + number * sizes.heads * sizes.queries
            listed.append((row, lo, hi))
        row, lo, hi = (torch.cat(some) for some in zip(*listed, strict=True))
        row, order = row.sort(stable=True)
        return KeySets(sizes.num_rows, sizes.keys, row, lo[order], hi[order])


def _inner(part: Mask) -> str:
    return f"({part!r})" if isinstance(part, _Pair) else repr(part)


def _common(name: str, parts: Iterable[Mask]) -> int:
    sizes = {getattr(part, name) for part in parts} - {1}
    if len(sizes) > 1:
        raise UsageError(
            f"masks of {' and '.join(map(str, sorted(sizes)))} {name} cannot be joined; make them of one size"
        )
    return sizes.pop() if sizes else 1


def exact(sets: KeySets) -> Bounds:
    """Bounds that leave nothing open."""
    return Bounds(sets, sets)


def unknown(sizes: Sizes) -> Bounds:
    """Bounds that leave everything open: the mask is then looked at block by block."""
    none = torch.zeros(0, dtype=torch.int64, device=sizes.device)
    surely = KeySets(sizes.num_rows, sizes.keys, none, none, none)
    return Bounds(surely, every_key(sizes.num_rows, sizes.keys, sizes.device))
