"""A mixture-of-experts feed-forward that drops no token, on one device or with its experts spread over ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from flatout.blocks.parallel.routing import (
    Scores,
    balance_loss,
    combined,
    exchanged,
    expert_rows,
    ordered,
    permute_rows,
    select_experts,
)
from flatout.core.errors import UsageError

# B batch, T tokens, N = B * T, K experts a token, R = N * K rows, E experts, C channels, F inner width


ExpertProduct = Literal["loop", "grouped"]
Activation = Callable[[Tensor], Tensor]
# bfloat16 numbers in 16 bytes, to which a grouped product's loads are aligned (pytorch pull request 150374).
_ALIGNED = 8


class ExpertWeights(NamedTuple):
    """The weights of all experts at hand; `gate_ECF` is None where they have none."""

    up_ECF: Tensor
    gate_ECF: Tensor | None
    down_EFC: Tensor

    def each(self, function: Callable[[Tensor], Tensor]) -> ExpertWeights:
        """What a function makes of each of them."""
        gate = None if self.gate_ECF is None else function(self.gate_ECF)
        return ExpertWeights(function(self.up_ECF), gate, function(self.down_EFC))


class SelectedProduct(NamedTuple):
    """The implementation of the products, and why it was selected; `reason` is '' where the caller asked for it."""

    implementation: ExpertProduct
    reason: str


class Experts(nn.Module):
    """A feed-forward of `num_experts`, of which each token takes `experts_per_token`: x_BTC -> out_BTC, any leading shape.

    Every token reaches all experts that were selected for it: there is no capacity and nothing is dropped. An expert is
    `activation(x @ gate) * (x @ up) @ down`, without `is_gated` `activation(x @ up) @ down`; all experts' weights are one
    parameter each, [E, C, F] and [E, F, C]. The router's product, scores and selection are in float32 whatever the rest is in.

    `scores` of the router are a softmax over all experts or a sigmoid each; `is_normalised` makes the weights of a token add
    to 1. `implementation` of the products: 'grouped' (bfloat16; the host never waits) or 'loop' (an expert at a time; on a GPU
    the host waits for the counts once a call). Not given, it is 'grouped' on a GPU where that can be and 'loop' elsewhere;
    `selected` is which it was at the last call, and why. Asked for where it cannot be, 'grouped' raises UsageError.

    Two methods to even load: `balance_experts` after each optimizer step moves a bias of the selection by `balance_step` (0.001
    in DeepSeek-V3, arXiv 2412.19437, section 4.2; 0 turns that off), and `has_auxiliary_loss` has the layer compute the loss
    that `auxiliary_loss` collects. Raises UsageError for numbers that do not fit.
    """

    def __init__(
        self,
        hidden: int,
        ffn: int,
        num_experts: int,
        experts_per_token: int,
        *,
        is_gated: bool = True,
        scores: Scores = "softmax",
        is_normalised: bool = True,
        activation: Activation = F.silu,
        balance_step: float = 1e-3,
        has_auxiliary_loss: bool = False,
        implementation: ExpertProduct | None = None,
    ) -> None:
        super().__init__()
        if min(hidden, ffn, num_experts) < 1 or not 1 <= experts_per_token <= num_experts:
            raise UsageError(
                f"hidden {hidden}, ffn {ffn}, num_experts {num_experts}, experts_per_token {experts_per_token}: give positive "
                "numbers, and no more experts a token than there are"
            )
        if scores not in ("softmax", "sigmoid") or implementation not in (None, "loop", "grouped"):
            raise UsageError(
                f"scores '{scores}', implementation {implementation!r}: give softmax or sigmoid, and loop, grouped or nothing"
            )
        self.num_experts, self.experts_per_token = num_experts, experts_per_token
        self.scores, self.is_normalised, self.activation = scores, is_normalised, activation
        self.balance_step, self.has_auxiliary_loss = balance_step, has_auxiliary_loss
        self.implementation = implementation
        self.selected: SelectedProduct | None = None
        self.router = nn.Linear(hidden, num_experts, bias=False)
        self.up_ECF = nn.Parameter(torch.empty(num_experts, hidden, ffn))
        self.gate_ECF = nn.Parameter(torch.empty(num_experts, hidden, ffn)) if is_gated else None
        self.down_EFC = nn.Parameter(torch.empty(num_experts, ffn, hidden))
        self.bias_steps_E: Tensor
        # In whole steps: model.bfloat16() would round a bias to 8 bits, and leaves integers alone.
        self.register_buffer("bias_steps_E", torch.zeros(num_experts, dtype=torch.int32))
        # No buffer: DistributedDataParallel would overwrite every rank's counts by those of rank 0.
        self._counts_E: Tensor | None = None
        self._balance_loss: Tensor | None = None
        self._ranks: _Ranks | None = None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Weights as nn.Linear begins, uniform within the root of 1 over its inputs; no bias of the selection."""
        self.router.reset_parameters()
        for weight in self.parameters(recurse=False):
            nn.init.uniform_(weight, -(weight.shape[1] ** -0.5), weight.shape[1] ** -0.5)
        self.bias_steps_E.zero_()

    def extra_repr(self) -> str:
        return f"{self.num_experts} experts, {self.experts_per_token} a token, inner width {self.up_ECF.shape[-1]}"

    def forward(self, x: Tensor) -> Tensor:
        x_NC = x.reshape(-1, x.shape[-1])
        with torch.autocast(x.device.type, enabled=False):
            logits_NE = F.linear(x_NC.float(), self.router.weight.float())
            bias_E = self.bias_steps_E * self.balance_step if self.balance_step else None
            routed = select_experts(
                logits_NE, bias_E, num=self.experts_per_token, scores=self.scores, is_normalised=self.is_normalised
            )
        order = ordered(routed.expert_NK.flatten(), self.num_experts)
        if self.training:
            self._counts_E = self._counted_E().to(x.device) + order.counts_E
        if self.has_auxiliary_loss and torch.is_grad_enabled():
            self._balance_loss = balance_loss(routed.score_NE, self._share_E(order.counts_E))
        dtype = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype
        weights = ExpertWeights(self.up_ECF, self.gate_ECF, self.down_EFC)
        if self._ranks is not None:
            weights = weights.each(self._ranks.own)
        if dtype != x.dtype:
            weights = weights.each(lambda weight: weight.to(dtype))
        with torch.autocast(x.device.type, enabled=False):
            rows_RC = expert_rows(x_NC.to(dtype), order, self.experts_per_token)
            if self._ranks is None:
                rows_RC = self._products(rows_RC, order.counts_E, None, weights)
            else:
                rows_RC = self._over_ranks(rows_RC, order.counts_E, weights, self._ranks)
            return combined(rows_RC, order, routed.weight_NK).view(x.shape)

    @property
    def load(self) -> Tensor:
        """Each expert's share of the rows since the last `balance_experts`, of this rank, on the device: no wait of the host.

        Of training alone; a block that is recomputed counts twice, which leaves shares as they are. All 0 before the first.
        """
        counts_E = self._counted_E()
        return counts_E / counts_E.sum().clamp_min(1)

    def _counted_E(self) -> Tensor:
        if self._counts_E is None:
            return torch.zeros(self.num_experts, dtype=torch.int64, device=self.bias_steps_E.device)
        return self._counts_E

    def _products(self, rows_RC: Tensor, counts_E: Tensor, sizes: list[int] | None, weights: ExpertWeights) -> Tensor:
        reason = _why_not_grouped(rows_RC, weights)
        if self.implementation == "grouped" and reason:
            raise UsageError(
                f"implementation 'grouped' cannot be used: {reason}; change that, or give implementation='loop'"
            )
        if self.implementation is not None:
            self.selected = SelectedProduct(self.implementation, "")
        elif not reason and rows_RC.is_cuda:
            self.selected = SelectedProduct("grouped", "the host need not know how many rows an expert has")
        else:
            reason = reason or "the rows are on a CPU, where a grouped product is a loop too"
            self.selected = SelectedProduct("loop", reason)
        if self.selected.implementation == "grouped":
            return _grouped_product(rows_RC, counts_E, weights, self.activation)
        return _product_per_expert(rows_RC, counts_E.tolist() if sizes is None else sizes, weights, self.activation)

    def _over_ranks(self, rows_RC: Tensor, counts_E: Tensor, weights: ExpertWeights, ranks: _Ranks) -> Tensor:
        """Rows go to the ranks of their experts and come back. The host reads the counts once: it has to name the sizes."""
        sent = counts_E.view(ranks.num, -1)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=ranks.group)
        to, of = torch.stack((sent, received)).tolist()
        send, receive = [sum(sizes) for sizes in to], [sum(sizes) for sizes in of]
        rows_RC = exchanged(rows_RC, send=send, receive=receive, group=ranks.group)
        num_own = sent.shape[1]
        own = torch.arange(num_own, device=rows_RC.device).repeat(ranks.num)
        order = ordered(own.repeat_interleave(received.flatten(), output_size=sum(receive)), num_own)
        rows_RC = permute_rows(rows_RC, order.source_R, order.place_R)
        rows_RC = self._products(rows_RC, order.counts_E, [sum(sizes) for sizes in zip(*of, strict=True)], weights)
        rows_RC = permute_rows(rows_RC, order.place_R, order.source_R)
        return exchanged(rows_RC, send=receive, receive=send, group=ranks.group)

    def _share_E(self, counts_E: Tensor) -> Tensor:
        """Each expert's share of the rows of all ranks: the mean over ranks of losses is then the loss of all their tokens."""
        counts_E = counts_E.clone()
        if self._ranks is not None:
            self._ranks.add(counts_E)
        return counts_E / counts_E.sum().clamp_min(1)


