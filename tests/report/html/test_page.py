"""The HTML page: complete, alone, harmless whatever the script is called."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.page_reader import Page, check_harmless, spoiled

from flatout.core.records.evidence import Evidence, Steps
from flatout.core.records.finding import BrokenLaw, Diagnosis, KernelTime
from flatout.report.html import html_report
from flatout.report.json_report import json_report

pytestmark = pytest.mark.slow

change = msgspec.structs.replace

HOSTILE = [
    "<script>alert(1)</script>",
    "</style><script>alert(1)</script>",
    '"onload="alert(1)" x="',
    "'><img src=x onerror=alert(1)>",
    "javascript:alert(1)",
    "$\\frac{<b>}{$x^2$}$",
    "{{ 7 * 7 }}{% raw %}",
    "\x00\x01\x1b[31mred\x7f\x9b1m \u202ereversed \u2028line",
    "\udcff\ud800 lone",
    "]]></title></text><svg onload=alert(1)>",
    "<!-- --><![CDATA[",
    "&lt;script&gt;",
    "#fab001 url(http://evil.example/x)",
    "a" * 5000,
    "\U0001f600 \u4e2d\u6587 \u0627\u0644",
    "",
]


def test_the_page_is_one_harmless_file(drawn: bytes) -> None:
    page = Page(drawn)
    check_harmless(page)
    assert drawn.startswith(b"<!doctype html>")
    assert len(drawn) < 3 << 20
    assert ("meta", "content", "default-src 'none'; style-src 'unsafe-inline'; img-src data:") in page.attributes
    assert b"http://www.w3.org/2000/svg" in drawn
    assert drawn.count(b"http") == drawn.count(b"http://www.w3.org/2000/svg") + drawn.count(b"http-equiv")


def test_the_page_says_what_the_diagnosis_says(drawn: bytes, diagnosis: Diagnosis) -> None:
    text = Page(drawn).text

    for finding in diagnosis.findings:
        assert finding.title in text
        assert finding.because in text
        assert finding.rule in text
    for told in (
        "38.2 ms a training step",
        "1.3x - 1.4x",
        "model.py:48",
        "Attention is written out by hand",
        "1.15 GiB at the peak",
        "list 'losses' of <module>",
        "size mismatch at index 1",
        "ampere_sgemm_128x64_nn",
        "all_reduce",
        "Nothing came from rank 3",
        "loss.item() is read every step",
        "the 4 workers of the DataLoader",
        "batch of twice the size",
        "capacity.tiny-batch",
        "95 % interval",
        "94 %",
        "torch 2.13.0",
        "190 GFLOP/s",
        "212 operators too short to keep",
    ):
        assert told in text, told


def test_the_same_records_give_the_same_bytes(drawn: bytes, full: Evidence, diagnosis: Diagnosis) -> None:
    assert html_report(full, diagnosis) == drawn


def test_ids_are_unique_and_every_link_has_its_target(drawn: bytes) -> None:
    page = Page(drawn)

    ids = [value for _, name, value in page.attributes if name == "id"]
    targets = [value[1:] for _, name, value in page.attributes if name == "href"]
    targets += [value for _, name, value in page.attributes if name == "aria-labelledby"]
    assert len(ids) == len(set(ids))
    assert set(targets) <= set(ids)


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_text_stays_text(full: Evidence, diagnosis: Diagnosis, text: str) -> None:
    page = Page(html_report(spoiled(full, text), spoiled(diagnosis, text)))

    check_harmless(page)
    if text.isascii() and text.isprintable() and len(text) < 100:
        assert text in page.text


def test_what_is_left_out_is_said_with_its_reason(full: Evidence, diagnosis: Diagnosis) -> None:
    law = BrokenLaw(law="floor", text="the floor of <b>a.py</b>:3 is more than the 2 ms that it took")
    page = Page(html_report(full, change(diagnosis, broken=(law,))))
    check_harmless(page)
    assert law.text in page.text


@settings(max_examples=5, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(st.characters(), max_size=60) | st.text("<>\"'&$\\`{}%=/ onscript", max_size=60))
def test_no_text_becomes_markup(full: Evidence, diagnosis: Diagnosis, text: str) -> None:
    check_harmless(Page(html_report(spoiled(full, text), spoiled(diagnosis, text))))


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(factor=st.sampled_from([0.0, 1e-12, 1e-3, 1.0, 1e6, 1e15, -1.0]))
@pytest.mark.long
def test_no_number_breaks_the_page(full: Evidence, diagnosis: Diagnosis, factor: float) -> None:
    def scaled(value: Any) -> Any:
        if isinstance(value, float):
            return value * factor
        if isinstance(value, tuple):
            return tuple(map(scaled, value))
        if isinstance(value, dict):
            return {k: scaled(v) for k, v in value.items()}
        if isinstance(value, msgspec.Struct):
            return change(value, **{n: scaled(getattr(value, n)) for n in value.__struct_fields__})
        return value

    check_harmless(Page(html_report(scaled(full), scaled(diagnosis))))


def test_a_run_in_which_no_step_was_seen(evidence: Evidence) -> None:
    steps = Steps(kind="none", num_observed=0, num_timed=0, step_s=0.0, low_s=0.0, high_s=0.0)
    nothing = Diagnosis(
        step_s=0.0, floor_s=None, explained_s=0.0, unexplained_s=0.0, findings=(), notes=(), hot_lines=(), checked=()
    )
    failed = change(evidence, steps=steps, exit="RuntimeError: shapes <64> and 128", exit_code=1, machine=None)

    page = Page(html_report(failed, nothing))

    check_harmless(page)
    assert "No step was seen" in page.text
    assert "exit 1: RuntimeError: shapes <64> and 128" in page.text
    assert "Memory was not looked at" in page.text
    assert "svg" not in page.tags


def test_a_fast_run_says_so(evidence: Evidence, diagnosis: Diagnosis) -> None:
    fast = change(diagnosis, findings=(), floor_s=0.0318, unexplained_s=0.002, explained_s=0.0, parts=())

    text = Page(html_report(evidence, fast)).text

    assert "This is already fast" in text
    assert "no causes worth more than the noise" in text


def test_a_cause_that_takes_memory_says_how_much(full: Evidence, diagnosis: Diagnosis) -> None:
    finding = change(
        diagnosis.findings[0],
        regime="capacity",
        gain=(1.0, 1.0),
        saved_bytes=300 << 20,
        peak_bytes=1180 << 20,
        growth_bytes_per_step=2 << 20,
        steps_until_full=41_234.0,
    )

    text = Page(html_report(full, change(diagnosis, findings=(finding,)))).text

    assert "grows 2.00 MiB a step: memory is full after 41 000 more steps" in text
    assert "saves 300 MiB of 1.15 GiB at the peak" in text
    assert "faster" not in text.partition("The floor, line by line")[0].partition("The cause")[2]


def test_kernels_far_above_their_floor_are_in_a_table(full: Evidence, diagnosis: Diagnosis) -> None:
    name = "inductor.triton_<b>red</b>_0"
    kernels = tuple(
        KernelTime(op=op, shapes=((64, 768),), num_calls=12.0, seconds=0.012, floor_s=floor_s)
        for op, floor_s in (("aten.mm", 0.003), (name, None))
    )
    text = Page(html_report(full, change(diagnosis, kernels=kernels))).text
    table = text.partition("The floor, kernel by kernel")[2].partition("Memory over a step")[0]
    assert "9.00 ms" in table and "64x768" in table and "triton_<b>red</b>_0" in table and "not known" in table
    assert "kernel by kernel" not in Page(html_report(full, diagnosis)).text


@pytest.mark.long
def test_a_huge_run_stays_a_small_page(full: Evidence, diagnosis: Diagnosis) -> None:
    long = "x = '" + "a" * 100_000 + "'"
    finding = change(diagnosis.findings[0], text=long, because=long, edit=f"{long}\n" * 50, also=full.sources * 200)
    many = change(
        diagnosis,
        findings=(finding,) * 60,
        notes=diagnosis.notes * 5000,
        refused=diagnosis.refused * 5000,
        hot_lines=diagnosis.hot_lines * 100,
        checked=diagnosis.checked * 1000,
    )
    assert full.timeline is not None and full.device_step is not None
    wide = change(
        full,
        timeline=change(full.timeline, spans=full.timeline.spans * 12),
        device_step=change(full.device_step, kernels=full.device_step.kernels * 5000),
        notes=full.notes * 5000,
        memory=full.memory * 50,
    )

    assert len(html_report(wide, many)) <= 3 << 20


@pytest.mark.long
def test_writing_a_page_needs_neither_torch_nor_the_users_matplotlib_settings(
    full: Evidence, diagnosis: Diagnosis, tmp_path: Path
) -> None:
    (tmp_path / "report.json").write_bytes(json_report(full, diagnosis))
    (tmp_path / "matplotlibrc").write_text("text.usetex: True\nsvg.fonttype: path\n")
    code = (
        "import sys\n"
        "from flatout.app.cli import main\n"
        "sys.argv = ['flatout', 'report', 'report.json', '--html', 'report.html']\n"
        "try:\n    main()\nexcept SystemExit as e:\n    assert not e.code, e.code\n"
        "assert 'torch' not in sys.modules\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, check=False, capture_output=True, text=True, timeout=60
    )

    assert ended.returncode == 0, ended.stderr
    check_harmless(Page((tmp_path / "report.html").read_bytes()))


def test_importing_the_html_report_imports_no_plotting(tmp_path: Path) -> None:
    code = "import sys, flatout.report.html\nassert not {'matplotlib', 'numpy', 'jinja2', 'torch'} & set(sys.modules)"

    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, timeout=60)
