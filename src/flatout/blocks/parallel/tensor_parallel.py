"""A plain model's layers divided over tensor ranks, with torch's DTensor: the model goes on computing with whole shapes.

What flows through the model are DTensors of whole shapes, so that its code (views, heads, splits) stays as it is, and what it
computes is what one process computes: DTensor knows where the pieces lie. Three things are added to torch's own styles. Layers
that share an input (q, k and v; gate and up) share its redistribution, so that its gradient is summed over ranks once and not
for each. Layers that hold several matrices side by side are divided matrix by matrix. And attention is computed on each rank's
own heads, on every device.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from flatout.blocks.parallel.roles import Role
from flatout.core.errors import UsageError
from flatout.core.runtime.patches import replace_forward
from flatout.core.tensors.nests import tree_map_only

_TOKENS: Final = 1
"""The dimension of tokens in what flows between blocks."""


def divide(
    model: nn.Module, mesh: DeviceMesh, roles: Mapping[str, Role], *, by_tokens: bool, blocks: Sequence[str]
) -> Callable[[], None]:
    """Divide the layers that have a role over the mesh, in place; all other parameters are whole on each rank.

    Call what is returned when a step is over: it lets go of what layers shared.

    `by_tokens`: what flows between blocks is divided by tokens (sequence parallelism); the mesh's size must divide their number.
    """
    stream: Placement = Shard(_TOKENS) if by_tokens else Replicate()
    distributed: dict[int, nn.Parameter] = {}  # tied ones stay tied
    modules = dict(model.named_modules())
    for path, module in modules.items():
        role = roles.get(path)
        for name, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            if id(parameter) not in distributed:
                distributed[id(parameter)] = _distributed(parameter, mesh, _place(name, role))
            module.register_parameter(name, distributed[id(parameter)])
        for name, buffer in list(module._buffers.items()):
            if buffer is not None and not isinstance(buffer, DTensor):
                module._buffers[name] = distribute_tensor(buffer, mesh, [Replicate()], src_data_rank=None)
    shared = _SharedInputs(mesh)
    for path, role in roles.items():
        module = modules[path]
        if role.kind in ("columns", "head"):
            module.register_forward_pre_hook(shared)
        if role.kind == "columns" and role.parts > 1:
            replace_forward(module, _by_parts(module, role.parts))
        if role.kind in ("rows", "vocabulary"):
            module.register_forward_hook(lambda module, args, out: _as_stream(out, stream))
    if by_tokens:
        modules[blocks[0]].register_forward_pre_hook(lambda module, args: (_as_stream(args[0], stream), *args[1:]))
    return shared.forget


def _place(name: str, role: Role | None) -> Placement:
    if role is None:
        return Replicate()
    if role.kind == "rows":
        return Shard(1) if name == "weight" else Replicate()
    if role.parts > 1:
        # rows of several matrices one above the other, each divided by itself
        return _StridedShard(0, split_factor=role.parts) if name == "weight" else Replicate()
    return Shard(0)


def _distributed(parameter: nn.Parameter, mesh: DeviceMesh, place: Placement) -> nn.Parameter:
    whole = distribute_tensor(parameter.data, mesh, [place], src_data_rank=None)
    return nn.Parameter(whole, requires_grad=parameter.requires_grad)


class _SharedInputs:
    """A hook before layers that are divided by columns: their input, whole on each rank.

    Layers that have one input get one copy of it, whose gradient they sum up in parts, and which is reduced once.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self._last: tuple[weakref.ref[Tensor], bool, Tensor] | None = None

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        inputs = args[0]
        if self._last is not None and self._last[0]() is inputs and self._last[1] == torch.is_grad_enabled():
            return (self._last[2], *args[1:])
        # its gradient comes as parts to be summed, and goes back as the input was placed: one collective
        whole = as_dtensor(inputs, self._mesh).redistribute(placements=[Replicate()])
        self._last = weakref.ref(inputs), torch.is_grad_enabled(), whole
        return (whole, *args[1:])

    def forget(self) -> None:
        """Drop what was shared: it holds a graph, whose hooks hold the model, which no garbage collection can free."""
        self._last = None


def _as_stream(value: Any, stream: Placement) -> Any:
    """A DTensor divided as the stream is; what is none as it is."""
    return value.redistribute(placements=[stream]) if isinstance(value, DTensor) else value


def _by_parts(layer: nn.Module, parts: int) -> Callable[[Tensor], SideBySide]:
    def forward(x: Tensor) -> SideBySide:
        weight, bias = layer.weight, layer.bias
        assert isinstance(x, DTensor) and isinstance(weight, DTensor)
        own = _own_part(bias, parts) if isinstance(bias, DTensor) else None
        local = nn.functional.linear(x.to_local(grad_placements=[Partial()]), weight.to_local(), own)
        return SideBySide(local, x.device_mesh, parts)

    return forward


def _own_part(bias: DTensor, parts: int) -> Tensor:
    """This rank's piece of each part of a bias that all ranks hold: FSDP could not shard one that lies in pieces."""
    mesh = bias.device_mesh
    whole = bias.to_local(grad_placements=[Partial()])
    return whole.view(parts, mesh.size(), -1)[:, mesh.get_local_rank()].flatten()