def _why_not_grouped(rows_RC: Tensor, weights: ExpertWeights) -> str:
    """Why torch's grouped product does not serve here; '' where it does."""
    if rows_RC.dtype is not torch.bfloat16:
        return f"products are in {rows_RC.dtype}, grouped ones in bfloat16"
    wrong = [width for width in weights.up_ECF.shape[1:] if width % _ALIGNED]
    if wrong:
        return f"a width of {wrong[0]} is no multiple of {_ALIGNED}"
    if rows_RC.is_cuda and torch.cuda.get_device_capability(rows_RC.device) < (8, 0):
        return "the GPU's compute capability is below 8.0"
    return ""


def _product_per_expert(
    rows_RC: Tensor, sizes: Sequence[int], weights: ExpertWeights, activation: Activation
) -> Tensor:
    """Multiply each expert's rows by themselves, of `sizes` rows, which the host knows."""
    parts = rows_RC.split(list(sizes))
    # unbound, gradients are stacked once, not added E times
    ups, downs = weights.up_ECF.unbind(), weights.down_EFC.unbind()
    gates = [None] * len(ups) if weights.gate_ECF is None else weights.gate_ECF.unbind()
    done = [
        _inner(part @ up, None if gate is None else part @ gate, activation) @ down
        for part, up, gate, down in zip(parts, ups, gates, downs, strict=True)
    ]
    return torch.cat(done)


