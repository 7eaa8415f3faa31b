"""What a layout must have to run a model on a cluster, rule by rule, and the nearest one that does."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from math import inf, log2
from typing import NamedTuple

from msgspec import structs

from flatout.core.errors import PlanError
from flatout.core.records.scale import LOOPED, Layout, ModelShape
from flatout.scale.sizes import layer_kinds


class BrokenRule(NamedTuple):
    """A rule by its name, and in words what breaks it."""

    name: str
    text: str


def broken_rules(model: ModelShape, layout: Layout, num_devices: int | None = None) -> Iterator[BrokenRule]:
    """What keeps the layout from running; nothing when it can. Without `num_devices`, those are not looked at."""
    ranks = layout.tensor
    if num_devices is not None and layout.num_devices > num_devices:
        yield BrokenRule("devices", f"the layout takes {layout.num_devices} devices, and there are {num_devices}")
    if model.heads % ranks:
        yield BrokenRule("heads", f"{model.heads} heads cannot be divided by tensor={ranks}")
    elif not model.key_rank and model.key_heads % ranks:
        yield BrokenRule("key heads", f"{model.key_heads} heads of keys and values cannot be divided by tensor={ranks}")
    has_dense = any(kind.feed == "dense" for kind in layer_kinds(model))
    if has_dense and model.inner % ranks:
        yield BrokenRule("ffn", f"a width of {model.inner} cannot be divided by tensor={ranks}")
    if model.num_experts > 1 and model.expert_inner % layout.expert_ranks:
        yield BrokenRule(
            "expert ffn",
            f"an expert's width of {model.expert_inner} cannot be divided by expert_tensor={layout.expert_ranks}",
        )
    if model.state is not None and (model.state.heads % ranks or model.state.groups % ranks):
        yield BrokenRule(
            "states",
            f"{model.state.heads} heads of states in {model.state.groups} groups cannot be divided by tensor={ranks}",
        )
    if model.out_groups > 1 and model.out_groups % ranks:
        yield BrokenRule("out groups", f"{model.out_groups} groups of heads cannot be divided by tensor={ranks}")
    parts = layout.pipeline * layout.parts_per_stage
    if model.layers + 2 * layout.counts_ends < parts:
        yield BrokenRule(
            "layers", f"{model.layers} layers are fewer than {layout.pipeline} stages x {layout.parts_per_stage} chunks"
        )
    if model.seq % layout.context:
        yield BrokenRule("tokens", f"a sample of {model.seq} tokens cannot be divided by context={layout.context}")
    elif layout.is_sequence_parallel and (model.seq // layout.context) % ranks:
        yield BrokenRule(
            "sequence parallel", f"{model.seq // layout.context} tokens of a sample cannot be divided by tensor={ranks}"
        )
    if model.num_experts % layout.expert:
        yield BrokenRule("experts", f"{model.num_experts} experts cannot be divided by expert={layout.expert}")
    yield from _of_schedule(layout)
    if layout.recompute_layers and layout.recompute != "full":
        yield BrokenRule("recompute", f"recompute_layers is of recompute 'full', not of '{layout.recompute}'")


def _of_schedule(layout: Layout) -> Iterator[BrokenRule]:
    """What torch.distributed.pipelining's schedules ask of micro-batches."""
    stages, micro = layout.pipeline, layout.num_micro_batches
    if stages == 1:
        return
    if layout.schedule == "dualpipev" and micro < 2 * stages:
        yield BrokenRule(
            "micro-batches", f"schedule 'dualpipev' needs {2 * stages} micro-batches or more, and a step has {micro}"
        )
    if layout.schedule in LOOPED and micro % stages:
        yield BrokenRule(
            "micro-batches",
            f"schedule '{layout.schedule}' goes in rounds of {stages} micro-batches, and a step has {micro}",
        )


def require_possible(model: ModelShape, layout: Layout, num_devices: int | None = None) -> None:
    """Raises PlanError with the first broken rule and the nearest layout that breaks none."""
    broken = next(broken_rules(model, layout, num_devices), None)
    if broken is None:
        return
    near = nearest_layout(model, layout, num_devices)
    hint = (
        "; no layout of so many devices can" if near is None else f"; the nearest that can has {_changes(layout, near)}"
    )
    raise PlanError(broken.text + hint)


def _changes(layout: Layout, near: Layout) -> str:
    names = [name for name in Layout.__struct_fields__ if getattr(near, name) != getattr(layout, name)]
    return ", ".join(f"{name} {getattr(near, name)}" for name in names)


@lru_cache(maxsize=512)
def nearest_layout(model: ModelShape, layout: Layout, num_devices: int | None = None) -> Layout | None:
    """The layout that breaks no rule, on as many devices where there are so many, and whose degrees differ least.

    None where there is none.
    """
    devices = min(layout.num_devices, num_devices or layout.num_devices)
    best, least = None, inf
    for tensor in _divisors(devices):
        for context in _divisors(devices // tensor):
            for pipeline in _divisors(devices // tensor // context):
                data = devices // (tensor * context * pipeline)
                degrees = {"tensor": tensor, "context": context, "pipeline": pipeline, "data": data}
                far = sum(abs(log2(value / getattr(layout, name))) for name, value in degrees.items())
                if far >= least:
                    continue
                found = next(
                    (
                        one
                        for one in _variants(model, layout, degrees)
                        if not any(broken_rules(model, one, num_devices))
                    ),
                    None,
                )
                if found is not None:
                    best, least = found, far
    return best


def _variants(model: ModelShape, layout: Layout, degrees: dict[str, int]) -> Iterator[Layout]:
    """The layout with those degrees, then with further changes, from the least on."""
    data = degrees["data"]
    batch = layout.micro_batch * data
    whole = max(1, round(layout.global_batch / batch)) * batch
    staged = max(1, round(whole / batch / (2 * degrees["pipeline"]))) * 2 * degrees["pipeline"] * batch
    experts = [layout.expert, *(e for e in _divisors(model.num_experts)[::-1] if e < layout.expert)]
    for global_batch in dict.fromkeys((layout.global_batch, whole, staged)):
        for schedule, chunks in dict.fromkeys(((layout.schedule, layout.chunks), (layout.schedule, 1), ("1f1b", 1))):
            for expert in experts:
                changed = {
                    **degrees,
                    "global_batch": global_batch,
                    "schedule": schedule,
                    "chunks": chunks,
                    "expert": expert,
                    "expert_tensor": layout.expert_tensor if expert == layout.expert else 0,
                    "shard_ranks": layout.shard_ranks if layout.shard_ranks and data % layout.shard_ranks == 0 else 0,
                    "compression": layout.compression if data > 1 else "none",
                    "recompute_layers": layout.recompute_layers if layout.recompute == "full" else 0,
                }
                try:
                    yield structs.replace(layout, **changed)
                except PlanError:
                    continue


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]
