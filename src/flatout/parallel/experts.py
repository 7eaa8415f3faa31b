"""A mixture-of-experts feed-forward that drops no token, on one device or with its experts spread over ranks."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from flatout.errors import UsageError
from flatout.parallel.expert_products import Activation, Chosen, Way, Weights, all_at_once, by_expert, why_not_grouped
from flatout.parallel.routing import Scores, balance_loss, combined, exchanged, ordered, permuted, route, taken

# B batch, T tokens, N = B * T, K experts a token, R = N * K rows, E experts, C channels, F inner width


class Experts(nn.Module):
    """A feed-forward of `num_experts`, of which each token takes `experts_per_token`: x_BTC -> out_BTC, any leading shape.

    Every token reaches all experts that it chose: there is no capacity and nothing is dropped. An expert is
    `activation(x @ gate) * (x @ up) @ down`, without `is_gated` `activation(x @ up) @ down`; all experts' weights are one
    parameter each, [E, C, F] and [E, F, C]. The router's product, scores and choice are in float32 whatever the rest is in.

    `scores` of the router are a softmax over all experts or a sigmoid each; `is_normalised` makes the weights of a token add
    to 1. `way` of the products: 'grouped' (bfloat16; the host never waits) or 'loop' (an expert at a time; on a GPU the
    host waits for the counts once a call). Not given, it is 'grouped' on a GPU where that can be and 'loop' elsewhere; `chosen`
    tells which it was at the last call, and why. Asked for where it cannot be, 'grouped' raises UsageError.

    Two ways to even load: `balance_experts` after each optimizer step moves a bias of the choice by `balance_step` (0.001 in
    DeepSeek-V3, arXiv 2412.19437, section 4.2; 0 turns that off), and `has_auxiliary_loss` has the layer tell the loss that
    `auxiliary_loss` collects. Raises UsageError for numbers that do not fit.
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
        way: Way | None = None,
    ) -> None:
        super().__init__()
        if min(hidden, ffn, num_experts) < 1 or not 1 <= experts_per_token <= num_experts:
            raise UsageError(
                f"hidden {hidden}, ffn {ffn}, num_experts {num_experts}, experts_per_token {experts_per_token}: give positive "
                "numbers, and no more experts a token than there are"
            )
        if scores not in ("softmax", "sigmoid") or way not in (None, "loop", "grouped"):
            raise UsageError(f"scores '{scores}', way {way!r}: give softmax or sigmoid, and loop, grouped or nothing")
        self.num_experts, self.experts_per_token = num_experts, experts_per_token
        self.scores, self.is_normalised, self.activation = scores, is_normalised, activation
        self.balance_step, self.has_auxiliary_loss = balance_step, has_auxiliary_loss
        self.way = way
        self.chosen: Chosen | None = None
        self.router = nn.Linear(hidden, num_experts, bias=False)
        self.up_ECF = nn.Parameter(torch.empty(num_experts, hidden, ffn))
        self.gate_ECF = nn.Parameter(torch.empty(num_experts, hidden, ffn)) if is_gated else None
        self.down_EFC = nn.Parameter(torch.empty(num_experts, ffn, hidden))
        self.bias_steps_E: Tensor
        # In whole steps: model.bfloat16() would round a bias to 8 bits, and leaves integers alone.
        self.register_buffer("bias_steps_E", torch.zeros(num_experts, dtype=torch.int32))
        # No buffer: DistributedDataParallel would overwrite every rank's counts by those of rank 0.
        self._counts_E: Tensor | None = None
        self._told: Tensor | None = None
        self._ranks: _Ranks | None = None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Weights as nn.Linear begins, uniform within the root of 1 over its inputs; no bias of the choice."""
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
            routed = route(
                logits_NE, bias_E, num=self.experts_per_token, scores=self.scores, is_normalised=self.is_normalised
            )
        order = ordered(routed.expert_NK.flatten(), self.num_experts)
        if self.training:
            self._counts_E = self._counted_E().to(x.device) + order.counts_E
        if self.has_auxiliary_loss and torch.is_grad_enabled():
            self._told = balance_loss(routed.score_NE, self._share_E(order.counts_E))
        dtype = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype
        weights = self._weights().to(dtype) if dtype != x.dtype else self._weights()
        with torch.autocast(x.device.type, enabled=False):
            rows_RC = taken(x_NC.to(dtype), order, self.experts_per_token)
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

    def spread(self, mesh: DeviceMesh) -> list[nn.Parameter]:
        """Divide the experts among ranks, as `spread_experts` does."""
        return spread_experts(self, mesh)

    def balance(self, group: dist.ProcessGroup | None = None) -> None:
        """Move the bias of the choice, as `balance_experts` does."""
        balance_experts(self, group=group)

    def _counted_E(self) -> Tensor:
        if self._counts_E is None:
            return torch.zeros(self.num_experts, dtype=torch.int64, device=self.bias_steps_E.device)
        return self._counts_E

    def _weights(self) -> Weights:
        if self._ranks is None:
            return Weights(self.up_ECF, self.gate_ECF, self.down_EFC)
        up, gate, down = (
            None if w is None else self._ranks.own(w) for w in (self.up_ECF, self.gate_ECF, self.down_EFC)
        )
        assert up is not None and down is not None
        return Weights(up, gate, down)

    def _products(self, rows_RC: Tensor, counts_E: Tensor, sizes: list[int] | None, weights: Weights) -> Tensor:
        reason = why_not_grouped(rows_RC, weights)
        if self.way == "grouped" and reason:
            raise UsageError(f"way 'grouped' cannot be kept: {reason}; change that, or give way='loop'")
        if self.way is not None:
            self.chosen = Chosen(self.way, "")
        elif reason or not rows_RC.is_cuda:
            self.chosen = Chosen("loop", reason or "the rows are on a CPU, where a grouped product is a loop too")
        else:
            self.chosen = Chosen("grouped", "the host need not know how many rows an expert has")
        if self.chosen.way == "grouped":
            return all_at_once(rows_RC, counts_E, weights, self.activation)
        return by_expert(rows_RC, counts_E.tolist() if sizes is None else sizes, weights, self.activation)

    def _over_ranks(self, rows_RC: Tensor, counts_E: Tensor, weights: Weights, ranks: _Ranks) -> Tensor:
        """Rows go to the ranks of their experts and come back. The host reads the counts once: it has to tell the sizes."""
        sent = counts_E.view(ranks.num, -1)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=ranks.group)
        to, of = torch.stack((sent, received)).tolist()
        send, receive = [sum(sizes) for sizes in to], [sum(sizes) for sizes in of]
        rows_RC = exchanged(rows_RC, send=send, receive=receive, group=ranks.group)
        num_own = sent.shape[1]
        own = torch.arange(num_own, device=rows_RC.device).repeat(ranks.num)
        order = ordered(own.repeat_interleave(received.flatten(), output_size=sum(receive)), num_own)
        rows_RC = permuted(rows_RC, order.choice_R, order.place_R)
        rows_RC = self._products(rows_RC, order.counts_E, [sum(sizes) for sizes in zip(*of, strict=True)], weights)
        rows_RC = permuted(rows_RC, order.place_R, order.choice_R)
        return exchanged(rows_RC, send=receive, receive=send, group=ranks.group)

    def _share_E(self, counts_E: Tensor) -> Tensor:
        """Of the rows of all ranks: the mean over ranks of losses is then the loss of all their tokens."""
        counts_E = counts_E.clone()
        if self._ranks is not None:
            self._ranks.add(counts_E)
        return counts_E / counts_E.sum().clamp_min(1)


def spread_experts(module: nn.Module, mesh: DeviceMesh) -> list[nn.Parameter]:
    """Divide the experts of all `Experts` in a module among ranks (expert parallel); the parameters that are divided.

    The mesh has all data ranks: one dimension, or two, of which the last divides the experts and the first holds copies. Rank i
    of n keeps experts i * E/n up to (i + 1) * E/n as DTensors: a state_dict has the names that it had, and checkpoints are read
    over another number of ranks. Weights begin as those of the mesh's first rank. Call it before the optimizer is made, with
    the module that DistributedDataParallel is to wrap: that is told to leave these parameters alone. FSDP2 is told by
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
            divided[f"{path}.{name}" if path else name] = nn.Parameter(part, requires_grad=weight.requires_grad)
            layer.register_parameter(name, divided[f"{path}.{name}" if path else name])
        layer._ranks = ranks
    left = [*getattr(module, "_ddp_params_and_buffers_to_ignore", ()), *divided]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, left)
    return list(divided.values())


