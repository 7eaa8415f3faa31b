from __future__ import annotations

import copy
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
from tests.plain_models import plain
from tests.shrink.compose import shrink_task
from torch import Tensor, nn

from flatout.app.shrink_model import shrink
from flatout.core.errors import CheckpointError, UsageError
from flatout.core.records.reduction import Option, ReductionRefusal
from flatout.core.records.shrink import Objective, Tried
from flatout.core.registry import reduction_of, reductions
from flatout.shrink.candidate import CandidateModel, ShrinkTask, StatefulModel
from flatout.shrink.compose.saved_model import load_shrunk, loading_call, write_shrunk
from flatout.shrink.compose.trials import TrialRunner
from flatout.shrink.quantise import quantise
from flatout.shrink.reductions.engine import native as native_engine

pytestmark = pytest.mark.slow

HALF = Option(reduction="size.prune-units", name="prune 50%", parameters={"fraction": 0.5})
DISTIL = Option(reduction="recovery.distil", name="distil")
NATIVE = Option(reduction="engine.native", name="native", parameters={"precision": "float32"})
LORA = Option(reduction="training.low-rank", name="LoRA 4", parameters={"rank": 4, "is_dora": False})
needs_compiler = pytest.mark.skipif(not shutil.which("cc"), reason="needs a C compiler")


@pytest.fixture(scope="module")
def original() -> CandidateModel:
    model, inputs = shrink_task.make()
    task = ShrinkTask(
        inputs=inputs,
        evaluate=shrink_task.score,
        batches=shrink_task.data,
        loss=shrink_task.loss,
        recovery_s=1.0,
        num_steps=12,
    )
    return CandidateModel.of(model, task)


def trial_runner(original: CandidateModel, objective: Objective = "latency", keep: Path | None = None) -> TrialRunner:
    return TrialRunner(original, reductions(), objective, seconds=0.05, keep=keep)


def tried(original: CandidateModel, *options: Option, objective: Objective = "latency") -> Tried:
    return trial_runner(original, objective).tried(options, allowed_loss=0.02)


def test_the_model_as_it_is_offers_sizes_bits_and_engines(original: CandidateModel) -> None:
    found = tried(original)
    assert found.point is not None
    assert found.point.metric > 0.9
    kinds = {reduction_of(o.reduction).kind for o in found.options}
    assert kinds == {"size", "bits", "engine"}


def test_a_pruned_model_is_smaller_and_training_after_the_given_one_brings_its_metric_back(
    original: CandidateModel,
) -> None:
    before = {k: v.clone() for k, v in original.model.state_dict().items()}
    alone, again = tried(original, HALF).point, tried(original, HALF, DISTIL).point
    assert alone is not None
    assert again is not None
    assert alone.num_bytes < 0.5 * original.num_bytes
    assert alone.lost > 0.05
    assert again.lost < 0.02
    assert again.num_bytes == alone.num_bytes
    assert all(torch.equal(before[k], v) for k, v in original.model.state_dict().items())


@needs_compiler
@pytest.mark.long
def test_native_code_takes_batches_in_pieces_and_nothing_else_runs_it(original: CandidateModel) -> None:
    runner = trial_runner(original)
    found = runner.tried((NATIVE,), allowed_loss=0)
    assert found.point is not None
    assert found.point.lost == 0
    assert found.options == ()
    call = runner.candidate((NATIVE,)).call
    torch.testing.assert_close(call(shrink_task.TASK.held_x[:5]), original.model(shrink_task.TASK.held_x[:5]))


@needs_compiler
def test_layers_in_fewer_bits_are_offered_no_native_code(original: CandidateModel) -> None:
    few = original.with_model(quantise(copy.deepcopy(original.model), "int8").module, "all in 8 bits")
    notes = list(native_engine.options(few))
    assert [one.because for one in notes if isinstance(one, ReductionRefusal)] == [
        "layers in fewer bits call code of their own; native code has 8 bits of its own"
    ]
    assert len(notes) == 1
    assert len(list(native_engine.options(original))) == 2


def test_a_reduction_that_cannot_says_why(original: CandidateModel) -> None:
    found = tried(original, Option(reduction="size.prune-units", name="prune", parameters={"fraction": 2.0}))
    assert found.point is None
    assert "must be a number between 0 and 1" in found.because