def _grouped_product(rows_RC: Tensor, counts_E: Tensor, weights: ExpertWeights, activation: Activation) -> Tensor:
    """Grouped products; the host need not know `counts_E`.

    Each expert's rows begin at a multiple of 16 bytes in every layout, and no group is empty: rows of zeros are put between,
    which neither change a result nor a gradient.
    """
    filled_E = counts_E.clamp_min(1).add(_ALIGNED - 1).div(_ALIGNED, rounding_mode="floor") * _ALIGNED
    ends_E = filled_E.cumsum(0)
    num = len(rows_RC)
    of_R = torch.arange(len(counts_E), device=rows_RC.device).repeat_interleave(counts_E, output_size=num)
    shift_E = (ends_E - filled_E) - (counts_E.cumsum(0) - counts_E)
    place_R = torch.arange(num, device=rows_RC.device) + shift_E[of_R]
    wide = rows_RC.new_zeros(num + _ALIGNED * len(counts_E), rows_RC.shape[1]).index_copy(0, place_R, rows_RC)
    offs = ends_E.to(torch.int32)
    up = F.grouped_mm(wide, weights.up_ECF, offs=offs)
    gate = None if weights.gate_ECF is None else F.grouped_mm(wide, weights.gate_ECF, offs=offs)
    down = F.grouped_mm(_inner(up, gate, activation), weights.down_EFC, offs=offs)
    return down.index_select(0, place_R)


def _inner(up: Tensor, gate: Tensor | None, activation: Activation) -> Tensor:
    return activation(up) if gate is None else activation(gate) * up


