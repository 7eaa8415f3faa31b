"""The structures that masks are made of, each with the sets of keys that its rows see."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from flatout.errors import UsageError
from flatout.kernels.attention.mask import Bounds, Mask, MaskMod, Sizes, exact, unknown
from flatout.kernels.attention.sets import KeySets, everything, merged, one_interval


class Everything(Mask):
    """Every key."""

    @property
    def has_contiguous_blocks(self) -> bool:
        return True

    def mod(self) -> MaskMod:
        return lambda b, h, q, kv: (q >= 0) & (kv >= 0)

    def bounds(self, sizes: Sizes) -> Bounds:
        return exact(everything(sizes.num_rows, sizes.keys, sizes.device))

    @property
    def signature(self) -> Hashable:
        return "everything"

    def to(self, device: torch.device) -> Mask:
        return self

    def __repr__(self) -> str:
        return "everything()"


class Window(Mask):
    """The keys from `left` before the query to `right` after it, None for all on that side; (1|B, 1|H) tensors or numbers."""

    def __init__(self, left: int | Tensor | None, right: int | Tensor | None) -> None:
        self.left, self.right = _by_head("left", left), _by_head("right", right)
        for side in (self.left, self.right):
            if isinstance(side, Tensor):
                self.batch, self.heads = max(self.batch, side.size(0)), max(self.heads, side.size(1))

    def mod(self) -> MaskMod:
        left, right = self.left, self.right
        if left is None and right is None:
            return Everything().mod()
        if left is None:
            return lambda b, h, q, kv: q >= kv - _of(right, b, h)
        if right is None:
            return lambda b, h, q, kv: q <= kv + _of(left, b, h)
        return lambda b, h, q, kv: (q <= kv + _of(left, b, h)) & (q >= kv - _of(right, b, h))

    def bounds(self, sizes: Sizes) -> Bounds:
        q = sizes.query
        lo = torch.zeros_like(q) if self.left is None else q - _of_all(self.left, sizes.device)
        hi = torch.full_like(q, sizes.keys) if self.right is None else q + _of_all(self.right, sizes.device) + 1
        return exact(one_interval(sizes.of_each_row(lo), sizes.of_each_row(hi), sizes.keys))

    @property
    def signature(self) -> Hashable:
        return ("window", *(tuple(s.shape) if isinstance(s, Tensor) else s for s in (self.left, self.right)))

    def to(self, device: torch.device) -> Mask:
        return Window(*(s.to(device) if isinstance(s, Tensor) else s for s in (self.left, self.right)))

    @property
    def has_contiguous_blocks(self) -> bool:
        return self.is_causal

    @property
    def is_causal(self) -> bool:
        """Whether it is every key up to the query's own place."""
        return self.left is None and self.right is not None and not isinstance(self.right, Tensor) and self.right == 0

    def __repr__(self) -> str:
        if self.is_causal:
            return "causal()"
        sides = ("(by head)" if isinstance(s, Tensor) else s for s in (self.left, self.right))
        return "window({}, {})".format(*sides)


class Leading(Mask):
    """The first keys: a prefix, or attention sinks. A number, or (1|B, 1|H)."""

    def __init__(self, num: Tensor, *, name: str) -> None:
        self.num, self._name = num, name
        self.batch, self.heads = num.shape

    def mod(self) -> MaskMod:
        num = self.num
        return lambda b, h, q, kv: (kv < _of(num, b, h)) & (q >= 0)

    def bounds(self, sizes: Sizes) -> Bounds:
        hi = sizes.of_each_row(self.num.to(sizes.device, torch.int64)[:, :, None])
        return exact(one_interval(torch.zeros_like(hi), hi, sizes.keys))

    @property
    def signature(self) -> Hashable:
        return ("leading", tuple(self.num.shape))

    def to(self, device: torch.device) -> Mask:
        return Leading(self.num.to(device, non_blocking=True), name=self._name)

    def __repr__(self) -> str:
        return f"{self._name}({self.num.item() if self.num.numel() == 1 and self.num.device.type == 'cpu' else '...'})"


