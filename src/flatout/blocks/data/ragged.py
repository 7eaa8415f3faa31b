"""Samples of different lengths in one batch: their values behind one another and the offsets between them, nothing padded."""

# N samples, T tokens of all of them together

from __future__ import annotations

from collections.abc import Container, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flatout.core.errors import UsageError


class Ragged(NamedTuple):
    """`values` (T, ...) holds sample i in the rows offsets[i] to offsets[i + 1]; `offsets` (N + 1,) is int64 and begins with 0.

    A tuple of tensors and numbers: it goes through collate functions, pinned memory, `Prefetch` and pytrees as it is. `longest`
    is known to the host, so that nobody asks a device for it.
    """

    values: Tensor
    offsets: Tensor
    longest: int

    @property
    def num_samples(self) -> int:
        """The number of samples, N."""
        return self.offsets.numel() - 1

    @property
    def num_tokens(self) -> int:
        """T, without a look at the device."""
        return self.values.size(0)

    @property
    def lengths(self) -> Tensor:
        """The lengths of samples, (N,), on the device of the offsets."""
        return self.offsets.diff()

    @property
    def samples(self) -> Tensor:
        """The number of the sample that each token is of, (T,)."""
        numbers = torch.arange(self.num_samples, device=self.offsets.device)
        return numbers.repeat_interleave(self.lengths, output_size=self.num_tokens)

    @property
    def positions(self) -> Tensor:
        """The position of each token in its sample, from 0, (T,)."""
        return torch.arange(self.num_tokens, device=self.offsets.device) - self.offsets[self.samples]

    def to(self, device: torch.device | str | int, *, non_blocking: bool = False) -> Ragged:
        """The same on a device."""
        return self._replace(
            values=self.values.to(device, non_blocking=non_blocking),
            offsets=self.offsets.to(device, non_blocking=non_blocking),
        )

    def pin_memory(self) -> Ragged:
        """The same in pinned memory."""
        return self._replace(values=self.values.pin_memory(), offsets=self.offsets.pin_memory())

    def unbind(self) -> tuple[Tensor, ...]:
        """Each sample as a view of the values. Reads the offsets on the host."""
        parts: tuple[Tensor, ...] = self.values.split(self.lengths.tolist())
        return parts

    def padded(self, value: float = 0, *, length: int | None = None) -> tuple[Tensor, Tensor]:
        """Padded values (N, length, ...), with `value` behind shorter samples, and the mask (N, length) of real tokens.

        `length` is the longest sample's, if not given. Raises UsageError when it is less. The host waits for nothing.
        """
        length = self.longest if length is None else length
        if length < self.longest:
            raise UsageError(f"length {length} is less than the longest sample's {self.longest}; give as much or more")
        mask = torch.arange(length, device=self.offsets.device) < self.lengths[:, None]
        rows = self.values.new_full((self.num_samples, length, *self.values.shape[1:]), value)
        return rows.index_put((self.samples, self.positions), self.values), mask

    def nested(self) -> Tensor:
        """A jagged nested tensor (N, *, ...) over the same memory."""
        return torch.nested.nested_tensor_from_jagged(self.values, self.offsets, max_seqlen=self.longest)


def ragged(samples: Sequence[Tensor], *, pin: bool = False) -> Ragged:
    """The samples behind one another; each is (its length, ...). With `pin` in pinned memory, from where a GPU copies them.

    >>> ragged([torch.tensor([1, 2]), torch.tensor([3])]).offsets
    tensor([0, 2, 3])

    Raises UsageError when there is none, or one has no dimension to lie along.
    """
    if not samples:
        raise UsageError("a batch of no samples has no values; leave it out")
    if samples[0].dim() == 0:
        raise UsageError(
            "a sample is a single number; samples lie along their first dimension, so stack numbers instead"
        )
    lengths = [s.size(0) for s in samples]
    offsets = torch.tensor([0, *accumulate(lengths)])
    if not pin:
        return Ragged(torch.cat(list(samples)), offsets, max(lengths))
    values = torch.empty((sum(lengths), *samples[0].shape[1:]), dtype=samples[0].dtype, pin_memory=True)
    return Ragged(torch.cat(list(samples), out=values), offsets.pin_memory(), max(lengths))


def collate_ragged(items: Sequence[Any], *, stacked: Container[int | str] = ()) -> Any:
    """A collate function: tensors with dimensions become Ragged, numbers and single values tensors, by field of tuples and dicts.

    Fields named in `stacked` (by key, or by place in a tuple) have one size in all samples and are stacked. Partially applied
    with those, it is the `collate_fn` of a DataLoader.
    """
    first = items[0]
    if isinstance(first, dict):
        return {key: _field([item[key] for item in items], key in stacked) for key in first}
    if isinstance(first, (list, tuple)):
        fields = [_field(list(column), place in stacked) for place, column in enumerate(zip(*items, strict=True))]
        return type(first)(*fields) if hasattr(first, "_fields") else tuple(fields)
    return _field(items, False)


def _field(values: Sequence[Any], is_stacked: bool) -> Any:
    first = values[0]
    if not isinstance(first, Tensor):
        return torch.tensor(values) if isinstance(first, (bool, int, float)) else list(values)
    return torch.stack(list(values)) if is_stacked or first.dim() == 0 else ragged(values)
