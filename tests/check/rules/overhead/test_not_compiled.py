"""Modules that run operator by operator: when compiling is tried, how it is priced, what is advised."""

from __future__ import annotations

import msgspec
import pytest
from tests.evidence_builder import EvidenceBuilder, only_finding, proposed

from flatout.check.rules.overhead.not_compiled import RULE
from flatout.core.records.compilation import Compilation
from flatout.core.records.evidence import Evidence
from flatout.core.records.trial import TimeCompiled, TrialResult

BUSY_S = 0.09
"""Forward and backward of the builder's step of 100 ms."""


def pointwise(*, text: str = "out = net(x)", module: str = "Net", op: str = "aten.mul") -> EvidenceBuilder:
    run = EvidenceBuilder()
    run.model(run.line("train.py", 20, text))
    run.operator(op, run.line("model.py", 9), inputs=[(256, 256)], op_s=0.08, module=module)
    return run


def request(evidence: Evidence) -> TimeCompiled:
    [trial] = proposed(RULE, evidence)
    assert isinstance(trial, TimeCompiled)
    return trial


def tried(run: EvidenceBuilder, *, kept: float, variant: str = "whole", compile_s: float = 9.0) -> Evidence:
    trial = request(run.build())
    result = TrialResult(trial=trial, now_s=0.1, cured_s=kept * 0.1, variant=variant, parts={"compile": compile_s})
    run.trial(result)
    return run.build()


def test_it_is_tried_where_more_than_products_takes_time() -> None:
    trial = request(pointwise().build())
    assert (trial.model, trial.backward, trial.regions, trial.autocast) == (0, True, (), "bfloat16")
    assert not proposed(RULE, pointwise(op="aten.mm").build())


def test_it_is_tried_once_whatever_came_of_it() -> None:
    run = pointwise()
    run.refused(request(run.build()), why="it took more than 9 s")
    assert not proposed(RULE, run.build())
    assert not list(RULE.check(run.build()))


def test_a_script_that_compiles_is_left_alone() -> None:
    used = Compilation(compile_s=1.0, num_frames=1, num_graphs=1)
    assert not proposed(RULE, msgspec.structs.replace(pointwise().build(), compilation=used))


def test_it_is_priced_with_what_compiling_takes() -> None:
    finding = only_finding(RULE, tried(pointwise(), kept=0.5))
    assert finding.saved_s[0] < BUSY_S / 2 < finding.saved_s[1]
    assert "compiling took 9.00 s here, which pays after 200 steps" in finding.because
    assert finding.edit.startswith("net = torch.compile(net)")


def test_blocks_that_are_alike_are_compiled_alone() -> None:
    run = EvidenceBuilder()
    run.model(run.line("train.py", 20, "out = net(x)"))
    for block in range(4):
        for part in ("norm", "act"):
            module = f"Net.blocks.{block}.{part}"
            run.operator("aten.mul", run.line("model.py", 9), inputs=[(256, 256)], op_s=0.01, module=module)
    assert request(run.build()).regions == ("blocks",)
    assert only_finding(RULE, tried(run, kept=0.5, variant="regions")).edit.startswith(
        "for block in net.blocks: block.compile()"
    )


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("loss = F.mse_loss(self.net(x), y)", "self.net"),
        ("logits, loss = model(x, y)", "model"),
        ("out = self(x)", "model"),
        ("out = head(body(x))", "model"),
    ],
)
def test_the_edit_names_the_module_as_the_line_does(text: str, name: str) -> None:
    assert only_finding(RULE, tried(pointwise(text=text), kept=0.5)).edit.startswith(f"{name} = torch.compile({name})")


def test_a_librarys_loop_gets_its_own_switch() -> None:
    assert "torch_compile=True" in only_finding(RULE, tried(pointwise(text="trainer.fit(model)"), kept=0.5)).edit


def test_a_small_gain_is_a_remark() -> None:
    evidence = tried(pointwise(), kept=0.9)
    assert not list(RULE.check(evidence))
    assert RULE.note is not None
    [note] = RULE.note(evidence)
    assert "1.10x" in note.text


@pytest.mark.parametrize(
    ("exit", "num_epochs", "compile_s", "is_told"),
    [
        ("finished", 0.0, 9.0, False),
        ("finished", 0.0, 1.0, True),
        ("finished", 0.1, 9.0, True),
        ("stopped", 0.0, 9.0, True),
    ],
    ids=["too short", "pays", "passed again", "not known to have ended"],
)
def test_a_pass_that_is_over_before_compiling_has_paid_is_left_alone(
    exit: str, num_epochs: float, compile_s: float, is_told: bool
) -> None:
    run = pointwise()  # 60 steps that would save 45 ms each
    run.loader(run.line("train.py", 18), num_epochs=num_epochs)
    evidence = tried(run, kept=0.5, compile_s=compile_s)
    steps = msgspec.structs.replace(evidence.steps, kind="inference")
    evidence = msgspec.structs.replace(evidence, steps=steps, exit=exit)
    assert bool(list(RULE.check(evidence))) == is_told


def test_training_that_may_have_been_cut_short_is_told() -> None:
    run = pointwise()
    run.loader(run.line("train.py", 18))
    assert list(RULE.check(tried(run, kept=0.5, compile_s=9.0)))
