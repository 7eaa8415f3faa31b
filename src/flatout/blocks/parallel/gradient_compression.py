"""Gradients of replicated models sent in fewer bytes; what is left out is stored and sent later (error feedback)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

from flatout.core.errors import UsageError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket

RoleKind = Literal["bfloat16", "powersgd", "sign"]


def compress(
    model: DistributedDataParallel, kind: RoleKind, *, rank: int = 4, start_after: int = 0, seed: int = 0
) -> Compressed:
    """Have DistributedDataParallel reduce gradients in fewer bytes from now on: guarantee QUALITY, results change.

    What a rank's compressed gradient leaves out is added to its next gradient (error feedback), in float32.

    - 'bfloat16'  half of the bytes: parts are sent to the rank that adds them in float32, and sums sent back, both in bfloat16
                  and both with error feedback (as in DoubleSqueeze, Tang and others 2019, arXiv 1905.05957).
    - 'powersgd'  matrices as products of `rank` columns and rows, one power iteration a step from where the last one ended
                  (Vogels and others 2019, arXiv 1905.13727); a tensor of one dimension, and a matrix that would not halve, whole.
    - 'sign'      a bit a number and the mean size of each tensor (EF-SignSGD, Karimireddy and others 2019, arXiv 1901.09847).
                  Each rank sends to all: n/64 of what a plain all-reduce of float32 sends among n ranks; 64 are refused.

    The first `start_after` steps are reduced whole. There is no way back: the hook stays with the model, as torch has none to
    take it off; wrap the module anew to send whole gradients. `seed` draws where power iterations begin, apart from
    torch's random numbers.

    It takes memory for one float32 copy of the gradients on each rank, and a second one, divided among ranks, for
    'bfloat16'. On a GPU it runs on a stream of its own beside the backward; on a CPU the backward waits for it. Gradients
    that are not finite are passed on and leave no trace in what is stored. Not for gradients scaled for float16: what is residual
    would be of another scale than the next gradient. Raises UsageError for other values and for what is not such a model.
    """
    if not isinstance(model, DistributedDataParallel):
        raise UsageError(f"compress was given a {type(model).__name__}; give a model in DistributedDataParallel")
    if kind not in _CODECS or rank < 1 or start_after < 0:
        raise UsageError(
            f"kind '{kind}', rank {rank}, start_after {start_after}: give one of {', '.join(_CODECS)}, a rank of 1 or more, "
            "and steps of 0 or more"
        )
    if kind == "sign" and model.process_group.size() >= 64:
        raise UsageError(
            f"'sign' among {model.process_group.size()} ranks sends no less than whole gradients; give another kind"
        )
    ignored = model.parameters_to_ignore
    named = {n: p for n, p in model.module.named_parameters() if p.requires_grad and n not in ignored}
    compressed = Compressed(kind, named, model.process_group, _Options(rank, start_after, seed))
    model.register_comm_hook(compressed, Compressed.reduced)
    return compressed


class _Options(NamedTuple):
    rank: int
    """The number of columns of 'powersgd'."""
    start_after: int
    seed: int


class Compressed:
    """What `compress` keeps: a part for checkpoints, so that a run goes on exactly; and what was sent.

    `bytes_sent` are those that this rank has sent since it was made, `bytes_plain` what an all-reduce of whole gradients would
    have sent: of n ranks 2 (n - 1) / n of the bytes for an all-reduce, n - 1 times its own for a gather, (n - 1) / n for an
    exchange, as rings do it.
    """

    def __init__(
        self, kind: RoleKind, named: Mapping[str, nn.Parameter], group: dist.ProcessGroup, options: _Options
    ) -> None:
        self.kind, self.num_steps, self.bytes_sent, self.bytes_plain = kind, 0, 0, 0
        self._group, self.num_ranks = group, group.size()
        self.options = options
        self._names = {id(p): n for n, p in named.items()}
        device = next(iter(named.values())).device
        self._mesh = DeviceMesh.from_group(group, device.type)
        self._codec = _CODECS[kind](self, dict(named))
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def state_dict(self) -> dict[str, Any]:
        """What a run needs to go on exactly, with as many ranks: every rank's own is its part of a DTensor."""
        own = {n: DTensor.from_local(t[None], self._mesh, [Shard(0)]) for n, t in self._codec.own.items()}
        return {"kind": self.kind, "num_steps": self.num_steps, "own": own, "same": dict(self._codec.same)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there. Raises UsageError for another kind, other gradients or another number of ranks."""
        here = self.state_dict()
        own, same = state["own"], state["same"]
        shapes = {n: tuple(t.shape) for n, t in {**own, **same}.items()}
        wanted = {n: tuple(t.shape) for n, t in {**here["own"], **here["same"]}.items()}
        if state["kind"] != self.kind or shapes != wanted:
            raise UsageError(
                f"the state is of '{state['kind']}' and {len(shapes)} tensors, this of '{self.kind}' and {len(wanted)} of "
                f"{self.num_ranks} ranks; load it for the same model, kind, rank and number of ranks, or begin without it"
            )
        at = self._group.rank()
        for name, tensor in self._codec.own.items():
            tensor.copy_(own[name].to_local()[0] if isinstance(own[name], DTensor) else own[name][at])
        for name, tensor in self._codec.same.items():
            tensor.copy_(same[name])
        self.num_steps = state["num_steps"]

    # -- for codecs ----------------------------------------------------------------------------------------------------------

    def add(self, tensor: Tensor) -> Tensor:
        """The mean over ranks, in place."""
        self.bytes_sent += self._ring_bytes(tensor)
        dist.all_reduce(tensor, group=self._group)
        return tensor.div_(self.num_ranks)

    def gather(self, tensor: Tensor) -> Tensor:
        """All ranks' tensors, one a row."""
        self.bytes_sent += (self.num_ranks - 1) * tensor.nbytes
        rows = tensor.new_empty(self.num_ranks, *tensor.shape)
        dist.all_gather_into_tensor(rows.flatten(), tensor, group=self._group)
        return rows

    def exchange(self, rows: Tensor) -> Tensor:
        """Row i to rank i; a row from each."""
        self.bytes_sent += rows.nbytes * (self.num_ranks - 1) // self.num_ranks
        received = torch.empty_like(rows)
        dist.all_to_all_single(received, rows, group=self._group)
        return received

    def _ring_bytes(self, tensor: Tensor) -> int:
        return 2 * tensor.nbytes * (self.num_ranks - 1) // self.num_ranks

    # -- the hook ------------------------------------------------------------------------------------------------------------

    def reduce(self, bucket: GradBucket) -> None:
        """A bucket's gradients become their mean over ranks, or what is sent of it. Buckets come in one order on all ranks."""
        flat = bucket.buffer()
        self.bytes_plain += self._ring_bytes(flat)
        if self.num_steps < self.options.start_after or self.num_ranks == 1:
            self.add(flat)
        else:
            grads = zip(bucket.parameters(), bucket.gradients(), strict=True)
            self._codec({self._names[id(p)]: g for p, g in grads})
        self.num_steps += bucket.is_last()

    def reduced(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """The hook: the same, on a stream of its own where there are streams; torch's reducer waits for the future on its own."""
        flat = bucket.buffer()
        if self._stream is None:
            self.reduce(bucket)
            done: torch.futures.Future[Tensor] = torch.futures.Future()
            done.set_result(flat)
            return done
        done = torch.futures.Future(devices=[flat.device])
        self._stream.wait_stream(torch.cuda.current_stream(flat.device))
        with torch.cuda.stream(self._stream):
            self.reduce(bucket)
            done.set_result(flat)  # notes what is on the current stream
        return done


Compressed.reduced.__annotations__.clear()  # torch compares annotations with its types, and these are text


class _Codec(ABC):
    """Reduces gradients by name, in place. `own` is residual by each rank for itself, `same` alike on all."""

    def __init__(self, over: Compressed, named: dict[str, nn.Parameter]) -> None:
        self._over = over
        self.own = {n: torch.zeros_like(p, dtype=torch.float32).flatten() for n, p in named.items()}
        self.same: dict[str, Tensor] = {}

    @abstractmethod
    def __call__(self, grads: dict[str, Tensor]) -> None: ...


class _Bfloat16(_Codec):
    """Two stages: each rank adds up one slice of every gradient. What rounding leaves out is residual at both."""

    def __init__(self, over: Compressed, named: dict[str, nn.Parameter]) -> None:
        super().__init__(over, named)
        self._slices = {n: -(-p.numel() // over.num_ranks) for n, p in named.items()}
        self.own |= {f"sum/{n}": torch.zeros(self._slices[n], device=p.device) for n, p in named.items()}

    def __call__(self, grads: dict[str, Tensor]) -> None:
        over = self._over
        rows = torch.cat([self._rounded(n, n, g.flatten().float()) for n, g in grads.items()], dim=1)
        received = over.exchange(rows)
        means = received.float().mean(0).split([self._slices[n] for n in grads])
        back = torch.cat([self._rounded(f"sum/{n}", n, m) for n, m in zip(grads, means, strict=True)], dim=-1)
        whole = over.gather(back).split([self._slices[n] for n in grads], dim=1)
        for grad, part in zip(grads.values(), whole, strict=True):
            grad.copy_(part.flatten()[: grad.numel()].view_as(grad))

    def _rounded(self, residual: str, name: str, value: Tensor) -> Tensor:
        """Round to bfloat16, with what was left out before; a whole gradient as a row for each rank, filled up with zeros."""
        full = value + self.own[residual]
        sent = full.bfloat16()
        _keep(self.own[residual], full - sent.float())
        if residual != name:
            return sent
        padding = self._slices[name] * self._over.num_ranks - sent.numel()
        return nn.functional.pad(sent, (0, padding)).view(self._over.num_ranks, -1)


class _Sign(_Codec):
    """A bit a number and a size a tensor."""

    def __init__(self, over: Compressed, named: dict[str, nn.Parameter]) -> None:
        super().__init__(over, named)
        # copied to the device once for each bucket, as the host waits for that
        self._on_device = lru_cache(None)(lambda lengths, device: torch.tensor(lengths, device=device))

    def __call__(self, grads: dict[str, Tensor]) -> None:
        sizes, bits = [], []
        for name, grad in grads.items():
            full = grad.flatten().float() + self.own[name]
            size = full.abs().mean()
            bit = full >= 0
            _keep(self.own[name], full - _signs(bit) * size)
            sizes.append(size)
            bits.append(bit)
        packed = _packed(torch.cat(bits))
        rows = self._over.gather(torch.cat((torch.stack(sizes).view(torch.uint8), packed)))
        total = torch.zeros(sum(map(len, bits)), device=rows.device)
        lengths = self._on_device(tuple(map(len, bits)), rows.device)
        head = 4 * len(sizes)
        for row in rows:  # one by one: all ranks' numbers at once would take n times the gradient
            size_of = row[:head].clone().view(torch.float32).repeat_interleave(lengths, output_size=len(total))
            total += _signs(_unpacked(row[head:], len(total))) * size_of
        means = total.div_(len(rows)).split([*map(len, bits)])
        for grad, mean in zip(grads.values(), means, strict=True):
            grad.copy_(mean.view_as(grad))


class _PowerSgd(_Codec):
    """A matrix as P Q^T, Q from the last step; the rest whole."""

    def __init__(self, over: Compressed, named: dict[str, nn.Parameter]) -> None:
        super().__init__(over, {})
        draw = torch.Generator().manual_seed(over.options.seed)
        for name, p in named.items():
            rows, columns = p.shape[0] if p.dim() else 1, p.numel() // (p.shape[0] if p.dim() else 1)
            rank = min(over.options.rank, rows, columns)
            if p.dim() > 1 and 2 * rank * (rows + columns) <= rows * columns:
                self.own[name] = torch.zeros(rows, columns, device=p.device)
                self.same[name] = torch.randn(columns, rank, generator=draw).to(p.device)

    def __call__(self, grads: dict[str, Tensor]) -> None:
        over = self._over
        full = {n: g.flatten(1).float() + self.own[n] for n, g in grads.items() if n in self.own}
        whole = [g for n, g in grads.items() if n not in self.own]
        left = [m @ self.same[n] for n, m in full.items()]
        _together(over, [*left, *whole])
        bases = [torch.linalg.qr(p).Q for p in left]
        right = [m.T @ p for m, p in zip(full.values(), bases, strict=True)]
        _together(over, right)
        for (name, matrix), p, q in zip(full.items(), bases, right, strict=True):
            mean = p @ q.T
            _keep(self.own[name], matrix - mean)
            _keep(self.same[name], q)
            grads[name].copy_(mean.view_as(grads[name]))


_CODECS: dict[str, type[_Codec]] = {"bfloat16": _Bfloat16, "powersgd": _PowerSgd, "sign": _Sign}


def _keep(residual: Tensor, left: Tensor) -> None:
    """What is left out is residual, unless it is of a gradient that is not finite: one such step would spoil all that follow."""
    residual.copy_(torch.where(left.isfinite().all(), left, residual))


def _together(over: Compressed, tensors: list[Tensor]) -> None:
    """The mean over ranks of each, in place; one all-reduce for all of one dtype."""
    for dtype in dict.fromkeys(t.dtype for t in tensors):
        alike = [t for t in tensors if t.dtype == dtype]
        means = over.add(torch.cat([t.flatten() for t in alike])).split([t.numel() for t in alike])
        for tensor, mean in zip(alike, means, strict=True):
            tensor.copy_(mean.view_as(tensor))


def _signs(bits: Tensor) -> Tensor:
    return bits.float().mul_(2).sub_(1)


def _packed(bits: Tensor) -> Tensor:
    """Eight a byte, the last byte filled up with zeros."""
    padded = nn.functional.pad(bits.to(torch.uint8), (0, -len(bits) % 8)).view(-1, 8)
    return (padded * _powers(bits.device)).sum(1, dtype=torch.uint8)


def _unpacked(packed: Tensor, num: int) -> Tensor:
    return (packed.unsqueeze(1) & _powers(packed.device)).ne(0).flatten()[:num]


def _powers(device: torch.device) -> Tensor:
    """1, 2, 4 up to 128, made on the device: a copy to it would wait for all that is under way."""
    return torch.ones(8, dtype=torch.uint8, device=device) << torch.arange(8, dtype=torch.uint8, device=device)
