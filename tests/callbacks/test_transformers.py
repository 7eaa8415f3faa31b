"""The callback of transformers' Trainer, in real trainings."""

from __future__ import annotations

import pytest
from tests.callbacks.conftest import RunScript, assert_slow_item_is_named

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

TRAINER = """
from transformers import Trainer, TrainingArguments
from flatout.callbacks import TrainerReport

def trainer_of(rows, *callbacks, **options):
    seed()
    arguments = TrainingArguments("out", **{**dict(
        num_train_epochs=1, per_device_train_batch_size=8, use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="no",
        logging_steps=10, remove_unused_columns=False, dataloader_pin_memory=False), **options})
    return Trainer(model=Net(), args=arguments, train_dataset=rows, callbacks=list(callbacks))
"""


@pytest.mark.long
def test_the_training_is_the_same_to_the_last_bit_and_its_report_names_the_slow_line(run_script: RunScript) -> None:
    ran = run_script(
        TRAINER,
        """
        def trained(report):
            trainer = trainer_of(Rows(), *([report] if report else []))
            trainer.train()
            return state(trainer.model), trainer.state.log_history
        plain, plain_log = trained(None)
        report = TrainerReport(json="report.json", html="report.html")
        watched, log = trained(report)
        tried_report = TrainerReport(trials_s=2.0)
        tried, _ = trained(tried_report)
        tell(plain=plain, watched=watched, tried=tried, facts=facts(report.checked), tried_facts=facts(tried_report.checked),
             plain_log=[row.get("loss") for row in plain_log if "loss" in row], log=log,
             files=[os.path.getsize(name) > 1000 for name in ("report.json", "report.html")])
        """,
    )

    assert ran.code == 0, ran.err
    values = ran.values
    assert values["watched"] == values["plain"]
    assert values["tried"] == values["plain"]
    assert values["tried_facts"]["trials_s"] > 0 == values["facts"]["trials_s"]
    facts = values["facts"]
    assert facts["kind"] == "training"
    assert facts["num"] == pytest.approx(39, abs=1)
    assert facts["num_operators"] > 0
    assert {"data", "forward", "backward", "optimizer"} <= set(facts["phases"])
    assert_slow_item_is_named(facts)
    [figures] = [row for row in values["log"] if "flatout/step_s" in row]
    assert figures["flatout/data_fraction"] > figures["flatout/optimizer_fraction"] > 0
    assert figures["flatout/cpu_peak_bytes"] > 1e6
    assert [row["loss"] for row in values["log"] if "loss" in row] == values["plain_log"]
    assert values["files"] == [True, True]
    assert "a training step" in ran.out
    assert "flatout: watching took" in ran.out


@pytest.mark.long
def test_accumulated_gradients_are_one_step_and_the_figures_reach_the_trainers_log(run_script: RunScript) -> None:
    ran = run_script(
        TRAINER,
        """
        def trained(has_report):
            trainer = trainer_of(Rows(160), gradient_accumulation_steps=4, report_to=["tensorboard"])
            report = TrainerReport(log=trainer.log, observe_s=0.5)
            if has_report:
                trainer.add_callback(report)
            trainer.train()
            return state(trainer.model), trainer.state, report
        plain, plain_state, _ = trained(False)
        watched, own_state, report = trained(True)
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
        logged = {tag for folder, _, _ in os.walk("out") for tag in EventAccumulator(folder).Reload().Tags()["scalars"]}
        tell(plain=plain, watched=watched, facts=facts(report.checked), tags=sorted(logged), steps=own_state.global_step,
             losses=[[row["step"] for row in s.log_history if "loss" in row] for s in (plain_state, own_state)],
             at=[row["step"] for row in own_state.log_history if "flatout/step_s" in row])
        """,
    )

    assert ran.code == 0, ran.err
    values = ran.values
    assert values["watched"] == values["plain"]
    assert values["steps"] == 40
    assert values["facts"]["kind"] == "training"
    assert 8 <= values["facts"]["num"] < 40
    assert values["losses"] == [[10, 20, 30, 40]] * 2
    assert len(values["at"]) == 1 and values["at"][0] < 40
    assert "train/flatout/step_s" in values["tags"]
