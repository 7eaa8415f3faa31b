from __future__ import annotations

import msgspec
import pytest
from tests.evidence_builder import EvidenceBuilder, only_finding, proposed, tensor

from flatout.check.diagnosis import diagnose
from flatout.check.rules.bandwidth.unfused_chain import RULE
from flatout.core.records.trial import TimeCompiled, TimeNormalisation, TrialResult

X, ROW = (8, 256, 512), (8, 256, 1)
LAYER_NORM = ("mean", "sub", "pow", "mean", "sqrt", "div", "mul", "add")
RMS_NORM = ("pow", "mean", "rsqrt", "mul", "mul")
GELU = ("pow", "mul", "add", "tanh", "add", "mul")


def chain(*ops: str, seconds: float = 0.02, calls: float = 2.0) -> EvidenceBuilder:
    """A function whose lines, from 11 of norm.py on, run one operator each; the backward takes half of `seconds`."""
    run = EvidenceBuilder()
    each_s = 0.5 * seconds / len(ops)
    call = -1
    for number, op in enumerate(ops):
        line = run.line("norm.py", 11 + number, function="forward")
        output = ROW if op in ("mean", "sqrt", "rsqrt") else X
        scalars = "[-1], True" if op == "mean" else ""
        row = run.operator(f"aten.{op}", line, inputs=[X], output=output, calls=calls, op_s=each_s, scalars=scalars)
        run.operator("aten.mul", line, inputs=[X, X], output=X, calls=calls, op_s=each_s, phase="backward")
        call = run.call(row, call)
    return run


@pytest.mark.parametrize(("ops", "kind"), [(LAYER_NORM, "layer"), (RMS_NORM, "rms")])
def test_a_normalisation_written_out_is_tried_against_torchs_own(ops: tuple[str, ...], kind: str) -> None:
    [trial] = proposed(RULE, chain(*ops).build())
    assert isinstance(trial, TimeNormalisation)
    assert (trial.kind, trial.shape, trial.dtype, trial.backward) == (kind, X, "float32", True)


def test_the_trial_prices_the_normalisation() -> None:
    run = chain(*LAYER_NORM, seconds=0.02)
    run.tried(*proposed(RULE, run.build()), kept=0.25)

    finding = only_finding(RULE, run.build())

    assert finding.where is not None
    assert (finding.where.file, finding.basis) == ("/home/ada/norm.py", "trial")
    assert sorted([finding.where.line, *(s.line for s in finding.also)]) == list(range(11, 19))
    assert finding.cost_s == pytest.approx(0.02)
    assert finding.saved_s[0] < 0.75 * 0.02 < finding.saved_s[1]


def test_the_hottest_line_is_named() -> None:
    run = chain(*GELU)
    run.operator("aten.tanh", run.line("norm.py", 14), inputs=[X], output=X, op_s=0.02)
    where = only_finding(RULE, run.build()).where
    assert where is not None
    assert where.line == 14


def test_another_formula_is_estimated_by_the_traffic_of_one_kernel() -> None:
    run = chain(*GELU, seconds=0.04)
    assert not proposed(RULE, run.build())
    finding = only_finding(RULE, run.build())
    assert finding.basis == "estimate"
    assert 0 < finding.saved_s[0] < finding.saved_s[1] < 0.04


def test_a_chain_near_the_traffic_of_one_kernel_is_not_reported() -> None:
    run = chain(*GELU, seconds=0.006)
    assert diagnose(run.build(), [RULE]).findings == ()


def test_a_trial_without_gain_is_not_reported() -> None:
    run = chain(*LAYER_NORM)
    run.tried(*proposed(RULE, run.build()), kept=1.1)
    assert diagnose(run.build(), [RULE]).findings == ()


def test_a_few_operators_are_left_alone() -> None:
    run = chain("mul", "add", "tanh")
    assert not proposed(RULE, run.build())
    assert not list(RULE.check(run.build()))


def test_a_chain_that_does_not_matter_to_the_step_is_left_alone() -> None:
    run = chain(*LAYER_NORM, seconds=0.001)
    assert not proposed(RULE, run.build())
    assert not list(RULE.check(run.build()))


def test_a_chain_in_a_loop_is_left_to_the_rule_on_loops() -> None:
    assert not list(RULE.check(chain(*GELU, calls=40).build()))


def test_products_and_copies_are_no_part_of_a_chain() -> None:
    run = EvidenceBuilder()
    for number, op in enumerate(("mm", "bmm", "addmm", "cat", "copy_", "index", "embedding")):
        run.operator(f"aten.{op}", run.line("model.py", 11 + number), inputs=[X], output=X, op_s=0.01)
    assert not list(RULE.check(run.build()))