def test_fewer_trained_parameters_are_timed_in_training_and_judged_after_it(original: CandidateModel) -> None:
    before = {k: v.clone() for k, v in original.model.state_dict().items()}
    full, found = tried(original, objective="train-cost"), tried(original, LORA, objective="train-cost").point
    assert {reduction_of(o.reduction).kind for o in full.options} == {"training"}
    assert full.point is not None
    assert found is not None
    assert found.num_bytes < full.point.num_bytes
    assert "parameters are trained" in found.notes[0]
    assert all(torch.equal(before[k], v) for k, v in original.model.state_dict().items())


def test_trained_sizes_are_kept_for_other_processes(original: CandidateModel, tmp_path: Path) -> None:
    first = trial_runner(original, keep=tmp_path).candidate((HALF, DISTIL))
    other = trial_runner(original, keep=tmp_path).candidate((HALF, DISTIL))
    x = shrink_task.TASK.held_x
    assert torch.equal(first.call(x), other.call(x))
    assert first.notes == other.notes


@needs_compiler
def test_a_model_in_fewer_bits_is_delivered_as_it_was_tried(original: CandidateModel, tmp_path: Path) -> None:
    """Which layers are faster in fewer bits is measured: measured anew, none may be."""
    times: list[int] = []

    def once(candidate: CandidateModel, parameters: object) -> CandidateModel:
        if times:
            raise UsageError("no layer was faster in fewer bits within what the metric allows")
        times.append(1)
        return candidate.with_model(copy.deepcopy(candidate.model), "2 of 4 layers", num_bytes=123)

    option = Option(reduction="bits.fewer-bits", name="fewer bits")
    found = [msgspec.structs.replace(one, apply=once) if one.kind == "bits" else one for one in reductions()]
    runner = TrialRunner(original, found, "latency", seconds=0.05, keep=tmp_path)
    assert runner.tried((option,), allowed_loss=0.02).point is not None
    elsewhere = TrialRunner(original, found, "latency", seconds=0.05, keep=tmp_path)
    for one in (runner, elsewhere):
        delivered = one.delivered((option,))
        assert (delivered.num_bytes, delivered.notes) == (123, ("2 of 4 layers",))


def test_a_written_model_is_loaded_with_what_runs_it(original: CandidateModel, tmp_path: Path) -> None:
    runner = trial_runner(original)
    write_shrunk(runner.delivered((HALF, NATIVE)), (HALF, NATIVE), tmp_path / "out")
    loaded = load_shrunk(tmp_path / "out")
    x = shrink_task.TASK.held_x[:3]
    torch.testing.assert_close(loaded(x), runner.candidate((HALF,)).call(x))
    assert (tmp_path / "out" / "model.safetensors").stat().st_size < 0.5 * original.num_bytes


