from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.plain_models import plain
from tests.shrinking import shrink_task
from torch import Tensor, nn

from flatout.compression.quantising import quantise
from flatout.errors import CheckpointError, UsageError
from flatout.levers.graph import native_engine
from flatout.levers.subjects import Purpose, Stepping, Subject
from flatout.records.lever import Offer, Refusal
from flatout.records.shrinking import Objective, Tried
from flatout.registry import lever_of, levers
from flatout.shrinking.live import shrink
from flatout.shrinking.training import copied
from flatout.shrinking.trials import Workshop
from flatout.shrinking.written import load_shrunk, write

HALF = Offer(lever="workload.prune-units", name="prune 50%", parameters={"fraction": 0.5})
DISTIL = Offer(lever="workload.distil", name="distil")
NATIVE = Offer(lever="graph.native-engine", name="native", parameters={"precision": "float32"})
LORA = Offer(lever="workload.low-rank", name="LoRA 4", parameters={"rank": 4, "is_dora": False})
needs_compiler = pytest.mark.skipif(not shutil.which("cc"), reason="needs a C compiler")


@pytest.fixture(scope="module")
def given() -> Subject:
    model, inputs = shrink_task.make()
    purpose = Purpose(
        inputs=inputs,
        evaluate=shrink_task.score,
        batches=shrink_task.data,
        loss=shrink_task.loss,
        recovery_s=1.0,
        num_steps=12,
    )
    return Subject.of(model, purpose)


def workshop(given: Subject, objective: Objective = "latency", keep: Path | None = None) -> Workshop:
    return Workshop(given, levers(), objective, seconds=0.05, keep=keep)


def tried(given: Subject, *offers: Offer, objective: Objective = "latency") -> Tried:
    return workshop(given, objective).tried(offers, allowed_loss=0.02)


def test_the_model_as_it_is_offers_sizes_bits_and_engines(given: Subject) -> None:
    found = tried(given)
    assert found.point is not None
    assert found.point.metric > 0.9
    kinds = {r.kind for o in found.offers if (r := lever_of(o.lever).reduction) is not None}
    assert kinds == {"size", "bits", "engine"}


def test_a_pruned_model_is_smaller_and_training_after_the_given_one_brings_its_metric_back(given: Subject) -> None:
    before = {k: v.clone() for k, v in given.model.state_dict().items()}
    alone, again = tried(given, HALF).point, tried(given, HALF, DISTIL).point
    assert alone is not None
    assert again is not None
    assert alone.num_bytes < 0.5 * given.num_bytes
    assert alone.lost > 0.05
    assert again.lost < 0.02
    assert again.num_bytes == alone.num_bytes
    assert all(torch.equal(before[k], v) for k, v in given.model.state_dict().items())


@needs_compiler
def test_native_code_takes_batches_in_pieces_and_nothing_else_runs_it(given: Subject) -> None:
    shop = workshop(given)
    found = shop.tried((NATIVE,), allowed_loss=0)
    assert found.point is not None
    assert found.point.lost == 0
    assert found.offers == ()
    call = shop.subject((NATIVE,)).call
    torch.testing.assert_close(call(shrink_task.TASK.held_x[:5]), given.model(shrink_task.TASK.held_x[:5]))


@needs_compiler
def test_layers_in_fewer_bits_are_offered_no_native_code(given: Subject) -> None:
    few = given.having(quantise(copied(given.model), "int8").module, "all in 8 bits")
    told = list(native_engine.offers(few))
    assert [one.because for one in told if isinstance(one, Refusal)] == [
        "layers in fewer bits call code of their own; native code has 8 bits of its own"
    ]
    assert len(told) == 1
    assert len(list(native_engine.offers(given))) == 2


def test_a_lever_that_cannot_says_why(given: Subject) -> None:
    found = tried(given, Offer(lever="workload.prune-units", name="prune", parameters={"fraction": 2.0}))
    assert found.point is None
    assert "must be a number between 0 and 1" in found.because


def test_fewer_trained_parameters_are_timed_in_training_and_judged_after_it(given: Subject) -> None:
    before = {k: v.clone() for k, v in given.model.state_dict().items()}
    full, found = tried(given, objective="train-cost"), tried(given, LORA, objective="train-cost").point
    assert {r.kind for o in full.offers if (r := lever_of(o.lever).reduction) is not None} == {"training"}
    assert full.point is not None
    assert found is not None
    assert found.num_bytes < full.point.num_bytes
    assert "parameters are trained" in found.told[0]
    assert all(torch.equal(before[k], v) for k, v in given.model.state_dict().items())


def test_trained_sizes_are_kept_for_other_processes(given: Subject, tmp_path: Path) -> None:
    first = workshop(given, keep=tmp_path).subject((HALF, DISTIL))
    other = workshop(given, keep=tmp_path).subject((HALF, DISTIL))
    x = shrink_task.TASK.held_x
    assert torch.equal(first.call(x), other.call(x))
    assert first.told == other.told


