"""Layouts, steps and stages that the planner's reports are tested with, built by hand, and schedules that were played."""

from __future__ import annotations

from collections.abc import Sequence

from flatout.core.records.scale import Cluster, Layout, ModelShape, Ranked, ScheduleKind, StageMemory, StepTime, Tier
from flatout.machine.cost.schedules import Done, schedule_table, simulated_schedule
from flatout.scale.search import Ranking

GIB = 1 << 30
LLAMA = ModelShape(
    hidden=8192,
    layers=80,
    heads=64,
    vocab=128256,
    seq=8192,
    kv_heads=8,
    ffn=28672,
    is_gated=True,
    is_tied=False,
)
CLUSTER = Cluster(
    device="nvidia-h100-sxm",
    num_devices=1024,
    tiers=(Tier(name="node", reach=8, bytes_per_s=450e9, latency_s=4e-6),),
)
LAYOUT = Layout(
    tensor=8,
    pipeline=4,
    data=32,
    global_batch=512,
    schedule="interleaved",
    chunks=2,
    shard=1,
    is_sequence_parallel=True,
    recompute="selective",
)
OTHER = Layout(tensor=8, data=128, global_batch=512, shard=3)


def step(**seconds: float) -> StepTime:
    """A step whose parts are given; the others take nothing."""
    parts = dict.fromkeys((name for name in StepTime.__struct_fields__ if name != "total_s"), 0.0) | seconds
    return StepTime(total_s=sum(parts.values()), **parts)


def memory(
    weights: float = 10, activations: float = 30, logits: float = 0, state: float = 5, slack: float = 2
) -> StageMemory:
    """A stage's parts in GiB."""
    return StageMemory(
        weight_bytes=int(weights * GIB),
        gradient_bytes=int(weights * GIB),
        state_bytes=int(state * GIB),
        activation_bytes=int(activations * GIB),
        logits_bytes=int(logits * GIB),
        buffer_bytes=0,
        slack_bytes=int(slack * GIB),
    )


STAGES = (memory(activations=40), memory(activations=32), memory(activations=24), memory(activations=16, logits=8))
FIRST_STEP = step(compute_s=6.0, tensor_s=1.5, bubble_s=1.0, data_s=0.2, optimizer_s=0.2)
FIRST = Ranked(layout=LAYOUT, step=FIRST_STEP, memory=STAGES[0], low_s=7.6, high_s=10.2, mfu=0.44)
SECOND = Ranked(
    layout=OTHER,
    step=step(compute_s=6.0, tensor_s=1.5, data_s=1.9, optimizer_s=0.2),
    memory=memory(4, 20),
    low_s=8.2,
    high_s=11.0,
    mfu=0.41,
)
THIRD = Ranked(layout=OTHER, step=step(compute_s=12.0), memory=memory(4, 20), low_s=10.3, high_s=13.8, mfu=0.33)
FOUND = Ranking((FIRST, SECOND, THIRD), 214, 90, None)


def rows(
    kind: ScheduleKind = "1f1b", *, stages: int = 4, micro_batches: int = 8, chunks: int = 1, send_s: float = 0.0
) -> Sequence[Sequence[Done]]:
    """A schedule whose backward takes twice its forward, and halves where it is split, played."""
    seconds = {"F": 0.1, "B": 0.2, "I": 0.1, "W": 0.1}
    table = schedule_table(kind, stages=stages, micro_batches=micro_batches, chunks=chunks)
    of_stage = 2 if kind in ("zbv", "dualpipev") else chunks
    return simulated_schedule(table, seconds=lambda action: seconds[action.kind], send_s=send_s, chunks=of_stage)