def test_a_well_written_block_with_products_between_is_left_alone() -> None:
    run = EvidenceBuilder()
    attention = run.line("block.py", 20, "x = x + self.attention(self.norm1(x))", function="forward")
    feed = run.line("block.py", 21, "x = x + self.down(F.gelu(self.up(self.norm2(x))))", function="forward")
    call = -1
    for line, op in (
        (attention, "native_layer_norm"),
        (attention, "addmm"),
        (attention, "add"),
        (feed, "native_layer_norm"),
        (feed, "addmm"),
        (feed, "gelu"),
        (feed, "addmm"),
        (feed, "add"),
    ):
        call = run.call(run.operator(f"aten.{op}", line, inputs=[X], output=X, calls=4, op_s=0.004), call)
    assert diagnose(run.build(), [RULE]).findings == ()


def test_without_a_machine_nothing_is_said_of_the_traffic_of_one_kernel() -> None:
    run = chain(*GELU)
    run.machine = None
    assert all("0.00 ms" not in f.because for f in RULE.check(run.build()))


@pytest.mark.parametrize(
    "op",
    [
        "_fft_r2c",
        "_fft_c2r",
        "sort",
        "topk",
        "cumsum",
        "logcumsumexp",
        "roll",
        "flip",
        "gather",
        "scatter_add",
        "_cdist_forward",
    ],
)
def test_operators_that_no_compiler_fuses_are_no_part_of_a_chain(op: str) -> None:
    assert list(RULE.check(forward_chain("mul", "exp", "add", "sub", "tanh", "abs").build()))
    assert not list(RULE.check(forward_chain("mul", op, "add", op, "tanh", op).build()))


def forward_chain(*ops: str) -> EvidenceBuilder:
    """A function whose lines run one operator each, on what the one before gave, 8 ms each."""
    run = EvidenceBuilder()
    call = -1
    for number, op in enumerate(ops):
        line = run.line("s4d.py", 11 + number, function="forward")
        call = run.call(run.operator(f"aten.{op}", line, inputs=[X], output=X, op_s=0.008), call)
    return run


@pytest.mark.parametrize(
    "op", ["gelu", "native_layer_norm", "_softmax", "where", "native_dropout", "mul_", "var_mean", "mse_loss"]
)
def test_operators_that_a_compiler_fuses_count(op: str) -> None:
    assert only_finding(RULE, chain("mul", "add", "pow", "exp", op, seconds=0.04).build())


def test_a_chain_on_complex_numbers_is_left_alone() -> None:
    run = chain("exp", "mul", "add", "sub", "div", "reciprocal", seconds=0.04)
    assert only_finding(RULE, run.build())
    values = (tensor(*X, dtype="complex64"),)
    run.operators = [msgspec.structs.replace(o, inputs=values, outputs=values) for o in run.operators]
    assert not list(RULE.check(run.build()))


def compiled(*, kept: float, regions: tuple[str, ...] = ()) -> EvidenceBuilder:
    """A chain in Net that takes 40 ms, all of forward and backward 90 ms; Net was tried under torch.compile."""
    run = chain(*GELU, seconds=0.04)
    run.model(run.line("train.py", 20))
    trial = TimeCompiled(model=0, backward=True, regions=regions)
    variant = "regions" if regions else "whole"
    run.trial(TrialResult(trial=trial, now_s=0.1, cured_s=0.1 * kept, variant=variant, parts={"compile": 9.0}))
    return run


def test_a_chain_saves_no_more_than_compiling_the_module_around_it() -> None:
    alone = only_finding(RULE, chain(*GELU, seconds=0.04).build())
    low, high = only_finding(RULE, compiled(kept=0.9).build()).saved_s
    assert 0 < low <= high < alone.saved_s[1]
    assert high == pytest.approx(1.1 * 0.1 * 0.09)


def test_compiling_that_saved_more_than_the_chain_leaves_its_price() -> None:
    assert (
        only_finding(RULE, compiled(kept=0.2).build()).saved_s
        == only_finding(RULE, chain(*GELU, seconds=0.04).build()).saved_s
    )


def test_a_chain_in_a_module_that_gains_nothing_compiled_is_not_reported() -> None:
    assert diagnose(compiled(kept=1.1).build(), [RULE]).findings == ()


def test_compiled_blocks_say_nothing_of_a_chain_outside_them() -> None:
    alone = only_finding(RULE, chain(*GELU, seconds=0.04).build())
    assert only_finding(RULE, compiled(kept=0.9, regions=("blocks",)).build()).saved_s == alone.saved_s


@pytest.mark.parametrize(
    ("why", "is_advised"),
    [
        ("the module does not take these inputs (TorchRuntimeError: RuntimeError when making fake tensor call)", False),
        ("there was no time for it", True),
    ],
)
def test_compiling_that_failed_in_the_trial_is_not_advised(why: str, is_advised: bool) -> None:
    run = chain(*GELU, seconds=0.04)
    run.model(run.line("train.py", 20))
    run.refused(TimeCompiled(model=0, backward=True), why=why)
    assert ("torch.compile" in only_finding(RULE, run.build()).edit) == is_advised
