"""Trials really run both sides, and both sides compute the same."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from flatout.blocks.training.vectorised_draws import draws_refusal
from flatout.check.observe.calls import RootModule
from flatout.check.observe.steps.optimizers import OptimizerWatched
from flatout.check.trials.context import Scene
from flatout.check.trials.runner import run_trials
from flatout.core.records.trial import (
    TimeActivation,
    TimeAttention,
    TimeDistance,
    TimeDraws,
    TimeGrowingCat,
    TimeModel,
    TimeMostlyZeros,
    TimeNormalisation,
    TimeOneHot,
    TimeOptimizer,
    TimeRecurrence,
    Trial,
)


def scene(*roots: RootModule) -> Scene:
    return Scene(
        examples=[],
        num_calls=[],
        roots=list(roots),
        optimizers=[],
        outputs=[],
        loaders=[],
        unused_modules=(),
        device="cpu",
        limit_s=0.2,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "trial",
    [
        TimeAttention(
            batch=2, heads=2, q_len=8, kv_len=8, head_dim=4, dtype="float32", causal=True, masked=True, dropout=0.0,
            backward=True,
        ),
        TimeGrowingCat(piece=(4, 1, 8), dim=1, count=6, dtype="float32", backward=True),
        TimeRecurrence(cell="GRUCell", batch=2, steps=5, input_size=4, hidden_size=6, backward=True),
        TimeNormalisation(kind="layer", shape=(4, 16), dtype="float32", backward=True),
        TimeDistance(batch=1, num_a=30, num_b=40, dim=8, dtype="float64", backward=True),
        TimeOneHot(rows=20, classes=70, width=8, dtype="float32", backward=True),
    ],
    ids=lambda trial: type(trial).__name__,
)  # fmt: skip
def test_both_sides_run_and_agree(trial: Trial) -> None:
    [result] = run_trials([trial], scene(), budget_s=10.0)

    assert not result.refused
    assert result.now_s and result.cured_s
    assert result.error is not None
    assert result.error < 1e-5


class Packing(nn.Module):
    def __init__(self, *, bidirectional: bool) -> None:
        super().__init__()
        self.rnn = nn.GRU(3, 5, num_layers=2, batch_first=True, bidirectional=bidirectional)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        _, last = self.rnn(packed)
        return last[-1]


def captured_root(module: nn.Module, *args: object) -> RootModule:
    root = RootModule(module, (0,), type(module).__name__)
    root.strong_ref = module
    root.capture(args, {})
    return root


def test_a_layer_run_on_the_padded_batch_gives_each_row_its_last_state() -> None:
    from flatout.check.trials.model import _unpack

    torch.manual_seed(0)
    model = Packing(bidirectional=False)
    x, lengths = torch.randn(4, 7, 3), torch.tensor([7, 2, 5, 1])
    expected = model(x, lengths)
    _unpack(model)
    torch.testing.assert_close(model(x, lengths), expected)


def test_a_layer_in_both_directions_is_refused() -> None:
    root = captured_root(Packing(bidirectional=True), torch.randn(4, 7, 3), torch.tensor([7, 2, 5, 1]))
    [result] = run_trials([TimeModel(model=0, variant="unpacked", backward=True)], scene(root), budget_s=5.0)
    assert "direction" in result.refused


@pytest.mark.parametrize("task", ["dropout", "product"])
def test_work_on_zeros_is_timed_against_the_numbers_that_are_there(task: Literal["dropout", "product"]) -> None:
    trial = TimeMostlyZeros(task=task, rows=512, columns=256, width=8, density=0.02, dtype="float32", backward=True)
    [result] = run_trials([trial], scene(captured_root(nn.Linear(2, 2), torch.randn(1, 2))), budget_s=5.0)
    assert not result.refused
    assert result.now_s is not None
    assert result.cured_s is not None


@pytest.mark.skipif(bool(draws_refusal()), reason=draws_refusal())
def test_masks_are_timed_against_those_by_vector_instructions() -> None:
    trial = TimeDraws(num_elements=50_000, dtype="float32")
    [result] = run_trials([trial], scene(captured_root(nn.Linear(2, 2), torch.randn(1, 2))), budget_s=5.0)
    assert result.now_s is not None
    assert result.cured_s is not None


@pytest.mark.parametrize("kind", ["tanh", "erf"])
def test_gelu_written_out_is_what_torch_computes(kind: Literal["tanh", "erf"]) -> None:
    trial = TimeActivation(kind=kind, shape=(16, 64), dtype="float32", backward=True)
    [result] = run_trials([trial], scene(captured_root(nn.Linear(2, 2), torch.randn(1, 2))), budget_s=5.0)
    assert not result.refused
    assert result.error is not None
    assert result.error < 1e-5


def test_inputs_of_the_size_of_most_work_are_captured() -> None:
    root = RootModule(nn.Linear(2, 2), (0,), "Linear")
    for length in (1, 2, 3, *range(4, 200)):
        root.capture((torch.randn(1, length, 2),), {})
    assert 64 <= root.captured_length <= 160


def test_an_optimizer_is_tried_on_the_parameters_that_it_steps() -> None:
    moved, averaged = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8, 8))
    optimizer = torch.optim.Adam([moved, averaged], lr=1e-3)
    moved.square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    num_stepped = []
    handle = register_optimizer_step_post_hook(lambda o, *_: num_stepped.append(len(o.state)))

    try:
        result = run_trials(
            [TimeOptimizer(optimizer=0)], scene()._replace(optimizers=[OptimizerWatched(optimizer, 0, 0)]), budget_s=5.0
        )[0]
    finally:
        handle.remove()

    assert not result.refused
    assert set(num_stepped) == {1}