def test_a_folder_without_a_model_is_told(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no model"):
        load_shrunk(tmp_path)


class WithFunction(nn.Linear):
    """A layer with an attribute that is code."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.double = twice


def twice(x: Tensor) -> Tensor:
    return 2 * x


def classes_of(model: nn.Module) -> list[type]:
    return [type(one) for one in model.modules()]


def test_a_pickle_is_written_and_loaded_on_an_explicit_word_alone(tmp_path: Path) -> None:
    original = CandidateModel.of(WithFunction(), ShrinkTask(inputs=(torch.zeros(1, 2),), evaluate=lambda call: 0.0))
    with pytest.raises(UsageError, match=r"double holds the function .*; allow it with --allow-pickle"):
        write_shrunk(original, (), tmp_path)
    write_shrunk(original, (), tmp_path, allow_pickle=True)
    assert loading_call(tmp_path) == f"flatout.load_shrunk('{tmp_path}', allow_pickle=True)"
    assert load_shrunk(tmp_path, allow_pickle=True)(torch.ones(1, 2)).shape == (1, 2)

    class Trap:
        def __reduce__(self) -> tuple[object, ...]:
            return Path.touch, (tmp_path / "ran",)

    torch.save(Trap(), tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match="runs the code that it names; give allow_pickle=True"):
        load_shrunk(tmp_path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["model.json", "model.safetensors", "how.json"])
def test_a_torn_model_is_told(name: str, original: CandidateModel, tmp_path: Path) -> None:
    write_shrunk(original, (), tmp_path)
    data = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(data[: len(data) // 2])
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_shrunk(tmp_path)


@pytest.fixture
def stepping() -> Iterator[tuple[CandidateModel, Tensor]]:
    made = plain("lstm_step")
    x = torch.randn(6, 3, 16)

    def evaluate(call: StatefulModel) -> float:
        call.reset()
        return -float(torch.stack([call(e) for e in x]).square().mean())

    yield CandidateModel.of(made.module.eval(), ShrinkTask(inputs=made.inputs, num_state=4, evaluate=evaluate)), x


def test_a_carried_state_is_carried_for_the_metric_and_follows_the_model_in_width(
    stepping: tuple[CandidateModel, Tensor],
) -> None:
    original, x = stepping
    smaller = trial_runner(original).candidate((HALF,))
    assert [s.shape[1] for s in smaller.inputs[1:]] == [16] * 4
    call = StatefulModel(original.call, original.inputs[1:])
    state: tuple[Tensor, ...] = tuple(torch.zeros(3, 32) for _ in range(4))
    for event in x:
        y, *rest = original.model(event, *state)
        state = tuple(rest)
        assert torch.equal(call(event), y)
    found = tried(original, HALF).point
    assert found is not None
    assert found.metric != 0


@needs_compiler
@pytest.mark.long
def test_native_code_carries_the_state_of_every_row_and_is_loaded_so(
    stepping: tuple[CandidateModel, Tensor], tmp_path: Path
) -> None:
    original, x = stepping
    original = CandidateModel.of(original.model, replace(original.task, inputs=tuple(i[:1] for i in original.inputs)))
    runner = trial_runner(original)
    found = runner.tried((NATIVE,), allowed_loss=0)
    assert found.point is not None
    assert found.point.metric == pytest.approx(
        CandidateModel.of(original.model, original.task).metric().value, rel=1e-5
    )
    write_shrunk(runner.delivered((NATIVE,)), (NATIVE,), tmp_path)
    for call in (runner.candidate((NATIVE,)).usable, load_shrunk(tmp_path, classes=classes_of(original.model))):
        alone = StatefulModel(original.call, original.inputs[1:])
        for event in x:
            torch.testing.assert_close(call(event), alone(event))
        with pytest.raises(UsageError, match=r"1 rows came after 3; call reset\(\) first"):
            call(x[0][:1])


def test_a_model_in_a_function_cannot_be_written(tmp_path: Path) -> None:
    class Local(nn.Linear):
        pass

    original = CandidateModel.of(Local(2, 2), ShrinkTask(inputs=(torch.zeros(1, 2),), evaluate=lambda call: 0.0))
    with pytest.raises(UsageError, match="cannot be pickled"):
        write_shrunk(original, (), tmp_path, allow_pickle=True)
    assert [f.name for f in tmp_path.iterdir() if not f.name.startswith(".")] == []


def test_the_call_leaves_the_model_alone_and_gives_what_was_chosen(original: CandidateModel, tmp_path: Path) -> None:
    before = {k: v.clone() for k, v in original.model.state_dict().items()}
    found = shrink(original.model, original.inputs, evaluate=shrink_task.score, budget_s=0.01)
    assert found.report.selected == "as it is"
    assert "Keep the model as it is" in str(found)
    x = shrink_task.TASK.held_x[:2]
    assert torch.equal(found(x), original.model(x))
    found.save(tmp_path / "out")
    assert torch.equal(load_shrunk(tmp_path / "out")(x), original.model(x))
    assert all(torch.equal(before[k], v) for k, v in original.model.state_dict().items())


def test_the_call_refuses_what_does_not_fit(original: CandidateModel) -> None:
    with pytest.raises(UsageError, match="training mode"):
        shrink(nn.Linear(2, 2), (torch.zeros(1, 2),), evaluate=lambda call: 0.0)
    with pytest.raises(UsageError, match="give batches and loss"):
        shrink(original.model, original.inputs, evaluate=shrink_task.score, objective="train-cost")
