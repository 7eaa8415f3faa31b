"""The report on a terminal."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from flatout.core.records.evidence import Evidence, Observing, Steps
from flatout.core.records.finding import Diagnosis, HotLine, KernelTime, Note, RankedFinding
from flatout.core.records.memory import Memory, MemoryPart
from flatout.core.records.workload import LibraryFrame, Source
from flatout.report.parts.breakdown import shown_parts
from flatout.report.parts.diagnosis import causes, diagnosis_blocks, diagnosis_headline
from flatout.report.sanitise import inert, place
from flatout.report.text import terminal_report

Render = Callable[..., str]
Golden = Callable[[str, str], None]
change = msgspec.structs.replace

HOSTILE = "[bold]x[/bold] \x1b[31mred\x1b[0m \x1b]0;title\x07 a\rb \x9b1m \u202ereversed\u2066 :smile: \udcff [/]"


@pytest.fixture
def fast(diagnosis: Diagnosis) -> Diagnosis:
    lines = diagnosis.hot_lines[1:]
    return change(
        diagnosis,
        step_s=0.0123,
        floor_s=0.0102,
        explained_s=0.0,
        unexplained_s=0.0042,
        parts=(),
        findings=(),
        notes=(),
        hot_lines=lines,
        refused=(),
    )


@pytest.fixture
def quiet(evidence: Evidence) -> Evidence:
    """A script in which no step was seen."""
    return change(
        evidence,
        steps=Steps(kind="none", num_observed=0, num_timed=0, step_s=0.0, low_s=0.0, high_s=0.0),
        observing=Observing(light_fraction=0.001, deep_s=0.0, trials_s=0.0, other_s=0.0, num_deep_steps=0),
        exit="RuntimeError: mat1 and mat2 shapes cannot be multiplied (64x256 and 128x10)",
        exit_code=1,
        notes=("an optimizer was made at train.py:20 but never stepped",),
    )


@pytest.fixture
def nothing() -> Diagnosis:
    return Diagnosis(
        step_s=0.0, floor_s=None, explained_s=0.0, unexplained_s=0.0, findings=(), notes=(), hot_lines=(), checked=()
    )


def hostile(evidence: Evidence, diagnosis: Diagnosis, text: str) -> tuple[Evidence, Diagnosis]:
    """The same run with `text` wherever text can come from the script or from its surroundings."""
    source = Source(file=f"/home/ada/gpt/{text}.py", line=3, text=text)
    finding: RankedFinding = change(
        diagnosis.findings[0],
        rule=text,
        title=text,
        file=text,
        because=text,
        edit=text,
        text=text,
        also=(source,),
        via=(LibraryFrame(file=text, line=7, function=text, text=text),),
        module=text,
        merged=(text,),
    )
    evidence = change(
        evidence,
        workload=change(evidence.workload, device=text, torch=text, python=text),
        machine=None,
        exit=text,
        exit_code=1,
        notes=(text,),
        steps=change(evidence.steps, phases={"forward": 1.0, text: 0.5}),
    )
    diagnosis = change(
        diagnosis,
        findings=(finding,),
        notes=(Note(rule=text, where=source, text=text),),
        hot_lines=tuple(change(line, source=source) for line in diagnosis.hot_lines),
        checked=(text,),
        refused=(text,),
    )
    return evidence, diagnosis


def test_a_slow_step(evidence: Evidence, diagnosis: Diagnosis, render: Render, golden: Golden) -> None:
    golden("slow", render(diagnosis_blocks(evidence, diagnosis)))


def test_a_slow_step_at_80_columns(evidence: Evidence, diagnosis: Diagnosis, render: Render, golden: Golden) -> None:
    golden("slow-80", render(diagnosis_blocks(evidence, diagnosis), width=80))


def test_a_slow_step_in_ascii(evidence: Evidence, diagnosis: Diagnosis, render: Render, golden: Golden) -> None:
    golden("slow-ascii", render(diagnosis_blocks(evidence, diagnosis), width=80, encoding="ascii"))


def test_memory_at_the_peak_and_causes_that_take_memory(
    evidence: Evidence, diagnosis: Diagnosis, render: Render, golden: Golden
) -> None:
    parts = tuple(
        MemoryPart(kind=kind, bytes=size << 20, num_tensors=3)
        for kind, size in (("activations", 250), ("optimizer state", 80), ("parameters", 40), ("process", 42))
    )
    memory = Memory(
        device="cpu",
        peak_bytes=412 << 20,
        peak_phase="backward",
        at_peak=parts,
        measured_peak_bytes=420 << 20,
        total_bytes=16 << 30,
    )
    leak = change(
        diagnosis.findings[0],
        rule="capacity.loss-history",
        title="A history keeps the graph of every step",
        regime="capacity",
        cost_s=0.0,
        share=0.0,
        gain=(1.0, 1.0),
        merged=(),
        growth_bytes_per_step=int(3.1 * 2**20),
        peak_bytes=412 << 20,
        steps_until_full=5150.0,
    )
    large = change(
        leak, rule="capacity.full-logits", growth_bytes_per_step=0, steps_until_full=None, saved_bytes=120 << 20
    )
    told = change(diagnosis, findings=(leak, diagnosis.findings[0], large))

    golden("memory", render(diagnosis_blocks(change(evidence, memory=(memory,)), told)))


def test_a_fast_step(evidence: Evidence, fast: Diagnosis, render: Render, golden: Golden) -> None:
    phases = {"forward": 0.004, "backward": 0.007, "optimizer": 0.0013}
    steps = change(evidence.steps, step_s=0.0123, low_s=0.0122, high_s=0.0125, phases=phases)

    golden("fast", render(diagnosis_blocks(change(evidence, steps=steps, notes=()), fast)))


def test_no_steps_and_a_failed_script(quiet: Evidence, nothing: Diagnosis, render: Render, golden: Golden) -> None:
    golden("no-steps", render(diagnosis_blocks(quiet, nothing)))


def test_a_machine_that_was_not_measured(
    evidence: Evidence, diagnosis: Diagnosis, render: Render, golden: Golden
) -> None:
    lines = tuple(change(line, floor_s=0.0) for line in diagnosis.hot_lines)
    unmeasured = change(diagnosis, floor_s=None, hot_lines=lines, findings=diagnosis.findings[2:], explained_s=0.0021)

    golden("no-machine", render(diagnosis_blocks(change(evidence, machine=None), unmeasured)))


def test_hostile_text_is_shown_inert(evidence: Evidence, diagnosis: Diagnosis, render: Render, golden: Golden) -> None:
    golden("hostile", render(diagnosis_blocks(*hostile(evidence, diagnosis, HOSTILE))))


@pytest.mark.slow
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(max_size=60), width=st.integers(40, 120), encoding=st.sampled_from(["utf-8", "ascii", "cp1252"]))
def test_no_text_breaks_out_of_the_report(
    evidence: Evidence, diagnosis: Diagnosis, render: Render, text: str, width: int, encoding: str
) -> None:
    shown = render(diagnosis_blocks(*hostile(evidence, diagnosis, text)), width=width, encoding=encoding)

    assert all(unicodedata.category(c) not in ("Cc", "Cf", "Cs") for c in shown.replace("\n", ""))
    assert max(cell_len(line) for line in shown.splitlines()) <= min(width, 100)
    assert encoding == "utf-8" or shown.isascii()


@pytest.mark.slow
@pytest.mark.parametrize("width", [60, 71, 80, 100, 140])
def test_no_digit_is_lost_for_want_of_room(
    evidence: Evidence, diagnosis: Diagnosis, render: Render, width: int
) -> None:
    shown = "".join(render(diagnosis_blocks(evidence, diagnosis), width=width).split())

    for number in ("12.40", "4.96x", "1.3x", "1.06x", "14.5ms"):
        assert number in shown


def test_one_cause_is_spoken_of_as_one(evidence: Evidence, diagnosis: Diagnosis) -> None:
    text = diagnosis_headline(evidence, change(diagnosis, findings=diagnosis.findings[:1]))

    assert text.endswith("; the cause below explains 23.6 ms.")


def test_more_than_nine_causes_are_counted_in_digits(evidence: Evidence, diagnosis: Diagnosis) -> None:
    text = diagnosis_headline(evidence, change(diagnosis, findings=diagnosis.findings * 4))

    assert "the 12 causes below explain" in text


def test_a_line_that_calls_itself_many_times_is_named_once(evidence: Evidence, diagnosis: Diagnosis) -> None:
    """A library's loop behind one line of the user's has many places that are all that line."""
    finding = diagnosis.findings[0]
    here, elsewhere = Source(file=finding.file, line=finding.line), Source(file="/home/ada/other.py", line=3)
    many = change(finding, also=(here, elsewhere, here, elsewhere))
    [cause] = causes(evidence, change(diagnosis, findings=(many,)))

    assert [other.rsplit("/", 1)[-1] for other in cause.also] == ["other.py:3"]


@pytest.mark.parametrize(
    ("kind", "step"), [("training", "a training step"), ("inference", "an inference step"), ("call", "a call")]
)
def test_the_headline_names_the_kind_of_step(evidence: Evidence, fast: Diagnosis, kind: str, step: str) -> None:
    text = diagnosis_headline(change(evidence, steps=change(evidence.steps, kind=kind)), fast)

    assert text.startswith(f"38.2 ms {step}.")


@pytest.mark.parametrize("floor_s", [None, 0.008])
def test_a_step_that_is_not_near_its_floor_is_not_called_fast(
    evidence: Evidence, fast: Diagnosis, floor_s: float | None
) -> None:
    text = diagnosis_headline(evidence, change(fast, floor_s=floor_s))

    assert "fast" not in text
    assert "No known cause slows it: 7 things were checked" in text


def test_a_step_without_a_known_cause_says_what_it_is_made_of(evidence: Evidence, diagnosis: Diagnosis) -> None:
    text = diagnosis_headline(evidence, change(diagnosis, findings=(), explained_s=0.0))

    assert "it goes into matrix products (35 %, 2.16x their floor), waiting for data (24 %)" in text


def test_the_parts_of_the_step_add_up_on_the_page(evidence: Evidence, diagnosis: Diagnosis) -> None:
    shown = shown_parts(diagnosis, most=3)

    named_s = sum(part.seconds for part in shown.parts) + shown.more_s
    assert named_s + diagnosis.unexplained_s == pytest.approx(diagnosis.step_s)
    assert (len(shown.parts), shown.num_more) == (3, 4)


def test_nothing_checked_is_not_called_fast(evidence: Evidence, fast: Diagnosis) -> None:
    assert diagnosis_headline(evidence, change(fast, checked=())) == "38.2 ms a training step. Nothing was checked."


def test_too_few_steps_give_no_time(evidence: Evidence, fast: Diagnosis) -> None:
    steps = change(evidence.steps, num_observed=2, num_timed=0)

    assert diagnosis_headline(change(evidence, steps=steps), fast) == "Two steps seen, too few to time one."


@pytest.mark.parametrize(("exit", "code"), [("finished", 0), ("", None), ("finished", None)])
def test_an_ordinary_end_is_not_mentioned(
    evidence: Evidence, diagnosis: Diagnosis, render: Render, exit: str, code: int | None
) -> None:
    assert "exit" not in render(diagnosis_blocks(change(evidence, exit=exit, exit_code=code), diagnosis))


@pytest.mark.parametrize(
    ("exit", "code", "line"), [("ValueError: no", 1, "exit 1: ValueError: no"), ("finished", 3, "exit 3: finished")]
)
def test_a_failure_is_one_line(
    evidence: Evidence, diagnosis: Diagnosis, render: Render, exit: str, code: int, line: str
) -> None:
    assert line in render(diagnosis_blocks(change(evidence, exit=exit, exit_code=code), diagnosis)).splitlines()


def test_a_stopped_script_is_no_failure(evidence: Evidence, diagnosis: Diagnosis, render: Render) -> None:
    shown = render(diagnosis_blocks(change(evidence, exit="stopped", exit_code=-15), diagnosis))

    assert "the script was ended when this report was ready" in shown
    assert "exit" not in shown


def test_a_finding_without_a_line_says_so(
    evidence: Evidence, diagnosis: Diagnosis, finding: RankedFinding, render: Render
) -> None:
    nowhere = change(finding, file="", line=0, text="", also=())

    assert "the whole step, no single line" in render(
        diagnosis_blocks(evidence, change(diagnosis, findings=(nowhere,)))
    )


def test_a_finding_without_an_edit_has_no_arrow(
    evidence: Evidence, diagnosis: Diagnosis, finding: RankedFinding, render: Render
) -> None:
    bare = change(finding, edit="", because="")

    assert "\u2192" not in render(diagnosis_blocks(evidence, change(diagnosis, findings=(bare,))))


def test_many_hot_lines_are_summed_up(evidence: Evidence, diagnosis: Diagnosis, render: Render) -> None:
    line: HotLine = diagnosis.hot_lines[0]
    many = tuple(change(line, seconds=0.001, source=change(line.source, line=n)) for n in range(20))

    shown = render(diagnosis_blocks(evidence, change(diagnosis, hot_lines=many)))

    assert "and 8 more lines, 8.00 ms together" in shown


@pytest.mark.parametrize(
    ("file", "cwd", "shown"),
    [
        ("/home/ada/gpt/nn/model.py", "/home/ada/gpt", "nn/model.py:7"),
        ("/home/ada/gpt/nn/model.py", "/home/ada/gpt/", "nn/model.py:7"),
        ("/home/ada/gpt2/model.py", "/home/ada/gpt", "/home/ada/gpt2/model.py:7"),
        ("/model.py", "/", "model.py:7"),
        ("C:\\work\\model.py", "C:\\work", "model.py:7"),
        ("/model.py", "", "/model.py:7"),
        ("", "/home", ""),
    ],
)
def test_a_path_is_relative_to_the_working_folder_when_inside(file: str, cwd: str, shown: str) -> None:
    assert place(file, 7, cwd=cwd) == shown


@pytest.mark.slow
@given(st.text(max_size=80))
def test_what_is_inert_stays_as_it_is(text: str) -> None:
    assert inert(inert(text)) == inert(text)


def test_colour_is_an_ornament_only(evidence: Evidence, diagnosis: Diagnosis) -> None:
    with_colour, without = Console(width=100, color_system="truecolor"), Console(width=100, color_system=None)
    texts = []
    for console in (with_colour, without):
        with console.capture() as capture:
            console.print(terminal_report(diagnosis_blocks(evidence, diagnosis)))
        texts.append(Text.from_ansi(capture.get()).plain)

    assert texts[0].split() == texts[1].split()


def test_kernels_far_above_their_floor_are_told_one_by_one(
    evidence: Evidence, diagnosis: Diagnosis, render: Render
) -> None:
    def kernel(op: str, seconds: float, floor_s: float | None) -> KernelTime:
        return KernelTime(op=op, shapes=((64, 768), ()), num_calls=12.0, seconds=seconds, floor_s=floor_s)

    known = (kernel("aten.mm", 0.012, 0.003), kernel("inductor.triton_red_fused_native_layer_norm_4", 0.002, None))
    near = kernel("aten.bmm", 0.012, 0.01199)
    text = render(diagnosis_blocks(evidence, change(diagnosis, kernels=(*known, near))))
    table = text.partition("The floor, kernel by kernel")[2].partition("\n\n")[0]
    assert "mm" in table and "4.00x" in table and "64x768, 1" in table and "9.00" in table
    assert "triton_red_fused_native_layer_norm_4" in table and "not known" in table
    assert "bmm" not in table, "what is within a hundredth of the step is as fast as it can be"
    assert "kernel by kernel" not in render(diagnosis_blocks(evidence, diagnosis))
    assert "\x1b]0" not in render(
        diagnosis_blocks(evidence, change(diagnosis, kernels=(kernel(HOSTILE, 0.02, 0.001),)))
    )