class SideBySide:
    """The output of a layer of several matrices, of which each rank has a piece of each; to be taken apart and nothing else."""

    def __init__(self, local: Tensor, mesh: DeviceMesh, parts: int) -> None:
        self._local, self._mesh, self._parts = local, mesh, parts
        self.shape = torch.Size([*local.shape[:-1], local.shape[-1] * mesh.size()])
        self.dtype, self.device, self.ndim = local.dtype, local.device, local.dim()

    def size(self, dim: int | None = None) -> Any:
        """The size of the whole output, as Tensor.size."""
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        """The number of dimensions, as Tensor.dim."""
        return self.ndim

    def chunk(self, chunks: int, dim: int = 0) -> tuple[Tensor, ...]:
        """Split the output into its matrices, as Tensor.chunk."""
        self._check(chunks == self._parts and dim in (-1, self.ndim - 1), f"chunk({chunks}, {dim})")
        return tuple(self._wrapped(t, self.ndim - 1) for t in self._local.chunk(chunks, -1))

    def split(self, sizes: int | Sequence[int], dim: int = 0) -> tuple[Tensor, ...]:
        """Split the output into its matrices, as Tensor.split."""
        each = self.shape[-1] // self._parts
        is_each = sizes == each if isinstance(sizes, int) else list(sizes) == [each] * self._parts
        self._check(is_each and dim in (-1, self.ndim - 1), f"split({sizes}, {dim})")
        return self.chunk(self._parts, -1)

    def view(self, *sizes: Any) -> Tensor:
        """View the output with the matrices in a dimension of their own, as Tensor.view."""
        wanted = list(sizes[0]) if len(sizes) == 1 and not isinstance(sizes[0], int) else list(sizes)
        at = self.ndim - 1
        self._check(len(wanted) == self.ndim + 2 and wanted[at] == self._parts, f"view({wanted})")
        num = self._mesh.size()
        if wanted[at + 1] == -1:
            wanted[at + 1] = self.shape[-1] // (self._parts * wanted[at + 2])
        self._check(wanted[at + 1] % num == 0, f"view({wanted}) over {num} ranks")
        wanted[at + 1] //= num
        return self._wrapped(self._local.view(wanted), at + 1)

    reshape = view

    def _wrapped(self, local: Tensor, dim: int) -> Tensor:
        return DTensor.from_local(local, self._mesh, [Shard(dim)], run_check=False)

    def _check(self, is_good: bool, what: str) -> None:
        if not is_good:
            raise UsageError(
                f"a layer of {self._parts} matrices side by side is divided by itself each, and {what} does not take them apart; "
                "take them apart right after the layer, or give them layers of their own"
            )

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        method = getattr(cls, getattr(func, "__name__", ""), None)
        if method is None or not args or not isinstance(args[0], SideBySide):
            raise UsageError(
                f"{getattr(func, '__name__', func)} of several matrices side by side; take them apart first"
            )
        return method(*args, **(kwargs or {}))


def sharded_dim(parameter: nn.Parameter) -> Shard | None:
    """Where FSDP is to shard a parameter of a divided model; None leaves it to FSDP, which takes the first dimension.

    A weight of several matrices lies in pieces along the first one, and FSDP would take other rows for them.
    """
    return Shard(1) if isinstance(parameter, DTensor) and is_in_pieces(parameter) else None


def is_in_pieces(tensor: DTensor) -> bool:
    """Whether a rank has pieces of each of several matrices: cut so over tensor ranks, the last dimension of a mesh."""
    return isinstance(tensor.placements[-1], _StridedShard)


def gather_whole(tensor: Tensor) -> Tensor:
    """The whole tensor, on each rank; a collective where it is a DTensor.

    torch 2.11 does not take apart what lies in pieces, so those are gathered as blocks and put in order here.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    if not is_in_pieces(tensor):
        return tensor.full_tensor()
    ranks, parts = tensor.device_mesh.size(-1), tensor.placements[-1].split_factor  # type: ignore[attr-defined]
    blocks = [*tensor.placements[:-1], Shard(0)]
    gathered = DTensor.from_local(
        tensor.to_local(), tensor.device_mesh, blocks, run_check=False, shape=tensor.shape, stride=tensor.stride()
    ).full_tensor()
    rest = gathered.shape[1:]
    return gathered.view(ranks, parts, -1, *rest).transpose(0, 1).reshape(tensor.shape)


def replicated(nest: Any, mesh: DeviceMesh) -> Any:
    """The tensors of a nest as DTensors that are whole on each rank."""
    return tree_map_only(Tensor, lambda t: as_dtensor(t, mesh), nest)


def as_dtensor(tensor: Tensor, mesh: DeviceMesh) -> DTensor:
    """A DTensor as it is, another tensor as one that is whole on each rank."""
    return tensor if isinstance(tensor, DTensor) else DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)


def for_loss(nest: Any) -> Any:
    """A model's output as a loss takes it: whole on each rank, but for logits whose classes, the last dimension, are divided."""

    def placed_for(tensor: DTensor) -> DTensor:
        is_logits = all(place == Shard(tensor.dim() - 1) for place in tensor.placements)
        return tensor if is_logits else tensor.redistribute(placements=[Replicate()])

    return tree_map_only(DTensor, placed_for, nest)
