"""The tracker of Accelerate's, around loops of the user's own."""

from __future__ import annotations

import pytest
from tests.callbacks.conftest import RunScript, assert_slow_item_is_named

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

ACCELERATE = """
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker
from flatout.callbacks import AccelerateReport

class Memory(GeneralTracker):
    name, requires_logging_directory, tracker = "memory", False, None
    def __init__(self):
        super().__init__()
        self.rows, self.is_open = [], True
    def log(self, values, step=None, **kwargs):
        assert self.is_open
        self.rows.append([step, dict(values)])
    def finish(self):
        self.is_open = False

def prepared(rows, **options):
    seed()
    accelerator = Accelerator(cpu=True, log_with=[memory := Memory()], **options)
    accelerator.init_trackers("rows")
    net = Net()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    return accelerator, memory, *accelerator.prepare(net, optimizer, DataLoader(rows, batch_size=8, shuffle=True))

def loop(accelerator, net, optimizer, loader, last=-1):
    for step, batch in enumerate(loader):
        with accelerator.accumulate(net):
            loss = net(**batch)["loss"]
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        if step % 10 == 0:
            accelerator.log({"loss": loss.item()}, step=step)
        if step == last:
            break
"""


@pytest.mark.long
def test_the_training_is_the_same_to_the_last_bit_and_its_report_names_the_slow_line(run_script: RunScript) -> None:
    ran = run_script(
        ACCELERATE,
        """
        def trained(**options):
            accelerator, memory, net, *rest = prepared(Rows())
            report = AccelerateReport(accelerator, **options) if options else None
            if report is None:
                loop(accelerator, net, *rest)
            else:
                with report:
                    loop(accelerator, net, *rest)
            accelerator.end_training()
            return state(net), memory.rows, report
        plain, plain_rows, _ = trained()
        watched, rows, report = trained(observe_s=10.0)
        tried, _, tried_report = trained(trials_s=2.0)
        tell(plain=plain, watched=watched, tried=tried, facts=facts(report.checked), tried_facts=facts(tried_report.checked),
             plain_rows=plain_rows, rows=rows)
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
    [[step, figures]] = [row for row in values["rows"] if "flatout/step_s" in row[1]]
    assert step == 30
    assert figures["flatout/data_fraction"] > figures["flatout/optimizer_fraction"] > 0
    assert [row for row in values["rows"] if "loss" in row[1]] == values["plain_rows"]
    assert "flatout: watching took" in ran.out


@pytest.mark.long
def test_a_loop_that_accumulates_is_reported_while_it_runs_and_ended_by_end_training(run_script: RunScript) -> None:
    ran = run_script(
        ACCELERATE,
        """
        accelerator, memory, *rest = prepared(Rows(160), gradient_accumulation_steps=4)
        report = AccelerateReport(accelerator, observe_s=0.5)
        report.start()
        loop(accelerator, *rest)
        tell(facts=facts(report.checked), at=[step for step, values in memory.rows if "flatout/step_s" in values],
             is_tracker=accelerator.get_tracker("flatout", unwrap=True) is report.checked)
        print("the loop is over")
        accelerator.end_training()
        """,
    )

    assert ran.code == 0, ran.err
    values = ran.values
    assert values["facts"]["kind"] == "training"
    assert 8 <= values["facts"]["num"] < 40
    [at] = values["at"]
    assert at < 150
    assert values["is_tracker"] is True
    during, _, after = ran.out.partition("the loop is over")
    assert "a training step" in during
    assert "flatout: watching took" in after


@pytest.mark.long
def test_two_loops_in_a_row_the_first_left_early_and_a_third_that_raises(run_script: RunScript) -> None:
    ran = run_script(
        ACCELERATE,
        """
        for name, last, raise_at in (("early", 20, -1), ("whole", -1, -1), ("raised", -1, 5)):
            accelerator, memory, *rest = prepared(Rows(30, raise_at))
            try:
                with AccelerateReport(accelerator) as report:
                    loop(accelerator, *rest, last=last)
            except ValueError:
                pass
            tell(**{name: facts(report.checked)}, trackers=len(accelerator.trackers))
        accelerator, memory, *rest = prepared(Rows(30, 5))
        AccelerateReport(accelerator).start()
        loop(accelerator, *rest)
        """,
    )

    assert ran.code == 1
    assert "ValueError: row 5 is damaged" in ran.err
    values = ran.values
    assert values["early"]["num"] == pytest.approx(20, abs=1)
    assert values["whole"]["num"] == pytest.approx(29, abs=1)
    assert values["raised"]["exit"] == "ValueError: row 5 is damaged"
    assert values["trackers"] == 1
    assert ran.out.count("exit: ValueError: row 5 is damaged") == 2  # the last one as Python ends
    assert ran.out.count("flatout: watching took") == 4
