"""The callback of Lightning's Trainer, in real trainings."""

from __future__ import annotations

import pytest
from tests.callbacks.conftest import RunScript, assert_slow_item_is_named

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

LIGHTNING = """
import lightning
from lightning.pytorch.loggers import CSVLogger
from flatout.callbacks import LightningReport

class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = Net()
    def training_step(self, batch, index):
        loss = self.net(**batch)["loss"]
        self.log("loss", loss)
        return loss
    def validation_step(self, batch, index):
        self.log("validation", self.net(**batch)["loss"])
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)

def fit(rows, *callbacks, loggers=False, **options):
    seed()
    module = Module()
    trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", logger=loggers, callbacks=list(callbacks), log_every_n_steps=10,
                                enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, **options)
    loaders = DataLoader(rows, batch_size=8, shuffle=True), DataLoader(Rows(2), batch_size=8)
    trainer.fit(module, *loaders)
    return state(module), {name: value.item() for name, value in trainer.callback_metrics.items()}
"""


@pytest.mark.long
def test_the_training_is_the_same_to_the_last_bit_and_its_report_names_the_slow_line(run_script: RunScript) -> None:
    ran = run_script(
        LIGHTNING,
        """
        plain = fit(Rows())
        report = LightningReport()
        logger = CSVLogger("logs")
        watched = fit(Rows(), report, loggers=[logger])
        tried = fit(Rows(), tried_report := LightningReport(trials_s=2.0))
        import csv
        rows = list(csv.DictReader(open(os.path.join(logger.log_dir, "metrics.csv"))))
        tell(plain=plain, watched=watched, tried=tried, facts=facts(report.checked), tried_facts=facts(tried_report.checked),
             logged=[row["flatout/data_fraction"] for row in rows if row.get("flatout/step_s")])
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
    assert {"data", "forward", "backward", "optimizer"} <= set(facts["phases"])
    assert_slow_item_is_named(facts)
    [share] = values["logged"]
    assert 0.5 < float(share) < 1
    assert "flatout: watching took" in ran.out


@pytest.mark.long
def test_a_training_that_raises_is_reported_at_once_and_the_next_one_is_watched_anew(run_script: RunScript) -> None:
    ran = run_script(
        LIGHTNING,
        """
        report = LightningReport()
        try:
            fit(Rows(raise_at=7), report)
        except ValueError as e:
            tell(raised=str(e), first=facts(report.checked))
        # Ends early, by a step limit; accumulates.
        fit(Rows(100), report, max_steps=16, accumulate_grad_batches=2)
        tell(second=facts(report.checked), untouched=nn.Module.__call__.__qualname__)
        """,
    )

    assert ran.code == 0, ran.err
    values = ran.values
    assert values["raised"] == "row 7 is damaged"
    assert values["first"]["exit"] == "ValueError: row 7 is damaged"
    assert "exit: ValueError: row 7 is damaged" in ran.out
    assert values["second"]["kind"] == "training"
    assert values["second"]["exit"] == "finished"
    assert values["second"]["num"] == pytest.approx(15, abs=1)
    assert values["untouched"] == "Module._wrapped_call_impl"
    assert ran.out.count("flatout: watching took") == 2
