"""What callbacks do where a training does not simply run to its end, and what they refuse."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.callbacks.conftest import RunScript, write_script
from tests.command_line import QUICK
from torch import nn

import flatout.callbacks
from flatout.callbacks.watched_training import WatchedTraining
from flatout.check.capture import Capture
from flatout.check.observe.observer import LoopObserver
from flatout.core.errors import UsageError
from flatout.core.records.distributed import Place

TRAINER = """
from transformers import Trainer, TrainerCallback, TrainingArguments
from flatout.callbacks import TrainerReport

class StopAt(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step == 16

def train(rows, *callbacks):
    seed()
    arguments = TrainingArguments("out", num_train_epochs=1, per_device_train_batch_size=8, use_cpu=True, report_to=[],
                                  disable_tqdm=True, save_strategy="no", remove_unused_columns=False, logging_strategy="no")
    trainer = Trainer(model=Net(), args=arguments, train_dataset=rows, callbacks=list(callbacks))
    trainer.train()
"""


def watched(**options: object) -> WatchedTraining:
    settings: dict[str, object] = {"observe_s": 5.0, "trials_s": 0.0, "machine": None, "html": None, "json": None}
    return WatchedTraining("a loop", **{**settings, **options})  # type: ignore[arg-type]


def take_steps(num_steps: int) -> None:
    net = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(num_steps):
        net(torch.ones(4, 8)).mean().backward()
        optimizer.step()


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.long
def test_trainers_in_a_row_that_stop_early_or_raise_each_leave_a_report(run_script: RunScript) -> None:
    ran = run_script(
        TRAINER,
        """
        train(Rows(), TrainerReport(trials_s=0), StopAt())
        report = TrainerReport(trials_s=0, json="interrupted.json")
        try:
            train(Rows(40, raise_at=5), report)
        except ValueError:
            report.finish()
        tell(interrupted=facts(report.checked), is_written=os.path.exists("interrupted.json"))
        again = TrainerReport(trials_s=0)
        try:
            train(Rows(40, raise_at=5), again)
        except ValueError:
            tell(is_known=again.checked is not None)
        train(Rows(20), TrainerReport(trials_s=0))
        tell(abandoned=facts(again.checked), untouched=nn.Module.__call__.__qualname__)
        train(Rows(40, raise_at=5), TrainerReport())
        """,
    )

    assert ran.code == 1
    assert "ValueError: row 5 is damaged" in ran.err
    values = ran.values
    assert "of 15 steps timed" in ran.out or "of 16 steps timed" in ran.out
    assert values["interrupted"]["exit"] == "interrupted"
    assert values["is_written"] is True
    assert values["is_known"] is False
    assert values["abandoned"]["exit"] == "another training began"
    assert values["untouched"] == "Module._wrapped_call_impl"
    assert ran.out.count("exit: ValueError: row 5 is damaged") == 1  # as Python ends
    assert ran.out.count("flatout: watching took") == 5


@pytest.mark.multi
@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.long
def test_of_two_ranks_the_first_is_watched_and_the_weights_stay_the_same(tmp_path: Path) -> None:
    write_script(
        tmp_path,
        """
        from accelerate import Accelerator
        from flatout.callbacks import AccelerateReport
        accelerator = Accelerator(cpu=True)
        digests = []
        for is_watched in (False, True):
            seed()
            net = Net()
            net, optimizer, loader = accelerator.prepare(net, torch.optim.Adam(net.parameters()), DataLoader(Rows(), 8))
            report = AccelerateReport(accelerator)
            if is_watched:
                report.start()
            for batch in loader:
                accelerator.backward(net(**batch)["loss"])
                optimizer.step()
                optimizer.zero_grad()
            report.finish()
            digests.append(state(net.module))
        with open(f"{accelerator.process_index}.json", "w") as file:
            json.dump([digests, report.checked is not None], file)
        accelerator.end_training()
        sys.stdout.flush()
        os._exit(0)  # gloo's threads may abort while Python ends (pytorch#179291), on busy cores, also without flatout
        """,
    )
    starter = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    done = subprocess.run(
        [sys.executable, *starter],
        cwd=tmp_path,
        env={**os.environ, **QUICK},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )

    assert done.returncode == 0, done.stderr[-3000:]
    (plain, own), is_reported = json.loads((tmp_path / "0.json").read_text())
    (other_plain, other), is_other_reported = json.loads((tmp_path / "1.json").read_text())
    assert own == plain
    assert other == other_plain
    assert (is_reported, is_other_reported) == (True, False)
    assert done.stdout.count("flatout: watching took") == 1
    assert "rank 0 of 2 alone was watched" in " ".join(done.stdout.split())


def test_a_loop_that_is_observed_already_is_left_alone(capfd: pytest.CaptureFixture[str]) -> None:
    outer, inner = watched(), watched()
    asked: list[str] = []

    def step(x: torch.Tensor) -> None:
        if not asked:
            inner.start(Place(0, 1))
            asked.append("once")

    flatout.check(step, [torch.ones(1)] * 4)

    assert not inner.is_watched and inner.checked is None
    assert "a loop is observed already; its callback does nothing" in capfd.readouterr().err
    outer.start(Place(0, 1))
    assert outer.is_watched
    outer.finish()


def test_watching_that_cannot_begin_is_a_line_and_leaves_nothing_behind(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: object) -> None:
        raise ZeroDivisionError("a mistake of ours")

    monkeypatch.setattr("flatout.check.observe.lines.sampler.Sampler.start", fail)
    training = watched()

    training.start(Place(0, 1))
    take_steps(2)
    training.finish()

    assert not training.is_watched
    assert "flatout: no report: ZeroDivisionError: a mistake of ours (fail, line" in capfd.readouterr().err
    assert nn.Module.__call__.__qualname__ == "Module._wrapped_call_impl"


@pytest.mark.slow
def test_nothing_of_the_watched_steps_is_held_once_the_report_is_known() -> None:
    def living() -> list[object]:
        gc.collect()
        return [thing for thing in gc.get_objects() if type(thing) in (Capture, LoopObserver)]

    before = living()  # what other tests hold
    training = watched(observe_s=0.01)

    training.start(Place(0, 1))
    take_steps(1000)

    assert training.is_watched and training.checked is not None
    assert [thing for thing in living() if not any(thing is other for other in before)] == []
    assert training.checked.evidence.steps.num_observed < 1000
    training.finish()
    assert not training.is_watched


@pytest.mark.slow
def test_a_callback_whose_training_was_abandoned_says_so_when_its_next_one_begins(
    capfd: pytest.CaptureFixture[str],
) -> None:
    training = watched()

    for _ in range(2):
        training.start(Place(0, 1))
        take_steps(14)
    training.finish()

    assert capfd.readouterr().out.count("exit: another training began") == 1
    assert training.checked is not None and training.checked.evidence.exit == "finished"


def test_a_report_that_cannot_be_drawn_is_a_line_and_the_training_goes_on(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(evidence: object) -> None:
        raise ZeroDivisionError("a mistake of ours")

    monkeypatch.setattr("flatout.callbacks.watched_training.diagnose_all", fail)
    training = watched()

    training.start(Place(0, 1))
    take_steps(14)
    training.finish()

    assert training.checked is None
    assert "flatout: no report: ZeroDivisionError: a mistake of ours (fail, line" in capfd.readouterr().err
    assert nn.Module.__call__.__qualname__ == "Module._wrapped_call_impl"


def test_a_file_that_cannot_be_written_any_more_is_a_line_with_where_the_report_is(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (folder := tmp_path / "reports").mkdir()
    training = watched(json=folder / "report.json")
    folder.rmdir()

    training.start(Place(0, 1))
    take_steps(14)
    training.finish()

    printed = capfd.readouterr()
    assert training.checked is not None
    assert "flatout: cannot write" in printed.err and "report.json" in printed.err
    assert "flatout: watching took" in printed.out


def test_another_rank_than_the_first_watches_nothing() -> None:
    training = watched()

    training.start(Place(1, 2))

    assert not training.is_watched
    training.finish()
    assert training.checked is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"observe_s": 0.0}, r"observe_s=0\.0 must be above 0"),
        ({"observe_s": float("nan")}, "observe_s=nan must be above 0"),
        ({"trials_s": -1.0}, r"trials_s=-1\.0 must be at least 0"),
        ({"json": "/nowhere/report.json"}, r"json='/nowhere/report\.json': there is no folder '/nowhere'; give a path"),
    ],
    ids=str,
)
def test_bad_arguments_are_one_line_each(options: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        watched(**options)


def test_a_page_without_its_packages_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flatout.callbacks.watched_training.find_spec", lambda module: None)

    with pytest.raises(UsageError, match=r"comes with: pip install 'flatout\[html\]'"):
        watched(html=tmp_path / "report.html")


def test_a_library_that_is_missing_is_named_with_what_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "flatout.callbacks.lightning", raising=False)
    monkeypatch.setitem(sys.modules, "lightning.pytorch", None)
    monkeypatch.setitem(sys.modules, "pytorch_lightning", None)
    monkeypatch.delitem(vars(flatout.callbacks), "LightningReport", raising=False)

    with pytest.raises(ImportError, match="LightningReport needs lightning, which is not installed: pip install"):
        flatout.callbacks.LightningReport  # noqa: B018


def test_an_unknown_callback_is_an_attribute_error_that_lists_the_known_ones() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'KerasReport'; it offers .*TrainerReport"):
        flatout.callbacks.KerasReport  # noqa: B018
