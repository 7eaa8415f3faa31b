"""Cuts a model's tensors to the units that stay, and sets the numbers that its modules hold beside them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from flatout.core.errors import PlanError
from flatout.core.records.prune import PruningPlan

M = TypeVar("M", bound=nn.Module)
RemainingIndexes = Sequence[int] | None


def apply_pruning(model: M, plan: PruningPlan) -> M:
    """A smaller copy of `model`, cut as the plan says; the model itself stays as it is.

    Raises PlanError when the model has other tensors than the plan was made for.
    """
    _check(model, plan)
    smaller = copy.deepcopy(model)
    touched = _cut_tensors(smaller, plan)
    for path, attributes in plan.attributes.items():
        for name, size in attributes.items():
            module = smaller.get_submodule(path)
            setattr(module, name, (size,) if name == "normalized_shape" else size)
    for path in sorted(touched):
        rederive(smaller.get_submodule(path))
    for path in sorted(plan.dropped, key=_place_in_list, reverse=True):
        _drop(smaller, path)  # last, since those behind it move up and change their names
    return smaller


def select_units(tensor: Tensor, remaining: Sequence[RemainingIndexes]) -> Tensor:
    """The tensor at these indexes; a tensor of its own, in the same memory format."""
    for dim, own in enumerate(remaining):
        if own is not None:
            tensor = tensor.index_select(dim, torch.tensor(own, dtype=torch.long, device=tensor.device))
    return tensor


def _check(model: nn.Module, plan: PruningPlan) -> None:
    tensors = named_tensors(model)
    for name, shape in plan.shapes.items():
        if name not in tensors:
            raise PlanError(
                f"the plan cuts '{name}', which {type(model).__name__} does not have; it is for '{plan.model}'"
            )
        if tuple(tensors[name].shape) != tuple(shape):
            raise PlanError(
                f"'{name}' is {list(tensors[name].shape)}, the plan was made for {list(shape)}; "
                "give the model as it was before pruning"
            )
    modules = dict(model.named_modules())
    for path in (*plan.attributes, *plan.dropped):
        if path not in modules:
            raise PlanError(f"the plan changes module '{path}', which {type(model).__name__} does not have")


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, under each of their names."""
    found: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    return found | dict(model.named_buffers(remove_duplicate=False))


def _cut_tensors(model: nn.Module, plan: PruningPlan) -> set[str]:
    """Cut them; one tensor under two names stays one. The paths of the modules that hold them."""
    pruned: dict[int, Tensor] = {}
    touched: set[str] = set()
    old = named_tensors(model)
    for name, remaining in plan.remaining.items():
        path, _, own = name.rpartition(".")
        if id(old[name]) not in pruned:
            new = select_units(old[name].detach(), remaining)
            is_parameter = isinstance(old[name], nn.Parameter)
            pruned[id(old[name])] = nn.Parameter(new, old[name].requires_grad) if is_parameter else new
        module = model.get_submodule(path)
        (module._parameters if own in module._parameters else module._buffers)[own] = pruned[id(old[name])]  # type: ignore[assignment]
        touched.add(path)
        if isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear):
            touched.add(path.rpartition(".")[0])
    return touched


def rederive(module: nn.Module) -> None:
    """Set what torch's own modules hold of their sizes, from their tensors."""
    match module:
        case nn.Linear():
            module.out_features, module.in_features = module.weight.shape
        case nn.modules.conv._ConvNd():
            first, second = module.weight.shape[:2]
            ins, outs = (first, second * module.groups) if module.transposed else (second * module.groups, first)
            module.in_channels, module.out_channels = ins, outs
        case nn.modules.batchnorm._NormBase():
            sized = module.weight if module.weight is not None else module.running_mean
            module.num_features = module.num_features if sized is None else len(sized)
        case nn.GroupNorm():
            module.num_channels = len(module.weight)
        case nn.LayerNorm() | nn.RMSNorm():
            module.normalized_shape = tuple(module.weight.shape)
        case nn.Embedding():
            module.num_embeddings, module.embedding_dim = module.weight.shape
        case nn.PReLU():
            module.num_parameters = len(module.weight)
        case nn.RNNBase():
            module.hidden_size, module.input_size = _width(module, "weight_hh_l0"), _width(module, "weight_ih_l0")
            module._flat_weights = [getattr(module, name) for name in module._flat_weights_names]
            module.flatten_parameters()
        case nn.RNNCellBase():
            module.hidden_size, module.input_size = module.weight_hh.shape[1], module.weight_ih.shape[1]
        case nn.MultiheadAttention():
            _rederive_attention(module)
        case _:
            pass


def _width(module: nn.Module, name: str) -> int:
    return module.get_parameter(name).shape[1]


def _rederive_attention(module: nn.MultiheadAttention) -> None:
    """A head's size stays, so that the number of heads is what is left of the width over it."""
    width = module.out_proj.weight.shape[1]
    module.num_heads, module.embed_dim = width // module.head_dim, width
    if module.in_proj_weight is not None:
        module.kdim = module.vdim = width
    else:
        module.kdim, module.vdim = module.k_proj_weight.shape[1], module.v_proj_weight.shape[1]


def _place_in_list(path: str) -> tuple[str, int]:
    parent, _, own = path.rpartition(".")
    return parent, int(own) if own.isdigit() else -1


def _drop(model: nn.Module, path: str) -> None:
    parent, _, own = path.rpartition(".")
    holder = model.get_submodule(parent)
    if not isinstance(holder, (nn.Sequential, nn.ModuleList)):
        raise PlanError(f"'{path}' is not held by a Sequential or a ModuleList; it cannot be taken out")
    del holder[list(holder._modules).index(own)]
