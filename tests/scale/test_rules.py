"""Layouts that cannot run are refused with their rule, and with the nearest one that can."""

from __future__ import annotations

import random

import pytest
from msgspec import structs

from flatout.core.errors import PlanError
from flatout.core.records.scale import Layout, ModelShape
from flatout.scale.rules import broken_rules, nearest_layout, require_possible

DENSE = ModelShape(hidden=4096, layers=32, heads=32, kv_heads=8, ffn=14336, vocab=128256, seq=8192, is_gated=True)
SPARSE = ModelShape(
    hidden=2048, layers=48, heads=32, kv_heads=4, head_dim=128, num_experts=128, experts_per_token=8, expert_ffn=768,
    vocab=151936, seq=4096, is_gated=True,
)  # fmt: skip


def drawn(rng: random.Random, model: ModelShape) -> Layout:
    """A layout that runs."""
    while True:
        tensor, pipeline = rng.choice([1, 2, 4]), rng.choice([1, 2, 4, 8])
        data, micro = rng.choice([1, 2, 4, 8]), rng.choice([1, 2])
        layout = Layout(
            tensor=tensor,
            pipeline=pipeline,
            data=data,
            context=rng.choice([1, 2]),
            expert=rng.choice([1, data]) if model.num_experts > 1 else 1,
            micro_batch=micro,
            global_batch=data * micro * pipeline * rng.choice([2, 4]),
            schedule=rng.choice(["1f1b", "interleaved", "zbv", "dualpipev"]) if pipeline > 1 else "1f1b",
            is_sequence_parallel=tensor > 1,
        )
        if not any(broken_rules(model, layout)):
            return layout


def spoilt(rng: random.Random, model: ModelShape, layout: Layout) -> tuple[ModelShape, Layout, int | None, str]:
    """The layout with one thing wrong, and the name of the rule that it breaks."""
    rule = rng.choice(
        ["devices", "heads", "key heads", "layers", "tokens", "sequence parallel", "micro-batches", "recompute"]
        + (["experts", "expert ffn"] if model.num_experts > 1 else ["ffn"])
    )
    whole = {"data": 1, "expert": 1, "context": 1}
    plain = structs.replace(layout, **whole, global_batch=layout.micro_batch * layout.pipeline * 4)  # type: ignore[arg-type]
    if rule == "devices":
        return model, layout, layout.num_devices - 1, rule
    if rule == "heads":
        return model, structs.replace(plain, tensor=rng.choice([3, 5, 6, 7])), None, rule
    if rule == "key heads":
        return model, structs.replace(plain, tensor=model.key_heads * 2), None, rule
    if rule == "layers":
        few = structs.replace(model, layers=rng.randrange(1, 4))
        return (
            few,
            structs.replace(plain, pipeline=8, schedule="1f1b", chunks=1, global_batch=plain.micro_batch * 32),
            None,
            rule,
        )
    if rule == "tokens":
        return model, structs.replace(plain, context=rng.choice([3, 5, 7])), None, rule
    if rule == "sequence parallel":
        odd = structs.replace(model, seq=model.seq + 2)
        return odd, structs.replace(plain, tensor=4, context=1, is_sequence_parallel=True), None, rule
    if rule == "micro-batches":
        kind = rng.choice(["interleaved", "zero-bubble"])
        odd_batch = plain.micro_batch * 5
        staged = structs.replace(plain, pipeline=4, schedule=kind, chunks=2, global_batch=odd_batch)  # type: ignore[arg-type]
        return model, staged, None, rule
    if rule == "recompute":
        return model, structs.replace(layout, recompute="selective", recompute_layers=2), None, rule
    if rule == "experts":
        few = structs.replace(model, num_experts=12, experts_per_token=2)
        return (
            few,
            structs.replace(layout, data=8, expert=8, global_batch=8 * layout.micro_batch * layout.pipeline * 2),
            None,
            rule,
        )
    if rule == "expert ffn":
        return structs.replace(model, expert_ffn=769), structs.replace(plain, tensor=2), None, rule
    return structs.replace(model, ffn=14337), structs.replace(plain, tensor=2), None, rule


@pytest.mark.parametrize("number", range(200))
def test_an_impossible_layout_is_refused_with_its_rule_and_the_nearest_that_can_run(number: int) -> None:
    rng = random.Random(number)
    base = rng.choice([DENSE, SPARSE])
    model, layout, devices, rule = spoilt(rng, base, drawn(rng, base))
    assert next(broken_rules(model, layout, devices)).name == rule
    near = nearest_layout(model, layout, devices)
    assert near is not None and not any(broken_rules(model, near, devices))
    assert near.num_devices <= layout.num_devices
    with pytest.raises(PlanError, match="the nearest that can has "):
        require_possible(model, layout, devices)


@pytest.mark.parametrize("number", range(20))
def test_a_layout_that_can_run_is_its_own_nearest(number: int) -> None:
    rng = random.Random(number)
    model = rng.choice([DENSE, SPARSE])
    layout = drawn(rng, model)
    require_possible(model, layout, layout.num_devices)
    assert nearest_layout(model, layout) == layout


def test_as_many_devices_as_there_are_where_too_many_are_asked_for() -> None:
    layout = Layout(data=16, global_batch=16)
    with pytest.raises(PlanError, match="takes 16 devices, and there are 8; the nearest that can has data 8"):
        require_possible(DENSE, layout, 8)