class Documents(Mask):
    """The keys of the query's own document: `ids` (S,) or (B, S), or `offsets` (N + 1,) on the CPU, where documents lie in a row.

    Of offsets, ids are made when somebody asks for them, on the device where they are wanted.
    """

    def __init__(
        self, ids: Tensor | None, *, offsets: Tensor | None = None, device: torch.device | None = None
    ) -> None:
        self._ids, self.offsets, self._device = ids, offsets, device
        self.batch = ids.size(0) if ids is not None and ids.dim() == 2 else 1

    @property
    def ids(self) -> Tensor:
        """The document's number of each token."""
        if self._ids is None:
            assert self.offsets is not None
            numbers = torch.arange(self.offsets.numel() - 1, dtype=torch.int32)
            numbers = numbers.repeat_interleave(self.offsets.diff())
            self._ids = numbers if self._device is None else numbers.to(self._device, non_blocking=True)
        return self._ids

    @property
    def num_tokens(self) -> int:
        """S."""
        return self._ids.size(-1) if self._ids is not None else int(self.offsets[-1])  # type: ignore[index]

    def mod(self) -> MaskMod:
        ids = self.ids
        if ids.dim() == 1:
            return lambda b, h, q, kv: ids[q] == ids[kv]
        return lambda b, h, q, kv: ids[b, q] == ids[b, kv]

    def bounds(self, sizes: Sizes) -> Bounds:
        if self.offsets is not None:
            start, end = self._by_offsets(sizes)
        else:
            found = self._by_ids(sizes)
            if found is None:
                return unknown(
                    sizes
                )  # a document in many parts: its rows times its parts may be as many as rows times keys
            start, end = found
        return exact(one_interval(sizes.of_each_row(start), sizes.of_each_row(end), sizes.keys))

    def _by_offsets(self, sizes: Sizes) -> tuple[Tensor, Tensor]:
        assert self.offsets is not None
        offsets = self.offsets.to(sizes.device, torch.int64)
        lengths = offsets.diff()
        of_token = [
            bound.repeat_interleave(lengths, output_size=sizes.queries) for bound in (offsets[:-1], offsets[1:])
        ]
        return of_token[0], of_token[1]

    def _by_ids(self, sizes: Sizes) -> tuple[Tensor, Tensor] | None:
        ids = self.ids.to(sizes.device).reshape(-1, self.ids.size(-1))
        is_start = torch.ones_like(ids, dtype=torch.bool)
        is_start[:, 1:] = ids[:, 1:] != ids[:, :-1]
        sample, start = is_start.nonzero().unbind(1)
        names = torch.stack([sample, ids[is_start].to(torch.int64)])
        if names.unique(dim=1).size(1) < names.size(1):
            return None
        end = torch.cat([start[1:], start.new_full((1,), sizes.queries)])
        end = end.where(end > 0, sizes.queries)  # the next sample's first document begins at 0
        number = is_start.reshape(-1).cumsum(0) - 1
        shape = (-1, 1, sizes.queries)
        return start[number].view(shape), end[number].view(shape)

    @property
    def signature(self) -> Hashable:
        return ("documents", 1 if self._ids is None else self._ids.dim())

    def to(self, device: torch.device) -> Mask:
        if self._ids is None:
            return Documents(None, offsets=self.offsets, device=device)
        return Documents(self._ids.to(device, non_blocking=True), offsets=self.offsets)

    def check(self, queries: int, keys: int) -> None:
        if not queries == keys == self.num_tokens:
            raise UsageError(
                f"the documents have {self.num_tokens} tokens, and there are {queries} queries and {keys} keys; "
                "give attention the tokens that the documents are made of"
            )

    def __repr__(self) -> str:
        return f"documents({'...' if self.offsets is None else self.offsets.numel() - 1})"


class Global(Mask):
    """Every key for some queries, and their keys for every query: `is_global` (S,), bool."""

    def __init__(self, is_global: Tensor) -> None:
        self.is_global = is_global

    def mod(self) -> MaskMod:
        is_global = self.is_global
        return lambda b, h, q, kv: is_global[q] | is_global[kv]

    def bounds(self, sizes: Sizes) -> Bounds:
        flags = self.is_global.to(sizes.device)
        sets = _runs_of(flags[None])
        rows = torch.arange(sizes.num_rows, device=sizes.device)
        num = sets.lo.numel()
        each = KeySets(
            sizes.num_rows,
            sizes.keys,
            rows.repeat_interleave(num),
            sets.lo.repeat(len(rows)),
            sets.hi.repeat(len(rows)),
        )
        hi = sizes.of_each_row(flags.to(torch.int64) * sizes.keys)
        return exact(each | one_interval(torch.zeros_like(hi), hi, sizes.keys))

    @property
    def signature(self) -> Hashable:
        return "global"

    def to(self, device: torch.device) -> Mask:
        return Global(self.is_global.to(device, non_blocking=True))

    def check(self, queries: int, keys: int) -> None:
        if not queries == keys == self.is_global.numel():
            raise UsageError(f"there are flags for {self.is_global.numel()} tokens, {queries} queries and {keys} keys")

    def __repr__(self) -> str:
        return "global_tokens(...)"


class Dilated(Mask):
    """Every `step`th key before and after the query, its own among them."""

    def __init__(self, step: int) -> None:
        self.step = step

    def mod(self) -> MaskMod:
        step = self.step
        return lambda b, h, q, kv: (q - kv) % step == 0

    def bounds(self, sizes: Sizes) -> Bounds:
        return exact(everything(sizes.num_rows, sizes.keys, sizes.device)) if self.step == 1 else unknown(sizes)

    @property
    def signature(self) -> Hashable:
        return ("dilated", self.step)

    def to(self, device: torch.device) -> Mask:
        return self

    def __repr__(self) -> str:
        return f"dilated({self.step})"


