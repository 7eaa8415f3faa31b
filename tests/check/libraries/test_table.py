from __future__ import annotations

import re
from importlib import resources

import msgspec
import pytest
from tests.evidence_builder import EvidenceBuilder

from flatout.check.diagnosis import diagnose
from flatout.check.libraries.table import libraries, with_settings
from flatout.check.rules.overhead.recomputed_constant import RULE as CONSTANT
from flatout.core.records.finding import Finding
from flatout.core.records.workload import LibraryFrame
from flatout.core.registry import levers, rules

TRAINER = LibraryFrame(file="transformers/trainer.py", line=2300)
BERT = LibraryFrame(file="transformers/models/bert/modeling_bert.py", line=312)
TIMM = LibraryFrame(file="timm/layers/norm.py", line=20)


def edited(
    run: EvidenceBuilder,
    where: int,
    rule: str,
    *,
    levers: tuple[str, ...] = (),
    rewriting: frozenset[str] = frozenset(),
) -> str:
    """The edit of a finding of this rule at this source."""
    source = run.sources[where] if where >= 0 else None
    finding = Finding(rule=rule, where=source, cost_s=0.01, because="slow", edit="the rule's own", levers=levers)
    [after] = with_settings([finding], run.build(), rewriting=rewriting)
    return after.edit


def test_every_setting_is_for_rules_or_levers_that_there_are() -> None:
    known_rules, known_levers = {r.id for r in rules()}, {lever.id for lever in levers()}
    for name, library in libraries().items():
        for setting in library.settings:
            assert setting.rules or setting.levers, name
            assert set(setting.rules) <= known_rules
            assert set(setting.levers) <= known_levers
            assert setting.edit.isascii()


def test_every_library_says_where_its_settings_are_documented() -> None:
    for file in resources.files("flatout.check.libraries").iterdir():
        if file.name.endswith(".toml"):
            assert re.match(r"# Sources?: .*\bhttps://", file.read_text(encoding="utf-8"), re.DOTALL), file.name


@pytest.mark.parametrize(
    ("rule", "via", "edit"),
    [
        ("bandwidth.materialised-attention", (TRAINER, BERT), 'attn_implementation="sdpa"'),
        ("overhead.per-parameter-optimizer", (TRAINER,), 'optim="adamw_torch_fused"'),
        ("overhead.host-read", (TRAINER,), "logging_steps"),
        ("overhead.host-read", (BERT,), "the rule's own"),
        ("overhead.host-read", (TIMM,), "the rule's own"),
    ],
)
def test_what_can_be_set_stands_in_place_of_the_edit(rule: str, via: tuple[LibraryFrame, ...], edit: str) -> None:
    run = EvidenceBuilder()

    assert edit in edited(run, run.line("train.py", 12, "trainer.train()", via=via), rule)


def test_a_library_that_runs_the_loop_is_set_for_causes_in_the_users_own_model() -> None:
    run = EvidenceBuilder()
    run.backward_at(
        run.line("train.py", 12, "trainer.fit(model)", via=(LibraryFrame(file="lightning/loop.py", line=1),))
    )
    own = run.line("model.py", 5, "y = self.layer(x)")

    assert (
        edited(run, own, "compute.new", levers=("workload.mixed-precision",)) == 'Trainer(..., precision="bf16-mixed")'
    )
    assert edited(run, own, "overhead.host-read") == "the rule's own"


def constants_below(via: tuple[LibraryFrame, ...], *, other_s: float) -> EvidenceBuilder:
    """A constant of 20 ms in a library below a line whose other operators take `other_s`."""
    run = EvidenceBuilder()
    where = run.line("train.py", 12, "loss = model(x)", via=via)
    rows = (
        run.operator("aten.arange", where, op_s=0.02),
        run.operator("aten.mm", run.line("train.py", 12), op_s=other_s),
    )
    run.constant(where, seconds=0.02, operators=rows[:1])
    return run


def test_an_edit_of_a_librarys_own_line_is_not_printed() -> None:
    [finding] = diagnose(constants_below((TIMM,), other_s=0.04).build(), [CONSTANT]).findings

    assert "register_buffer" not in finding.edit
    assert "timm's own code" in finding.edit
    assert [frame.place for frame in finding.via] == ["timm/layers/norm.py:20"]


@pytest.mark.parametrize(("via", "other_s"), [((), 0.04), ((TIMM,), 0.0)], ids=["own line", "all that the line does"])
def test_an_edit_that_the_user_can_make_is_printed(via: tuple[LibraryFrame, ...], other_s: float) -> None:
    [finding] = diagnose(constants_below(via, other_s=other_s).build(), [CONSTANT]).findings

    assert "register_buffer" in finding.edit


FABRIC = LibraryFrame(file="lightning/fabric/wrappers.py", line=60)
ACCELERATOR = LibraryFrame(file="accelerate/accelerator.py", line=2700)
MIXED = ("workload.mixed-precision",)


@pytest.mark.parametrize(
    ("via", "device", "edit"),
    [
        ((TRAINER, ACCELERATOR), "NVIDIA H200", "TrainingArguments(..., bf16=True), "),
        ((TRAINER, ACCELERATOR), "cpu", "use_cpu=True"),
        ((ACCELERATOR,), "cpu", 'Accelerator(mixed_precision="bf16")'),
        ((FABRIC,), "cpu", 'Fabric(precision="bf16-mixed")'),
        ((LibraryFrame(file="sentence_transformers/fit_mixin.py", line=3), TRAINER), "cpu", "fit() has no argument"),
    ],
    ids=["Trainer", "Trainer on a CPU", "Accelerator", "Fabric", "fit of sentence-transformers"],
)
def test_the_precision_of_a_loop_is_set_where_the_user_starts_it(
    via: tuple[LibraryFrame, ...], device: str, edit: str
) -> None:
    run = EvidenceBuilder()
    run.backward_at(run.line("train.py", 12, "run()", via=via))
    where = run.sources[run.line("train.py", 12, "run()", via=via)]
    finding = Finding(rule="compute.new", where=where, because="slow", edit="own", levers=MIXED)
    evidence = run.build()
    evidence = msgspec.structs.replace(evidence, workload=msgspec.structs.replace(evidence.workload, device=device))
    [after] = with_settings([finding], evidence, rewriting=frozenset())
    assert edit in after.edit


def test_what_the_user_can_do_comes_before_what_a_library_offers_beside_it() -> None:
    run = EvidenceBuilder()
    mnist = LibraryFrame(file="torchvision/datasets/mnist.py", line=146)
    edit = edited(run, run.line("train.py", 12, "for x, y in loader:", via=(mnist,)), "input.slow-loader")
    assert edit.startswith("the rule's own; or ")
    assert "v2.PILToTensor" in edit


def test_what_a_library_derives_from_another_is_set_as_it_says() -> None:
    run = EvidenceBuilder()
    fit = LibraryFrame(file="sentence_transformers/base/fit_mixin.py", line=3)
    own = edited(run, run.line("train.py", 12, "model.fit()", via=(fit, TRAINER)), "compute.padding")
    assert "SentenceTransformerTrainingArguments" in own and "train_sampling_strategy" not in own
    plain = edited(run, run.line("train.py", 14, "trainer.train()", via=(TRAINER,)), "compute.padding")
    assert "train_sampling_strategy" in plain
