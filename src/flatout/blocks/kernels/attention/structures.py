"""The structures that masks are made of, each with the sets of keys that its rows see, and the bands that plain kernels know."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flatout.blocks.kernels.attention.mask import Both, Bounds, Mask, MaskMod, Sizes, exact, unknown
from flatout.blocks.kernels.attention.sets import KeySets, covered, every_key, one_interval
from flatout.core.errors import UsageError


class Everything(Mask):
    """A mask that shows every key to every query."""

    def __init__(self) -> None:
        super().__init__("everything()", "everything")
        self.has_contiguous_blocks = True

    def mod(self) -> MaskMod:
        return lambda b, h, q, kv: (q >= 0) & (kv >= 0)

    def bounds(self, sizes: Sizes) -> Bounds:
        return exact(every_key(sizes.num_rows, sizes.keys, sizes.device))


class Window(Mask):
    """The keys from `left` before the query to `right` after it, None for all on that side; (1|B, 1|H) tensors or numbers."""

    def __init__(self, left: int | Tensor | None, right: int | Tensor | None) -> None:
        self.left, self.right = sides = _by_head("left", left), _by_head("right", right)
        shapes = [tuple(side.shape) for side in sides if isinstance(side, Tensor)]
        batch, heads = (max(num) for num in zip((1, 1), *shapes, strict=True))
        # every key up to the query's own place
        self.is_causal = left is None and not isinstance(right, Tensor) and right == 0
        words = ("(by head)" if isinstance(side, Tensor) else side for side in sides)
        signature = ("window", *(tuple(side.shape) if isinstance(side, Tensor) else side for side in sides))
        name = "causal()" if self.is_causal else "window({}, {})".format(*words)
        super().__init__(name, signature, batch=batch, heads=heads)
        self.has_contiguous_blocks = self.is_causal

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


class Leading(Mask):
    """The first keys: a prefix, or attention sinks. A number, or (1|B, 1|H)."""

    def __init__(self, num: Tensor, *, name: str) -> None:
        batch, heads = num.shape
        words = num.item() if num.numel() == 1 and num.device.type == "cpu" else "..."
        super().__init__(f"{name}({words})", ("leading", batch, heads), batch=batch, heads=heads)
        self.num = num

    def mod(self) -> MaskMod:
        num = self.num
        return lambda b, h, q, kv: (kv < _of(num, b, h)) & (q >= 0)

    def bounds(self, sizes: Sizes) -> Bounds:
        hi = sizes.of_each_row(self.num.to(sizes.device, torch.int64)[:, :, None])
        return exact(one_interval(torch.zeros_like(hi), hi, sizes.keys))


class Documents(Mask):
    """The keys of the query's own document: `ids` (S,) or (B, S), or `offsets` (N + 1,) on the CPU, where documents lie in a row.

    Of offsets, ids are made when somebody asks for them, where these are.
    """

    def __init__(self, ids: Tensor | None, *, offsets: Tensor | None = None) -> None:
        dim = 1 if ids is None else ids.dim()
        name = f"documents({'...' if offsets is None else offsets.numel() - 1})"
        super().__init__(name, ("documents", dim), batch=ids.size(0) if ids is not None and dim == 2 else 1)
        self._ids, self.offsets = ids, offsets
        self.num_tokens = self._length = ids.size(-1) if ids is not None else int(offsets[-1])  # type: ignore[index]

    @property
    def ids(self) -> Tensor:
        """The document's number of each token."""
        if self._ids is None:
            assert self.offsets is not None
            numbers = torch.arange(self.offsets.numel() - 1, dtype=torch.int32, device=self.offsets.device)
            self._ids = numbers.repeat_interleave(self.offsets.diff(), output_size=self.num_tokens)
        return self._ids

    @property
    def is_in_rows(self) -> bool:
        """Whether each document lies in a row. Ids on a GPU make the host wait, the first time."""
        return self.offsets is not None or self._first_tokens() is not None

    def starts(self, batch: int) -> Tensor:
        """The first tokens of the documents of `batch` samples that lie behind one another, (N,) int64; see `is_in_rows`."""
        first = self.offsets[:-1] if self.offsets is not None else self._first_tokens()
        assert first is not None
        if self.batch > 1:
            return first
        samples = torch.arange(batch, device=first.device)[:, None] * self._length
        return (samples + first).reshape(-1)

    def _first_tokens(self) -> Tensor | None:
        return self.keep("first tokens", self._found_first_tokens)

    def _found_first_tokens(self) -> Tensor | None:
        """Where documents begin, counted through all samples that ids are of."""
        ids = self.ids.reshape(-1, self._length)
        is_start = _is_start(ids)
        start = is_start.reshape(-1).nonzero().squeeze(1)
        names = torch.stack([start // max(1, self._length), ids[is_start].to(torch.int64)])
        return start if names.unique(dim=1).size(1) == names.size(1) else None

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
                return unknown(sizes)  # a document's rows times its parts may be as many as rows times keys
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
        first = self._first_tokens()
        if first is None:
            return None
        is_start = _is_start(ids)
        start = first.to(sizes.device) % self._length
        end = torch.cat([start[1:], start.new_full((1,), sizes.queries)])
        end = end.where(end > 0, sizes.queries)  # the next sample's first document begins at 0
        number = is_start.reshape(-1).cumsum(0) - 1
        shape = (-1, 1, sizes.queries)
        return start[number].view(shape), end[number].view(shape)


def _is_start(ids: Tensor) -> Tensor:
    """Whether a token of (samples, S) has another number than the one before it."""
    is_start = torch.ones_like(ids, dtype=torch.bool)
    is_start[:, 1:] = ids[:, 1:] != ids[:, :-1]
    return is_start


class Global(Mask):
    """Every key for some queries, and their keys for every query: `is_global` (S,), bool."""

    def __init__(self, is_global: Tensor) -> None:
        super().__init__("global_tokens(...)", "global")
        self.is_global, self.num_tokens = is_global, is_global.numel()

    def mod(self) -> MaskMod:
        is_global = self.is_global
        return lambda b, h, q, kv: is_global[q] | is_global[kv]

    def bounds(self, sizes: Sizes) -> Bounds:
        flags = self.is_global.to(sizes.device)
        sets = _runs_of(flags[None])
        rows = torch.arange(sizes.num_rows, device=sizes.device)
        num = sets.lo.numel()
        lo, hi = (bound.repeat(len(rows)) for bound in (sets.lo, sets.hi))
        each = KeySets(sizes.num_rows, sizes.keys, rows.repeat_interleave(num), lo, hi)
        hi = sizes.of_each_row(flags.to(torch.int64) * sizes.keys)
        return exact(each | one_interval(torch.zeros_like(hi), hi, sizes.keys))


class Dilated(Mask):
    """Every `step`th key before and after the query, its own among them."""

    def __init__(self, step: int) -> None:
        super().__init__(f"dilated({step})", ("dilated", step))
        self.step = step

    def mod(self) -> MaskMod:
        step = self.step
        return lambda b, h, q, kv: (q - kv) % step == 0

    def bounds(self, sizes: Sizes) -> Bounds:
        return exact(every_key(sizes.num_rows, sizes.keys, sizes.device)) if self.step == 1 else unknown(sizes)


class Blocks(Mask):
    """Squares of `size` queries by `size` keys: `layout` (1|B, 1|H, queries / size, keys / size), bool."""

    def __init__(self, layout: Tensor, size: int) -> None:
        batch, heads, *squares = layout.shape
        name = f"blocks({'x'.join(map(str, squares))}, {size})"
        super().__init__(name, ("blocks", size, batch > 1, heads > 1), batch=batch, heads=heads)
        self.layout, self.size = layout, size

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
        return exact(covered(row, lo, hi, num_rows=sizes.num_rows, num_keys=sizes.keys))

    def check(self, queries: int, keys: int) -> None:
        for what, num, squares in (("queries", queries, self.layout.size(2)), ("keys", keys, self.layout.size(3))):
            if -(-num // self.size) != squares:
                raise UsageError(
                    f"a layout of {squares} squares of {self.size} does not fit {num} {what}; give {-(-num // self.size)}"
                )


class Custom(Mask):
    """Any function of (batch, head, query, key), as FlexAttention takes it. It is looked at block by block."""

    def __init__(self, function: MaskMod, *, batch: int, heads: int) -> None:
        name = f"custom({getattr(function, '__name__', '...')})"
        super().__init__(name, ("custom", getattr(function, "__code__", function)), batch=batch, heads=heads)
        self.function = function  # what it holds is the caller's, and stays where it is

    def mod(self) -> MaskMod:
        return self.function

    def bounds(self, sizes: Sizes) -> Bounds:
        return unknown(sizes)


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


@dataclass(frozen=True)
class Band:
    """Keys from `left` before the query to `right` after it, None for all on that side, of the query's document."""

    left: int | None = None
    right: int | None = None
    documents: Documents | None = None

    @property
    def is_causal(self) -> bool:
        """Every key up to the query's place."""
        return self.left is None and self.right == 0

    @property
    def is_open(self) -> bool:
        """No bound on either side."""
        return self.left is None and self.right is None


def band_of(mask: Mask) -> Band | None:
    """The band that the mask is, None where it is more than that."""
    if isinstance(mask, Everything):
        return Band()
    if isinstance(mask, Window):
        left, right = mask.left, mask.right
        is_same_for_all = (left is None or isinstance(left, int)) and (right is None or isinstance(right, int))
        return Band(left, right) if is_same_for_all else None  # type: ignore[arg-type]
    if isinstance(mask, Documents):
        return Band(documents=mask) if mask.is_in_rows else None
    if not isinstance(mask, Both):
        return None
    one, two = (band_of(part) for part in mask.parts)
    if one is None or two is None or (one.documents is not None and two.documents is not None):
        return None
    return Band(_nearer(one.left, two.left), _nearer(one.right, two.right), one.documents or two.documents)


def _nearer(one: int | None, two: int | None) -> int | None:
    return min(one, two) if one is not None and two is not None else two if one is None else one
