"""Steps of layouts measured on the devices at hand, of a reference transformer: seconds, and the memory that each rank took."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from math import inf
from statistics import mean
from time import monotonic
from typing import Final

import torch
import torch.distributed as dist
from msgspec import structs
from torch import Tensor, nn
from torch.nn import functional as F

from flatout.blocks.parallel.experts import Experts
from flatout.blocks.parallel.layouts import parallelize
from flatout.blocks.parallel.world import World
from flatout.core.errors import PlanError
from flatout.core.records.scale import Layout, MeasuredStep, ModelShape
from flatout.machine.measure.stats import median
from flatout.machine.measure.timer import host_clock_for

_WARM_UP: Final = 2
_STEPS: Final = 15
_FEWEST_STEPS: Final = 3
_PROBE_LAYERS: Final = 2
"""Of a tiny model whose forward and backward run between steps, for how fast the host is then: a few milliseconds."""
_ENOUGH_S: Final = 1.5
"""Of measured steps, after which the fewest are enough: what long ones wait for is rarely the host, which varies most."""
_DISTURBED: Final = 1.25
"""Times what the host usually takes for a tiny layer: beside a step where it took longer, others had the host's caches."""
_FEWEST_SPEEDS: Final = 3
_MOST_TIMES: Final = 3


def measured_steps(
    steps: Sequence[tuple[ModelShape, Layout]],
    world: World,
    *,
    limit_s: float,
    mixed: torch.dtype | None = torch.bfloat16,
) -> Iterator[MeasuredStep]:
    """Each model in its layout in turn, until `limit_s` have passed: random tokens, AdamW; all ranks call it.

    Seconds are the median of 15 steps (down to 3 of long ones) after 2, of the slowest rank; between them the host's speed is
    measured. A step beside which the host was a quarter slower than it usually was is measured again, twice at most: others
    disturbed it, and the time with the fastest host counts. Bytes are the allocator's peak of each rank from the first step on,
    None on a CPU. A layout that cannot be run here comes with the reason and no seconds. All ranks go through the same layouts,
    and agree on when time is over.
    """
    began = monotonic()
    speeds: list[float] = []

    def is_over() -> bool:
        return max(world.gathered(monotonic() - began)) > limit_s

    for shape, layout in steps:
        found: list[MeasuredStep] = []
        while not is_over():
            found.append(_measured_or_refused(shape, layout, world, mixed))
            if len(found) == _MOST_TIMES or not _is_disturbed(found, speeds):
                break
        if not found:
            return
        step = min(found, key=lambda step: inf if step.host_layer_s is None else step.host_layer_s)
        if step.host_layer_s is not None:
            speeds.append(step.host_layer_s)
        yield step


def _is_disturbed(found: Sequence[MeasuredStep], speeds: Sequence[float]) -> bool:
    """Whether the host was slower beside each measurement of a step than it usually was beside others (`speeds`, seconds)."""
    own = [step.host_layer_s for step in found if step.host_layer_s is not None]
    return bool(own) and len(speeds) >= _FEWEST_SPEEDS and min(own) > _DISTURBED * median(speeds)


def _measured_or_refused(shape: ModelShape, layout: Layout, world: World, mixed: torch.dtype | None) -> MeasuredStep:
    try:
        return _measured(shape, layout, world, mixed)
    except PlanError as e:
        return MeasuredStep(model=shape, layout=layout, why=str(e))
    finally:
        gc.collect()
        if world.device.type == "cuda":
            torch.cuda.empty_cache()


def measured_in_rounds(
    steps: Sequence[tuple[ModelShape, Layout]],
    world: World,
    *,
    limit_s: float,
    rounds: int,
    mixed: torch.dtype | None = torch.bfloat16,
) -> Iterator[tuple[MeasuredStep, list[MeasuredStep]]]:
    """All layouts, and all of them again while there is time, `rounds` times at most: each step, and the means of all that were
    measured until then. A host's speed changes within minutes, so that one round is of one moment. All ranks call it.
    """
    began = monotonic()
    found: list[list[MeasuredStep]] = []
    while len(found) < rounds:
        left_s = limit_s - max(world.gathered(monotonic() - began))
        if found and left_s <= 0:
            return
        found.append([])
        for step in measured_steps(steps, world, limit_s=left_s, mixed=mixed):
            found[-1].append(step)
            yield step, averaged(found)