def spread_experts(module: nn.Module, mesh: DeviceMesh) -> list[nn.Parameter]:
    """Divide the experts of all `Experts` in a module among ranks (expert parallel); the parameters that are divided.

    The mesh has all data ranks: one dimension, or two, of which the last divides the experts and the first holds copies. Rank i
    of n keeps experts i * E/n up to (i + 1) * E/n as DTensors: a state_dict has the names that it had, and checkpoints are read
    over another number of ranks. Weights begin as those of the mesh's first rank. Call it before the optimizer is made, with
    the module that DistributedDataParallel is to wrap: which then leaves these parameters alone. For FSDP2 use
    `fully_shard(..., ignored_params=set(spread_experts(model, mesh)))`.

    Results are those of one process with all ranks' tokens. Gradients of the experts are of all tokens of the mesh over the
    number of its ranks: the mean over data ranks, as everywhere else. All ranks call forward and backward together, each with
    as many tokens as it has. A call costs two exchanges of rows and, on a GPU, one wait of the host for their sizes.

    An optimizer with `foreach` or `fused` takes DTensors and others in groups of their own; `clip_gradients` clips both. Raises
    UsageError where there are no experts, where they are spread already, and where ranks do not divide them.
    """
    found = [(path, m) for path, m in module.named_modules() if isinstance(m, Experts)]
    if not found or mesh.ndim not in (1, 2):
        raise UsageError(
            f"{len(found)} Experts in the module, {mesh.ndim} dimensions of the mesh; give 1 or more, and 1 or 2"
        )
    num = mesh.size(mesh.ndim - 1)
    for path, layer in found:
        if layer._ranks is not None or layer.num_experts % num:
            why = (
                "is spread already" if layer._ranks is not None else f"has {layer.num_experts} experts for {num} ranks"
            )
            raise UsageError(f"'{path}' {why}; spread a module once, over ranks that divide its experts")
    ranks = _Ranks(mesh, num, mesh.get_group(mesh.ndim - 1))
    divided: dict[str, nn.Parameter] = {}
    for path, layer in found:
        for name, weight in list(layer.named_parameters(recurse=False)):
            placements = [Replicate()] * (mesh.ndim - 1) + [Shard(0)]
            part = distribute_tensor(weight.detach(), mesh, placements)
            own = divided[f"{path}.{name}" if path else name] = nn.Parameter(part, weight.requires_grad)
            layer.register_parameter(name, own)
        layer._ranks = ranks
    left = [*getattr(module, "_ddp_params_and_buffers_to_ignore", ()), *divided]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, left)
    return list(divided.values())


def balance_experts(module: nn.Module, *, group: dist.ProcessGroup | None = None) -> None:
    """Have overloaded experts selected less often and others more, in all `Experts` in a module; call it after an optimizer step.

    Each expert's bias goes up by the layer's `balance_step` where it had fewer rows than the mean since the last call, and down
    where it had more (arXiv 2408.15664, algorithm 1). Rows are counted over `group`: not given, over the ranks that the
    experts are spread over, or all ranks that there are. One all-reduce for all layers, no wait of the host.
    """
    layers = [m for m in module.modules() if isinstance(m, Experts)]
    if not layers:
        raise UsageError("there are no Experts in the module; give one that has some")
    counts = torch.cat([layer._counted_E() for layer in layers])
    ranks = layers[0]._ranks
    if group is not None or (ranks is None and dist.is_initialized()):
        dist.all_reduce(counts, group=group)
    elif ranks is not None:
        ranks.add(counts)
    for layer, count_E in zip(layers, counts.split([layer.num_experts for layer in layers]), strict=True):
        if layer.balance_step:
            # E * (mean - count), in integers
            layer.bias_steps_E += (count_E.sum() - count_E * layer.num_experts).sign().to(torch.int32)
        layer._counts_E = None


def auxiliary_loss(module: nn.Module) -> Tensor:
    """The sum of the balance losses of the layers of a module in their last forward; each is returned once.

    Of one layer E * sum(share of rows * mean score), 1 when all is even (Switch Transformer, arXiv 2101.03961, equation 4);
    add it to the loss with a small factor (0.01 there). Layers that are spread take shares of rows over all ranks, so that
    the mean over ranks with equally many tokens is the loss of them all. Raises UsageError where no layer has one.
    """
    layers = [m for m in module.modules() if isinstance(m, Experts) and m._balance_loss is not None]
    losses = [layer._balance_loss for layer in layers if layer._balance_loss is not None]
    if not losses:
        raise UsageError(
            "no layer has an auxiliary loss; make Experts with has_auxiliary_loss=True, and run a forward first"
        )
    for layer in layers:
        layer._balance_loss = None
    return torch.stack(losses).sum()


class _Ranks(NamedTuple):
    """The ranks that experts are spread over: `num` in `group` have all experts once."""

    mesh: DeviceMesh
    num: int
    group: dist.ProcessGroup

    def add(self, counts: Tensor) -> None:
        """Sum counts over all data ranks, in place."""
        for dim in range(self.mesh.ndim):
            dist.all_reduce(counts, group=self.mesh.get_group(dim))

    def own(self, weight: Tensor) -> Tensor:
        """This rank's experts; their gradient becomes the mean over data ranks."""
        assert isinstance(weight, DTensor)
        copies = self.mesh.get_group(0) if self.mesh.ndim == 2 else None
        mean: Tensor = _Mean.apply(weight.to_local(), 1 / self.mesh.size(), copies)  # type: ignore[no-untyped-call]
        return mean


class _Mean(torch.autograd.Function):
    """The identity; its gradient is multiplied by a factor and summed over the ranks that hold a copy."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, factor: float, copies: dist.ProcessGroup | None) -> Tensor:
        ctx.reduction = (factor, copies)
        return weight.view_as(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        factor, copies = ctx.reduction
        grad = grad * factor
        if copies is not None:
            dist.all_reduce(grad, group=copies)
        return grad, None, None
