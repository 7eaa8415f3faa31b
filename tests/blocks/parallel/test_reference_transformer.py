from __future__ import annotations

import pytest
import torch

from flatout.blocks.parallel.layout_measurement import ReferenceTransformer, token_loss
from flatout.core.records.scale import Layout, ModelShape, Software
from flatout.machine.measure.weightless import weigh
from flatout.scale.memory import memory_of
from flatout.scale.sizes import num_parameters

SHAPES = {
    "plain": ModelShape(hidden=64, layers=3, heads=4, vocab=256, seq=32),
    "gated, grouped": ModelShape(
        hidden=64, layers=2, heads=4, kv_heads=2, ffn=96, vocab=256, seq=32, is_gated=True, is_tied=False
    ),
    "experts": ModelShape(hidden=64, layers=2, heads=4, vocab=256, seq=32, num_experts=4, experts_per_token=2),
}


@pytest.mark.parametrize("name", SHAPES)
def test_it_has_the_parameters_that_the_planner_counts_but_for_norms(name: str) -> None:
    shape = SHAPES[name]
    of_layers, of_embedding = num_parameters(shape)
    norms = (2 * shape.layers + 1) * shape.hidden
    wanted = of_layers + of_embedding * (1 if shape.is_tied else 2) + norms
    assert sum(p.numel() for p in ReferenceTransformer(shape).parameters()) == wanted


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
def test_it_learns_a_batch(name: str) -> None:
    shape = SHAPES[name]
    torch.manual_seed(0)
    model = ReferenceTransformer(shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    ids, positions = torch.randint(256, (2, 32)), torch.arange(32).expand(2, 32)
    losses = []
    for _ in range(8):
        loss = token_loss(model(ids, positions), ids)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.slow
def test_the_accountant_says_no_less_than_a_step_without_data_holds() -> None:
    shape = ModelShape(hidden=512, layers=4, heads=8, vocab=8192, seq=512, is_gated=True)

    def make() -> object:
        model = ReferenceTransformer(shape)
        optimizer = torch.optim.SGD(model.parameters(), momentum=0.9, foreach=False)

        def step() -> None:
            optimizer.zero_grad()
            ids = torch.zeros(4, 512, dtype=torch.int64)
            token_loss(model(ids, ids), ids).backward()
            optimizer.step()

        return step

    seen = weigh(make).peak_bytes  # type: ignore[arg-type]
    software = Software(dtype="float32", gradient_bytes=4, state_bytes=4)
    said = memory_of(shape, Layout(micro_batch=4, global_batch=4), software)[0]
    assert seen <= said.total_bytes
    assert said.total_bytes - said.slack_bytes == pytest.approx(seen, rel=0.06)