def averaged(rounds: Sequence[Sequence[MeasuredStep]]) -> list[MeasuredStep]:
    """Steps of the same layouts that were measured in rounds: means of seconds and of the host's speed, the largest of peaks."""
    by_layout: dict[tuple[ModelShape, Layout], list[MeasuredStep]] = {}
    for step in (step for steps in rounds for step in steps):
        by_layout.setdefault((step.model, step.layout), []).append(step)
    return [_mean(steps) for steps in by_layout.values()]


def _mean(steps: Sequence[MeasuredStep]) -> MeasuredStep:
    done = [step for step in steps if step.seconds is not None]
    if not done:
        return steps[0]
    speeds = [step.host_layer_s for step in done if step.host_layer_s is not None]
    peaks = [step.peak_bytes for step in done if step.peak_bytes is not None]
    return structs.replace(
        done[0],
        seconds=mean(step.seconds for step in done if step.seconds is not None),
        host_layer_s=mean(speeds) if speeds else None,
        peak_bytes=tuple(map(max, zip(*peaks, strict=True))) if peaks else None,
    )


def _measured(shape: ModelShape, layout: Layout, world: World, mixed: torch.dtype | None) -> MeasuredStep:
    torch.manual_seed(0)
    device = world.device
    size = layout.micro_batch
    example = tuple(torch.zeros(size, shape.seq, dtype=torch.int64) for _ in range(2))
    with _construction_device(shape, device):
        model = ReferenceTransformer(shape)
    parallel = parallelize(model, layout, world, example=example, mixed=mixed)
    del model
    optimizer = parallel.optimizer(torch.optim.AdamW, lr=1e-4, fused=True)
    if device.type == "cuda":
        gc.collect()
        torch.cuda.reset_peak_memory_stats(device)
    samples = size * layout.num_micro_batches
    ids = torch.randint(shape.vocab, (samples, shape.seq), device=device)
    positions = torch.arange(shape.seq, device=device).expand(samples, shape.seq)

    def step() -> None:
        optimizer.zero_grad()
        parallel.step(ids, positions, target=ids, loss=token_loss)
        optimizer.step()

    seconds, host_layer_s = _medians_s(step, world)
    peaks = world.gathered(torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0)
    return MeasuredStep(
        model=shape,
        layout=layout,
        seconds=seconds,
        host_layer_s=host_layer_s,
        peak_bytes=tuple(peaks) if device.type == "cuda" else None,
    )


def _construction_device(shape: ModelShape, device: torch.device) -> torch.device:
    """The device on which to build the model: its own where it has room for all of it, else the host, which takes longer."""
    with torch.device("meta"):
        num_parameters = sum(p.numel() for p in ReferenceTransformer(shape).parameters())
    if device.type != "cuda" or 4 * num_parameters > torch.cuda.mem_get_info(device)[0] // 2:
        return torch.device("cpu")
    return device


def _medians_s(step: Callable[[], None], world: World) -> tuple[float, float]:
    """Medians of the slowest rank: seconds of a step, and of the host for a tiny layer between steps."""
    clock = host_clock_for(world.device)
    found, of_host = [], []
    tiny_layers = _tiny_layers(world.device)

    for number in range(_WARM_UP + _STEPS):
        if world.num_ranks > 1:
            dist.barrier()

        def whole() -> None:
            step()
            if world.device.type == "cuda":
                torch.cuda.current_stream(world.device).synchronize()

        seconds = max(world.gathered(clock.elapsed_s(whole, 1)))
        host_layer_s = max(world.gathered(clock.elapsed_s(tiny_layers, 1))) / _PROBE_LAYERS
        if number >= _WARM_UP or (number and seconds > _ENOUGH_S / 3):
            found.append(seconds)
            of_host.append(host_layer_s)
        if len(found) >= _FEWEST_STEPS and sum(found) > _ENOUGH_S:  # the same on all ranks
            break
    return median(found), median(of_host)