@needs_compiler
def test_a_written_model_is_loaded_with_what_runs_it(given: Subject, tmp_path: Path) -> None:
    shop = workshop(given)
    write(shop.delivered((HALF, NATIVE)), (HALF, NATIVE), tmp_path / "out")
    loaded = load_shrunk(tmp_path / "out")
    x = shrink_task.TASK.held_x[:3]
    torch.testing.assert_close(loaded(x), shop.subject((HALF,)).call(x))
    assert (tmp_path / "out" / "model.pt").stat().st_size < 0.5 * given.num_bytes


def test_a_folder_without_a_model_is_told(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no model"):
        load_shrunk(tmp_path)


def test_a_torn_model_is_told(given: Subject, tmp_path: Path) -> None:
    write(given, (), tmp_path)
    (tmp_path / "model.pt").write_bytes((tmp_path / "model.pt").read_bytes()[:1000])
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_shrunk(tmp_path)


@pytest.fixture
def stepping() -> Iterator[tuple[Subject, Tensor]]:
    made = plain("lstm_step")
    x = torch.randn(6, 3, 16)

    def evaluate(call: Stepping) -> float:
        call.reset()
        return -float(torch.stack([call(e) for e in x]).square().mean())

    yield Subject.of(made.module.eval(), Purpose(inputs=made.inputs, num_state=4, evaluate=evaluate)), x


def test_a_carried_state_is_carried_for_the_metric_and_follows_the_model_in_width(
    stepping: tuple[Subject, Tensor],
) -> None:
    given, x = stepping
    smaller = workshop(given).subject((HALF,))
    assert [s.shape[1] for s in smaller.inputs[1:]] == [16] * 4
    call = Stepping(given.call, given.inputs[1:])
    state: tuple[Tensor, ...] = tuple(torch.zeros(3, 32) for _ in range(4))
    for event in x:
        y, *rest = given.model(event, *state)
        state = tuple(rest)
        assert torch.equal(call(event), y)
    found = tried(given, HALF).point
    assert found is not None
    assert found.metric != 0


@needs_compiler
def test_native_code_carries_the_state_of_every_row_and_is_loaded_so(
    stepping: tuple[Subject, Tensor], tmp_path: Path
) -> None:
    given, x = stepping
    given = Subject.of(given.model, replace(given.purpose, inputs=tuple(i[:1] for i in given.inputs)))
    shop = workshop(given)
    found = shop.tried((NATIVE,), allowed_loss=0)
    assert found.point is not None
    assert found.point.metric == pytest.approx(Subject.of(given.model, given.purpose).metric(), rel=1e-5)
    write(shop.delivered((NATIVE,)), (NATIVE,), tmp_path)
    for call in (shop.subject((NATIVE,)).usable, load_shrunk(tmp_path)):
        alone = Stepping(given.call, given.inputs[1:])
        for event in x:
            torch.testing.assert_close(call(event), alone(event))
        with pytest.raises(UsageError, match=r"1 rows came after 3; call reset\(\) first"):
            call(x[0][:1])


def test_a_model_in_a_function_cannot_be_written(tmp_path: Path) -> None:
    class Local(nn.Linear):
        pass

    given = Subject.of(Local(2, 2), Purpose(inputs=(torch.zeros(1, 2),), evaluate=lambda call: 0.0))
    with pytest.raises(Exception, match="cannot be pickled"):
        write(given, (), tmp_path)
    assert [f.name for f in tmp_path.iterdir() if not f.name.startswith(".")] == []


def test_the_call_leaves_the_model_alone_and_gives_what_was_chosen(given: Subject, tmp_path: Path) -> None:
    before = {k: v.clone() for k, v in given.model.state_dict().items()}
    found = shrink(given.model, given.inputs, evaluate=shrink_task.score, budget_s=0.01)
    assert found.report.chosen == "as it is"
    assert "Keep the model as it is" in str(found)
    x = shrink_task.TASK.held_x[:2]
    assert torch.equal(found(x), given.model(x))
    found.save(tmp_path / "out")
    assert torch.equal(load_shrunk(tmp_path / "out")(x), given.model(x))
    assert all(torch.equal(before[k], v) for k, v in given.model.state_dict().items())


def test_the_call_refuses_what_does_not_fit(given: Subject) -> None:
    with pytest.raises(UsageError, match="training mode"):
        shrink(nn.Linear(2, 2), (torch.zeros(1, 2),), evaluate=lambda call: 0.0)
    with pytest.raises(UsageError, match="give batches and loss"):
        shrink(given.model, given.inputs, evaluate=shrink_task.score, objective="train-cost")
