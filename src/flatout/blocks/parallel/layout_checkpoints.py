"""The state of a parallel model and its optimizer in a checkpoint: by the names of the plain model, for any other layout."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, empty
from torch.distributed.tensor.placement_types import Placement
from torch.optim import Optimizer

from flatout.blocks.parallel.tensor_parallel import gather_whole, is_in_pieces
from flatout.core.errors import UsageError

_OF_ITS_SHAPE = frozenset(
    ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "sum", "square_avg", "acc_delta", "grad_avg", "prev")
)
"""What torch's optimizers keep in the shape of a parameter; state of others lies so, too, once they have stepped."""


class Writing(NamedTuple):
    """The tensors that this rank, of several that hold them whole, writes into a checkpoint; each rank writes its shards."""

    is_writer: bool
    """Whether this is the one rank of its stage that writes."""
    written_elsewhere: frozenset[str]
    """Names that the first stage writes, shards or not."""

    def writes(self, name: str, *, is_shard: bool) -> bool:
        """Whether this rank writes its part of the parameter or buffer of that name."""
        return (is_shard or self.is_writer) and name not in self.written_elsewhere


class NamedOptimizer:
    """An optimizer's state by the names of parameters, for `Checkpoints` and `Survivor`: it loads into any other layout.

    A parameter that two stages share has one name, which the first stage writes.
    """

    def __init__(self, optimizer: Optimizer, named: Iterable[tuple[str, nn.Parameter]], writing: Writing) -> None:
        self._optimizer, self._named, self._writing = optimizer, list(named), writing

    def state_dict(self) -> dict[str, Any]:
        """State and options of each parameter."""
        self._optimizer.state_dict()  # its hooks wait for a state that is on its way to the host
        options = {id(p): group for group in self._optimizer.param_groups for p in group["params"]}
        found: dict[str, Any] = {"state": {}, "options": {}}
        for name, parameter in reversed(self._named):  # of a name that is here twice the first
            values = self._optimizer.state.get(parameter, {})
            found["state"][name] = {key: in_one_piece(value) for key, value in values.items()}
            found["options"][name] = {k: v for k, v in options[id(parameter)].items() if k != "params"}
        return found

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Options of a group are those of its first parameter."""
        names = {id(p): name for name, p in self._named}
        for group in self._optimizer.param_groups:
            group.update(state["options"][names[id(group["params"][0])]])
        self._optimizer.state.clear()
        for name, parameter in self._named:
            # A name may be here twice, each with a state of its own.
            values = {key: v.clone() if isinstance(v, Tensor) else v for key, v in state["state"][name].items()}
            self._optimizer.state[parameter] = {key: _beside(v, parameter) for key, v in values.items()}

    def places(self) -> Mapping[str, Tensor]:
        """Tensors that are divided as the state is: state of a parameter's shape is divided as the parameter is."""
        keys = {key for values in self._optimizer.state.values() for key in values}.union(_OF_ITS_SHAPE)
        lying = {name: block_template(p.detach()) for name, p in self._named}
        return {f"state/{name}/{key}": p for name, p in lying.items() for key in keys}

    def own(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The part of a state that is of this rank's parameters."""
        names = [name for name, _ in self._named]
        return {part: cut(state.get(part, {}), names, "the optimizer's state") for part in ("state", "options")}

    def writes(self, name: str, *, is_shard: bool) -> bool:
        """Whether this rank writes the tensor `state/NAME/KEY`."""
        return self._writing.writes(name.split("/")[1], is_shard=is_shard)

    def weights(self) -> list[str]:
        """The names of weights, of which an optimizer has none."""
        return []


def cut(state: Mapping[str, Any], names: Iterable[str], what: str) -> dict[str, Any]:
    """The state of these names. Raises UsageError when it lacks one."""
    wanted = list(names)
    lacking = [name for name in wanted if name not in state]
    if lacking:
        raise UsageError(f"{what} lacks {', '.join(lacking[:4])} ({len(lacking)}); it is of another model")
    return {name: state[name] for name in wanted}


def load_tensors(own: Mapping[str, Sequence[Tensor]], state: Mapping[str, Tensor]) -> None:
    """Write loaded tensors into a model's. Raises UsageError where one is of another shape."""
    for name, (first, *_) in own.items():
        if state[name].shape != first.shape:
            was, now = list(state[name].shape), list(first.shape)
            raise UsageError(f"'{name}' is {now}, and {was} in the checkpoint; it is of another model")
    with torch.no_grad():
        for name, tensors in own.items():
            for tensor in tensors:
                tensor.copy_(redistributed_like(state[name], tensor))


def in_one_piece(value: Any) -> Any:
    """A tensor of which each rank has one block, as a checkpoint holds them; others as they are.

    Of weights with several matrices side by side, divided by itself each, a rank has pieces: those are gathered and cut anew.
    """
    if not isinstance(value, DTensor) or not is_in_pieces(value):
        return value
    return distribute_tensor(gather_whole(value), value.device_mesh, _blocks(value), src_data_rank=None)


def block_template(tensor: Tensor) -> Tensor:
    """A tensor that lies as `in_one_piece` would have it, with any numbers: without a collective, so in whatever order."""
    if not isinstance(tensor, DTensor) or not is_in_pieces(tensor):
        return tensor
    result: Tensor = empty(tensor.shape, dtype=tensor.dtype, device_mesh=tensor.device_mesh, placements=_blocks(tensor))
    return result


def _blocks(tensor: DTensor) -> list[Placement]:
    return [*tensor.placements[:-1], Shard(0)]


def redistributed_like(value: Tensor, like: Tensor) -> Tensor:
    """The value redistributed as `like` is."""
    if not (isinstance(like, DTensor) and isinstance(value, DTensor)) or value.placements == like.placements:
        return value
    return distribute_tensor(gather_whole(value), like.device_mesh, like.placements, src_data_rank=None)


def first_names(model: nn.Module) -> dict[str, str]:
    """The first name of each parameter, by each of its names: tied parameters have several."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(p), name) for name, p in model.named_parameters(remove_duplicate=False)}


def _beside(value: Any, parameter: nn.Parameter) -> Any:
    """Where and as the parameter lies; counts of steps stay where torch keeps them."""
    if not isinstance(value, Tensor) or not value.dim():
        return value
    return redistributed_like(value.to(parameter.device), parameter) if value.shape == parameter.shape else value