def _tiny_layers(device: torch.device) -> Callable[[], None]:
    """The forward and backward of a model so small that they take what its operators take of the host."""
    shape = ModelShape(hidden=32, layers=_PROBE_LAYERS, heads=2, vocab=32, seq=8)
    model = ReferenceTransformer(shape).to(device)
    ids = torch.zeros(1, shape.seq, dtype=torch.int64, device=device)
    positions = torch.arange(shape.seq, device=device)[None]

    def run() -> None:
        model.zero_grad()
        token_loss(model(ids, positions), ids).backward()

    return run


# B batch, T tokens, C hidden, N heads, H numbers of a head


class ReferenceTransformer(nn.Module):
    """A decoder-only transformer: ids_BT, positions_BT -> logits.

    RMS norms, rotary positions, no biases, no dropout; experts where the sizes have any.
    """

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocab, shape.hidden)
        self.blocks = nn.ModuleList(_TransformerBlock(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden)
        self.head = nn.Linear(shape.hidden, shape.vocab, bias=False)
        if shape.is_tied:
            self.head.weight = self.embedding.weight
        for weight in (self.embedding.weight, self.head.weight):
            nn.init.normal_(weight, std=shape.hidden**-0.5)
        self.rates: Tensor
        rates = 1e4 ** -(torch.arange(0, shape.head_width, 2) / shape.head_width)
        self.register_buffer("rates", rates, persistent=False)

    def forward(self, ids_BT: Tensor, positions_BT: Tensor) -> Tensor:
        x_BTC = self.embedding(ids_BT)
        angles = positions_BT[:, None, :, None] * self.rates
        cos, sin = angles.cos().to(x_BTC.dtype), angles.sin().to(x_BTC.dtype)
        for block in self.blocks:
            x_BTC = block(x_BTC, cos, sin)
        logits: Tensor = self.head(self.norm(x_BTC))
        return logits


def token_loss(logits: Tensor, target_BT: Tensor) -> Tensor:
    """The mean cross-entropy, in float32."""
    return F.cross_entropy(logits.flatten(0, 1).float(), target_BT.flatten())


class _TransformerBlock(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(shape.hidden), nn.RMSNorm(shape.hidden)
        self.attention = _SelfAttention(shape)
        if shape.num_experts > 1:
            self.feed: nn.Module = Experts(
                shape.hidden, shape.inner, shape.num_experts, shape.experts_per_token, is_gated=shape.is_gated
            )
        else:
            self.feed = _FeedForward(shape)

    def forward(self, x_BTC: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x_BTC = x_BTC + self.attention(self.norm1(x_BTC), cos, sin)
        out: Tensor = x_BTC + self.feed(self.norm2(x_BTC))
        return out


class _SelfAttention(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        keys = shape.key_heads * shape.head_width
        self.query = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.key, self.value = nn.Linear(shape.hidden, keys, bias=False), nn.Linear(shape.hidden, keys, bias=False)
        self.out = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self._width, self._is_grouped = shape.head_width, shape.key_heads < shape.heads

    def forward(self, x_BTC: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, t, _ = x_BTC.shape

        def heads(y: Tensor) -> Tensor:
            return y.view(b, t, -1, self._width).transpose(1, 2)

        def rotated(y: Tensor) -> Tensor:
            first, second = y.chunk(2, -1)
            return torch.cat([first * cos - second * sin, first * sin + second * cos], -1)

        q_BNTH, k_BNTH = rotated(heads(self.query(x_BTC))), rotated(heads(self.key(x_BTC)))
        v_BNTH = heads(self.value(x_BTC))
        y_BNTH = F.scaled_dot_product_attention(q_BNTH, k_BNTH, v_BNTH, is_causal=True, enable_gqa=self._is_grouped)
        out: Tensor = self.out(y_BNTH.transpose(1, 2).reshape(b, t, -1))
        return out


class _FeedForward(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.hidden, shape.inner, bias=False) if shape.is_gated else None
        self.up = nn.Linear(shape.hidden, shape.inner, bias=False)
        self.down = nn.Linear(shape.inner, shape.hidden, bias=False)

    def forward(self, x_BTC: Tensor) -> Tensor:
        up = self.up(x_BTC)
        out: Tensor = self.down(F.gelu(up) if self.gate is None else F.silu(self.gate(x_BTC)) * up)
        return out