def balance_experts(module: nn.Module, *, group: dist.ProcessGroup | None = None) -> None:
    """Make overloaded experts be chosen less and others more, of all `Experts` in a module; call it after an optimizer step.

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
    """The sum of the balance losses that the layers of a module tell of their last forward; hands each out once.

    Of one layer E * sum(share of rows * mean score), 1 when all is even (Switch Transformer, arXiv 2101.03961, equation 4);
    add it to the loss with a small factor (0.01 there). Layers that are spread take shares of rows over all ranks, so that
    the mean over ranks with equally many tokens is the loss of them all. Raises UsageError where no layer has one.
    """
    layers = [m for m in module.modules() if isinstance(m, Experts) and m._told is not None]
    losses = [layer._told for layer in layers if layer._told is not None]
    if not losses:
        raise UsageError(
            "no layer has an auxiliary loss; make Experts with has_auxiliary_loss=True, and run a forward first"
        )
    for layer in layers:
        layer._told = None
    return torch.stack(losses).sum()


class _Ranks(NamedTuple):
    """The ranks that experts are spread over: `num` in `group` have all experts once."""

    mesh: DeviceMesh
    num: int
    group: dist.ProcessGroup

    def add(self, counts: Tensor) -> None:
        """Over all data ranks, in place."""
        for dim in range(self.mesh.ndim):
            dist.all_reduce(counts, group=self.mesh.get_group(dim))

    def own(self, weight: nn.Parameter) -> Tensor:
        """This rank's experts; their gradient becomes the mean over data ranks."""
        assert isinstance(weight, DTensor)
        copies = self.mesh.get_group(0) if self.mesh.ndim == 2 else None
        mean: Tensor = _Mean.apply(weight.to_local(), 1 / self.mesh.size(), copies)  # type: ignore[no-untyped-call]
        return mean


class _Mean(torch.autograd.Function):
    """Itself; its gradient by a factor, added over ranks that hold a copy."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, factor: float, copies: dist.ProcessGroup | None) -> Tensor:
        ctx.way = (factor, copies)
        return weight.view_as(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        factor, copies = ctx.way
        grad = grad * factor
        if copies is not None:
            dist.all_reduce(grad, group=copies)
        return grad, None, None
