"""The trials that rules about the model ask for, run on real loops: that they measure, refuse with a reason, and undo "
"their switches."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import pytest
import torch
from torch import nn

from flatout.check.capture import Capture
from flatout.check.observe.collectors.settings import is_flushing_denormals
from flatout.check.observe.steps.schedule import Schedule
from flatout.core.records.evidence import Evidence
from flatout.core.records.trial import (
    TimeAttentionCall,
    TimeForeach,
    TimeMergedLinears,
    TimeModel,
    TimeSparseEmbedding,
    TimeStackedLinears,
    TimeStrides,
    Trial,
    TrialResult,
)

pytestmark = pytest.mark.slow

ATTENTION = TimeAttentionCall(
    batch=1,
    heads=2,
    q_len=32,
    kv_len=32,
    head_dim=8,
    dtype="float32",
    masked=True,
    dropout=0.0,
    backward=True,
    cure="causal",
)
LINEARS = TimeMergedLinears(rows=16, in_features=8, out_features=(8, 4), dtype="float32", bias=True, backward=True)
STACKED = TimeStackedLinears(num=4, rows=16, in_features=8, out_features=4, dtype="float32", bias=True, backward=True)


def try_on(loop: Callable[[], object], propose: Callable[[Evidence], Iterable[Trial]]) -> TrialResult:
    """What came of the one trial proposed; a switch that it throws is never taken for the script's."""
    capture = Capture(command=("test",), cwd=".", schedule=Schedule(), machine=None, propose=propose)
    capture.start()
    try:
        loop()
    finally:
        evidence = capture.finish(exit="finished", exit_code=0)
    assert not [s for s in evidence.workload.settings if s.source is not None]
    (result,) = evidence.trials
    return result


def row_of(evidence: Evidence, op: str) -> int:
    return next(i for i, o in enumerate(evidence.operators) if o.op == op)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 2))


NET = net()


def train_images() -> None:
    optimizer = torch.optim.SGD(NET.parameters(), lr=0.1)
    for _ in range(14):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = NET(torch.randn(4, 3, 8, 8)).float().square().mean()
        loss.backward()
        optimizer.step()


def measured(result: TrialResult) -> None:
    assert not result.refused
    assert result.now_s is not None
    assert result.now_s > 0
    assert result.cured_s is not None
    assert result.cured_s > 0


@pytest.mark.parametrize("variant", ["float32", "channels-last", "flush-denormal", "threads"])
def test_a_variant_of_the_model_is_measured_and_its_switch_thrown_back(variant: str) -> None:
    before = (torch.get_num_threads(), is_flushing_denormals(), torch.autocast.__init__)
    weights = [p.detach().clone() for p in NET.parameters()]
    trial = TimeModel(model=0, variant=variant, backward=True)  # type: ignore[arg-type]

    result = try_on(train_images, lambda _: [trial])

    if variant != "threads":  # beside other work threads may be hopeless, which is refused with that reason
        measured(result)
    assert (torch.get_num_threads(), is_flushing_denormals(), torch.autocast.__init__) == before
    assert all(p.is_contiguous() for p in NET.parameters())
    assert any(not torch.equal(a, b) for a, b in zip(weights, NET.parameters(), strict=True))


@pytest.mark.parametrize("trial", [ATTENTION, LINEARS, STACKED], ids=lambda t: type(t).__name__)
def test_a_call_and_its_cure_are_measured(trial: Trial) -> None:
    measured(try_on(train_images, lambda _: [trial]))


def test_a_loop_over_parameters_is_replayed_gathered() -> None:
    def loop() -> None:
        layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
        optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
        for _ in range(14):
            optimizer.zero_grad()
            layers(torch.randn(4, 8)).mean().backward()
            for parameter in layers.parameters():
                parameter.grad.mul_(0.5)
            optimizer.step()

    def propose(evidence: Evidence) -> list[Trial]:
        rows = tuple(i for i, o in enumerate(evidence.operators) if o.op == "aten.mul_" and o.phase == "other")
        return [TimeForeach(operators=rows)] if rows else []

    result = try_on(loop, propose)

    measured(result)
    assert result.parts["gathered"] == pytest.approx(1 - 1 / 12)


def embedded(
    loop_optimizer: type[torch.optim.Optimizer], kind: Callable[..., nn.Module] = nn.Embedding
) -> Callable[[], None]:
    def loop() -> None:
        table = kind(500, 8)
        optimizer = loop_optimizer(table.parameters(), lr=0.1)  # type: ignore[call-arg]
        for _ in range(14):
            optimizer.zero_grad()
            table(torch.randint(0, 50, (4, 5))).mean().backward()
            optimizer.step()

    return loop


def propose_sparse(evidence: Evidence) -> list[Trial]:
    return [TimeSparseEmbedding(operator=row_of(evidence, "aten.embedding_dense_backward"), optimizer=0)]


def test_a_table_is_updated_densely_and_sparsely() -> None:
    result = try_on(embedded(torch.optim.Adam), propose_sparse)

    measured(result)
    assert 1 <= result.parts["touched"] <= 20


def test_a_bag_of_embeddings_is_updated_densely_and_sparsely() -> None:
    result = try_on(
        embedded(torch.optim.Adagrad, nn.EmbeddingBag),
        lambda evidence: [TimeSparseEmbedding(operator=row_of(evidence, "aten._embedding_bag_backward"), optimizer=0)],
    )

    measured(result)
    assert 1 <= result.parts["touched"] <= 20


def test_bags_of_maxima_have_no_sparse_gradients() -> None:
    result = try_on(
        embedded(torch.optim.SGD, partial(nn.EmbeddingBag, mode="max")),
        lambda evidence: [TimeSparseEmbedding(operator=row_of(evidence, "aten._embedding_bag_backward"), optimizer=0)],
    )
    assert result.refused


def test_an_optimizer_without_sparse_counterpart_is_refused() -> None:
    assert "sparse" in try_on(embedded(torch.optim.RMSprop), propose_sparse).refused


def test_a_copy_and_its_reader_are_measured_without_the_copy() -> None:
    def loop() -> None:
        layer = nn.Linear(8, 8)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        other = torch.randn(8, 8)
        for _ in range(14):
            optimizer.zero_grad()
            (layer(torch.randn(8, 8)).t().contiguous() @ other).mean().backward()
            optimizer.step()

    def propose(evidence: Evidence) -> list[Trial]:
        rows = [i for i, o in enumerate(evidence.operators) if o.op == "aten.mm" and o.phase != "backward"]
        return [TimeStrides(copy=row_of(evidence, "aten.clone"), reader=rows[0], argument=0)]

    measured(try_on(loop, propose))
