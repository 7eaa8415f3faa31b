"""What a query may see, as an algebra: structures joined by `&`, `|` and `~`.

Each structure says the same three times: as a function of one query and one key (`mod`, what FlexAttention calls a mask_mod), as
sets of keys by row (`bounds`), and by name (`signature`), which tells whether two masks can share compiled code.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable
from typing import Any, Final, NamedTuple, TypeVar

import torch
from torch import Tensor

from flatout.errors import UsageError
from flatout.kernels.attention.sets import KeySets, everything, nothing

_NUM_KEPT: Final = 32
"""Things made of one mask, for some lengths and devices at a time."""

Kept = TypeVar("Kept")
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(batch, head, query, key), integer tensors that broadcast, to bool."""


class Sizes(NamedTuple):
    """Of the rows that sets are made for: R = batch x heads x queries, in this order. `device` is where they are made."""

    batch: int
    heads: int
    queries: int
    keys: int
    device: torch.device

    @property
    def num_rows(self) -> int:
        """R."""
        return self.batch * self.heads * self.queries

    def of_each_row(self, values: Tensor) -> Tensor:
        """(R,) from what broadcasts to (batch, heads, queries)."""
        return values.to(self.device).expand(self.batch, self.heads, self.queries).reshape(-1)

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
    """Which keys a query sees. Joined by `&` (both), `|` (either), `~` (not)."""

    batch: int = 1
    """Samples that it tells apart; 1 where it is the same for all."""
    heads: int = 1
    """Heads that it tells apart."""
    is_formula: bool = True
    """Whether `mod` is arithmetic and indexing, which a kernel can do for each pair; else it is given the mask as bits."""

    @property
    def has_contiguous_blocks(self) -> bool:
        """Whether full blocks lie side by side in each row and column of blocks, and so do partial ones, at all lengths that are
        multiples of the block: a block that is cut off counts as partial."""
        return False

    @abstractmethod
    def mod(self) -> MaskMod:
        """The mask as a function; its tensors are in the function's closure."""

    @abstractmethod
    def bounds(self, sizes: Sizes) -> Bounds:
        """The mask as sets of keys by row, as closely as they can be had in time proportional to the intervals."""

    @property
    @abstractmethod
    def signature(self) -> Hashable:
        """Equal for masks whose functions differ in nothing but the contents of tensors."""

    @abstractmethod
    def to(self, device: torch.device) -> Mask:
        """The same with its tensors there."""

    def blocks(self, sizes: Sizes, block: int) -> tuple[Tensor, Tensor, Tensor] | None:
        """(row, col, is_full) of the blocks that it touches, sorted; None where they follow from the bounds."""
        return None

    def keep(self, key: Hashable, make: Callable[[], Kept]) -> Kept:
        """What `make` makes of this mask, kept with it for the last keys asked for: layers and steps share it."""
        kept: dict[Hashable, Any] = self.__dict__.setdefault("_kept", {})
        if key not in kept:
            made = make()
            while len(kept) >= _NUM_KEPT:
                kept.pop(next(iter(kept)))
            kept[key] = made
        found: Kept = kept[key]
        return found

    def check(self, queries: int, keys: int) -> None:  # noqa: B027 -- most structures fit every length
        """Raise UsageError where the mask is for other lengths."""

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

    def at(self, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        """Whether each query sees each key: bool, of the shape that the four indices broadcast to."""
        shape = torch.broadcast_shapes(b.shape, h.shape, q.shape, kv.shape)
        return torch.as_tensor(self.mod()(b, h, q, kv), device=q.device).expand(shape)

    def dense(self, queries: int, keys: int, device: torch.device | str = "cpu") -> Tensor:
        """(batch, heads, queries, keys), bool: for tests and small examples, since it is what a Mask is there to avoid."""
        here = torch.device(device)
        index = [torch.arange(n, device=here) for n in (self.batch, self.heads, queries, keys)]
        places = [i.view([-1 if d == at else 1 for d in range(4)]) for at, i in enumerate(index)]
        return self.to(here).at(places[0], places[1], places[2], places[3])


def _mask(given: Any) -> Mask:
    if not isinstance(given, Mask):
        raise UsageError(f"{given!r} is no mask; make one of a function with flatout.masks.custom(function)")
    return given


class _Joined(Mask):
    def __init__(self, *parts: Mask) -> None:
        self.parts = parts
        self.batch, self.heads = _common("batch", parts), _common("heads", parts)
        self.is_formula = all(part.is_formula for part in parts)

    @property
    def signature(self) -> Hashable:
        return (type(self).__name__, *(part.signature for part in self.parts))

    def to(self, device: torch.device) -> Mask:
        return type(self)(*(part.to(device) for part in self.parts))

    def check(self, queries: int, keys: int) -> None:
        for part in self.parts:
            part.check(queries, keys)


class Both(_Joined):
    """What both let through."""

    def mod(self) -> MaskMod:
        one, two = (part.mod() for part in self.parts)
        return lambda b, h, q, kv: one(b, h, q, kv) & two(b, h, q, kv)

    def bounds(self, sizes: Sizes) -> Bounds:
        one, two = (part.bounds(sizes) for part in self.parts)
        surely = one.surely & two.surely
        return Bounds(surely, surely if one.is_exact and two.is_exact else one.perhaps & two.perhaps)

    def __repr__(self) -> str:
        return " & ".join(_inner(part) for part in self.parts)


class Either(_Joined):
    """What one of the two lets through."""

    def mod(self) -> MaskMod:
        one, two = (part.mod() for part in self.parts)
        return lambda b, h, q, kv: one(b, h, q, kv) | two(b, h, q, kv)

    def bounds(self, sizes: Sizes) -> Bounds:
        one, two = (part.bounds(sizes) for part in self.parts)
        surely = one.surely | two.surely
        return Bounds(surely, surely if one.is_exact and two.is_exact else one.perhaps | two.perhaps)

    def __repr__(self) -> str:
        return " | ".join(_inner(part) for part in self.parts)


class Not(_Joined):
    """What the other one keeps out."""

    def mod(self) -> MaskMod:
        (one,) = (part.mod() for part in self.parts)
        return lambda b, h, q, kv: ~one(b, h, q, kv)

    def bounds(self, sizes: Sizes) -> Bounds:
        (one,) = (part.bounds(sizes) for part in self.parts)
        surely = ~one.perhaps
        return Bounds(surely, surely if one.is_exact else ~one.surely)

    def __repr__(self) -> str:
        return f"~{_inner(self.parts[0])}"


def _inner(part: Mask) -> str:
    return f"({part!r})" if isinstance(part, (Both, Either)) else repr(part)


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
    num_rows, num_keys, device = sizes.num_rows, sizes.keys, sizes.device
    return Bounds(nothing(num_rows, num_keys, device), everything(num_rows, num_keys, device))