class Blocks(Mask):
    """Squares of `size` queries by `size` keys: `layout` (1|B, 1|H, queries / size, keys / size), bool."""

    def __init__(self, layout: Tensor, size: int) -> None:
        self.layout, self.size = layout, size
        self.batch, self.heads = layout.shape[:2]

    def mod(self) -> MaskMod:
        layout, size = self.layout, self.size
        batch, heads = layout.size(0) > 1, layout.size(1) > 1
        return lambda b, h, q, kv: layout[b if batch else 0 * b, h if heads else 0 * h, q // size, kv // size]

    def bounds(self, sizes: Sizes) -> Bounds:
        rows = self.layout.to(sizes.device).expand(sizes.batch, sizes.heads, -1, -1)
        sets = _runs_of(rows.flatten(0, 2))
        assert sets.row is not None
        # each row of squares is `size` rows of queries, the last perhaps fewer
        group, square = sets.row // rows.size(2), sets.row % rows.size(2)
        first = square * self.size
        num = (sizes.queries - first).clamp(max=self.size)
        each = num.cumsum(0) - num
        at = torch.arange(int(num.sum()), device=sizes.device) - each.repeat_interleave(num)
        row = (group * sizes.queries + first).repeat_interleave(num) + at
        lo, hi = ((bound * self.size).clamp(max=sizes.keys).repeat_interleave(num) for bound in (sets.lo, sets.hi))
        return exact(merged(row, lo, hi, num_rows=sizes.num_rows, num_keys=sizes.keys))

    @property
    def signature(self) -> Hashable:
        return ("blocks", self.size, self.layout.size(0) > 1, self.layout.size(1) > 1)

    def to(self, device: torch.device) -> Mask:
        return Blocks(self.layout.to(device, non_blocking=True), self.size)

    def check(self, queries: int, keys: int) -> None:
        for what, num, squares in (("queries", queries, self.layout.size(2)), ("keys", keys, self.layout.size(3))):
            if -(-num // self.size) != squares:
                raise UsageError(
                    f"a layout of {squares} squares of {self.size} does not fit {num} {what}; give {-(-num // self.size)}"
                )

    def __repr__(self) -> str:
        return f"blocks({'x'.join(map(str, self.layout.shape[2:]))}, {self.size})"


class Custom(Mask):
    """Any function of (batch, head, query, key), as FlexAttention takes it. It is looked at block by block."""

    def __init__(self, function: MaskMod, *, batch: int, heads: int) -> None:
        self.function, self.batch, self.heads = function, batch, heads

    def mod(self) -> MaskMod:
        return self.function

    def bounds(self, sizes: Sizes) -> Bounds:
        return unknown(sizes)

    @property
    def signature(self) -> Hashable:
        return ("custom", self.function.__code__ if hasattr(self.function, "__code__") else self.function)

    def to(self, device: torch.device) -> Mask:
        return self  # what the function holds is the caller's

    def __repr__(self) -> str:
        return f"custom({getattr(self.function, '__name__', '...')})"


def _runs_of(flags: Tensor) -> KeySets:
    """The runs of true values of each row of (R, K)."""
    edges = torch.zeros(flags.size(0), flags.size(1) + 1, dtype=torch.int8, device=flags.device)
    edges[:, :-1] += flags
    edges[:, 1:] -= flags.to(torch.int8)
    row, lo = (edges == 1).nonzero().unbind(1)
    return KeySets(flags.size(0), flags.size(1), row, lo, (edges == -1).nonzero()[:, 1])


def _by_head(name: str, value: int | Tensor | None) -> int | Tensor | None:
    if isinstance(value, Tensor):
        if value.dim() != 2 or value.is_floating_point():
            raise UsageError(
                f"{name} is a {value.dtype} tensor of shape {tuple(value.shape)}; give integers (1 or B, 1 or H)"
            )
        return value
    if value is not None and value < 0:
        raise UsageError(f"{name} is {value}; give 0 or more keys, or None for all on that side")
    return value


def _of(value: int | Tensor | None, b: Tensor, h: Tensor) -> Tensor | int:
    """Of one batch entry and head."""
    if not isinstance(value, Tensor):
        assert value is not None
        return value
    return value[b if value.size(0) > 1 else 0 * b, h if value.size(1) > 1 else 0 * h]


def _of_all(value: int | Tensor, device: torch.device) -> Tensor | int:
    """To be joined with (queries,)."""
    return value.to(device)[:, :, None] if isinstance(value, Tensor) else value
