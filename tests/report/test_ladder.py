"""What tuning found, in text, Markdown and HTML: each rung with what was predicted and measured; nothing becomes markup."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from flatout.core.records.lever import PlannedLever
from flatout.core.records.plan import Attempt, AttemptKind, LeftOut, Plan, PlanStep, Tuned
from flatout.core.records.record import from_json, to_json
from flatout.core.records.verdict import Equality, Footprint, Guarantee, Speed, Verdict
from flatout.report.html import ladder_html
from flatout.report.markdown import markdown_report
from flatout.report.parts.ladder import WIDTH, ladder_blocks, ladder_headline, ladder_rows

Render = Callable[..., str]

COMPILE = PlannedLever(
    id="graph.compile",
    guarantee="bounded",
    parameters={"mode": "default"},
    predicted=(1.1, 1.6),
    measured=(1.5, 1.4, 1.6),
    because="forward and backward take 9.00 ms of a step",
)
GATHERED = PlannedLever(
    id="memory.gather-once",
    guarantee="exact",
    parameters={"file": "train.py", "function": "main", "code": "bank = torch.cat([bank, <b>x</b>])"},
    predicted=(1.0, 1.3),
    measured=(1.2, 1.1, 1.3),
    because="the store grows",
)


def verdict(
    *, guarantee: Guarantee = "bounded", ratio: float = 1.5, before_s: float = 0.012, after_bytes: int = 1 << 29
) -> Verdict:
    return Verdict(
        before="train.py",
        after="train.py",
        equality=Equality(guarantee=guarantee, holds=True, num_steps=8, num_tensors=100, at="bfloat16"),
        speed=Speed(
            ratio=ratio, low=0.9 * ratio, high=1.1 * ratio, num_pairs=12, before_s=before_s, after_s=before_s / ratio
        ),
        footprints=(Footprint(device="cpu", before_bytes=1 << 30, after_bytes=after_bytes),),
        outcome="proved",
        because="",
        device="cpu",
        torch="2.13.0",
        python="3.11.7",
    )


TUNED = Tuned(
    plan=Plan(script="train.py", arguments=("--fast",), lever=(COMPILE, GATHERED)),
    steps=(
        PlanStep(planned=COMPILE, verdict=verdict()),
        PlanStep(planned=GATHERED, verdict=verdict(guarantee="exact", ratio=1.2, after_bytes=1 << 30)),
    ),
    proof=verdict(ratio=1.8),
    left_out=(
        LeftOut(lever="memory.channels-last", because="no image | <script>"),
        LeftOut(lever="workload.tf32", because="TF32 is a format of GPUs", is_for_script=False),
    ),
    is_complete=False,
)
NOTHING = Tuned(plan=Plan(), left_out=(LeftOut(lever="graph.compile", because="slower"),))


@pytest.mark.parametrize("kind", ["add", "together", "again", "final", "final-again"])
def test_the_headline_says_whether_fresh_seeds_were_tried(kind: AttemptKind) -> None:
    assert TUNED.proof is not None
    attempt = Attempt(kind=kind, before=(), after=TUNED.plan.lever, lever=COMPILE.id, verdict=TUNED.proof)
    headline = ladder_headline(msgspec.structs.replace(TUNED, attempts=(attempt,)))
    assert headline.endswith("on fresh seeds" if kind.startswith("final") else "(no time was left for fresh seeds)")


def test_a_rung_for_each_lever_and_the_reasons_of_the_others(render: Render) -> None:
    text = " ".join(render(ladder_blocks(TUNED), width=200, limit=WIDTH).split())
    assert text.startswith("1.80x faster (1.62 - 1.98), 12.0 ms -> 6.67 ms a step, proved bounded at bfloat16")
    assert "untouched 1.00x 12.0 ms" in text
    assert "1.50x (1.40 - 1.60) 1.10 - 1.60x 8.00 ms 512 MiB (-50 %) bounded" in text
    assert "1.20x (1.10 - 1.30) 1.00 - 1.30x 6.67 ms 1.00 GiB (same) exact" in text
    assert "memory.channels-last no image | <script>" in text
    assert "8 steps and 100 tensors compared" in text
    assert "1 other lever is not for this script (--html, --markdown and --json say why)" in text
    assert "goes on from here" in text


def test_a_change_of_precision_says_what_it_costs(render: Render) -> None:
    assert TUNED.proof is not None
    equality = Equality(
        guarantee="quality", holds=True, num_steps=100, because="the loss is 2.5, and +0.01 with the change"
    )
    tuned = msgspec.structs.replace(TUNED, proof=msgspec.structs.replace(TUNED.proof, equality=equality))
    text = " ".join(render(ladder_blocks(tuned), width=200, limit=WIDTH).split())
    assert "The loss is 2.5, and +0.01 with the change; " in text
    assert "tensors compared" not in text


@pytest.mark.parametrize("width", [60, 100])
def test_it_fits_a_narrow_terminal(render: Render, width: int) -> None:
    assert max(map(len, render(ladder_blocks(TUNED), width=width).splitlines())) <= width


def test_without_a_plan_it_says_so_everywhere(render: Render) -> None:
    text = render(ladder_blocks(NOTHING))
    assert text.startswith("No plan") and "slower" in text
    assert "No plan" in markdown_report(ladder_blocks(NOTHING))
    page = ladder_html(NOTHING).decode()
    assert "No plan" in page and "<svg" not in page


def test_the_step_after_a_rung_is_the_one_before_it_less_what_it_saved() -> None:
    steps = [row.step_s[0] for row in ladder_rows(TUNED) if row.step_s is not None]
    assert steps == pytest.approx([0.012, 0.008, 0.008 / 1.2, 0.012 / 1.8])


def test_a_plan_without_verdicts_of_its_rungs_is_shown_as_far_as_it_is_known() -> None:
    found = ladder_rows(Tuned(plan=TUNED.plan, proof=TUNED.proof))
    assert [row.guarantee for row in found[1:3]] == ["bounded", "exact"]
    assert [row.memory for row in found[1:3]] == ["", ""]


def test_it_goes_to_json_and_back() -> None:
    assert from_json(to_json(TUNED), Tuned) == TUNED


def test_what_came_from_the_script_is_text_in_markdown_and_on_the_page() -> None:
    text = markdown_report(ladder_blocks(TUNED))
    assert "<b>" not in text and "<script>" not in text
    assert r"no image \|" in text
    [row] = [line for line in text.splitlines() if "gather" in line]
    assert row.replace(r"\|", "").count("|") == 9
    assert "TF32 is a format of GPUs" in text
    page = ladder_html(TUNED).decode()
    assert "TF32 is a format of GPUs" in page
    assert "<b>x" not in page and "<script>" not in page
    assert page.count('class="whisker"') == sum(row.step_s is not None for row in ladder_rows(TUNED)) - 1
    assert ladder_headline(TUNED).replace(">", "&gt;") in page


def test_the_page_says_how_to_use_the_plan_what_it_guarantees_and_what_it_changes() -> None:
    diff = ["--- a/train.py", "+++ b/train.py", "@@ -1 +1 @@", "-x = '<b>'", "+    y = 1"]
    page = ladder_html(TUNED, commands=["flatout run --plan plan.toml train.py"], diff=diff).decode()
    assert "<pre>flatout run --plan plan.toml train.py</pre>" in page
    assert "Bounded: the same steps were computed in float64" in page
    assert "NOT VERIFIED" in page.split("The change as a diff", 2)[2][:400]
    assert '<tr class="new"><td><pre>+    y = 1</pre>' in page
    assert '<tr class="old"><td><pre>-x = &#39;&lt;b&gt;&#39;</pre>' in page
    nothing = ladder_html(NOTHING).decode()
    assert "How to use it" not in nothing and "guarantee says" not in nothing and "as a diff" not in nothing


def test_a_plan_that_saves_memory_and_costs_time_says_that(render: Render) -> None:
    slower = Tuned(plan=TUNED.plan, proof=verdict(ratio=0.8))
    assert ladder_headline(slower).startswith("1.00 GiB -> 512 MiB at the peak, 12.0 ms -> 15.0 ms a step")
    assert "faster</h1>" not in ladder_html(slower).decode()


def test_the_gain_of_whole_runs_is_told_with_the_step_from_which_on_they_pay(render: Render) -> None:
    assert TUNED.proof is not None and TUNED.proof.speed is not None
    speed = msgspec.structs.replace(TUNED.proof.speed, num_first=8, first_before_s=2.0, first_after_s=7.0)
    start_s = 0.5
    plan = msgspec.structs.replace(TUNED.plan, run_start_s=start_s, pays_from=speed.pays_from(start_s))
    tuned = msgspec.structs.replace(TUNED, plan=plan, proof=msgspec.structs.replace(TUNED.proof, speed=speed))
    text = " ".join(render(ladder_blocks(tuned), width=200, limit=WIDTH).split())
    # 5.33 ms a step have to make up for 5.5 s
    assert (
        "The first steps end 5.50 s later, 500 ms of that `flatout run` itself: a whole run pays from step 1,040 on"
        in text
    )
    assert f"({speed.gain_of_run(10_000, start_s):.2f}x over 10,000, " in text
    assert "pays from" not in render(ladder_blocks(TUNED), width=200, limit=WIDTH)


def test_a_plan_that_starts_no_later_gains_at_once(render: Render) -> None:
    assert TUNED.proof is not None and TUNED.proof.speed is not None
    speed = msgspec.structs.replace(TUNED.proof.speed, num_first=8, first_before_s=7.0, first_after_s=2.0)
    plan = msgspec.structs.replace(TUNED.plan, run_start_s=0.5, pays_from=0)
    tuned = msgspec.structs.replace(TUNED, plan=plan, proof=msgspec.structs.replace(TUNED.proof, speed=speed))
    assert "A whole run gains from its first steps on." in render(ladder_blocks(tuned), width=200, limit=WIDTH)


def test_a_terminal_names_the_five_that_were_most_at_stake(render: Render) -> None:
    left_out = tuple(LeftOut(lever=f"lever-{i}", because=f"reason {i}", gain=1 + i / 10) for i in range(8))
    tuned = msgspec.structs.replace(NOTHING, left_out=left_out)
    text = render(ladder_blocks(tuned), width=100, limit=WIDTH)
    assert [i for i in range(8) if f"reason {i}" in text] == [3, 4, 5, 6, 7]
    assert text.index("reason 7") < text.index("reason 3")
    assert "and 3 that promised less" in text
    assert all(f"reason {i}" in markdown_report(ladder_blocks(tuned)) for i in range(8))


def test_a_search_says_what_it_spent_its_time_on(render: Render) -> None:
    attempts = [
        Attempt(
            kind=kind,
            before=(),
            after=(COMPILE,),
            lever=COMPILE.id,
            verdict=msgspec.structs.replace(verdict(), seconds=seconds),
        )
        for kind, seconds in (("add", 41.0), ("final", 49.0))
    ]
    timed = msgspec.structs.replace(TUNED, attempts=tuple(attempts), observing_s=12.0)
    assert "Observing the script took 12.0 s, 2 comparisons 90.0 s." in render(ladder_blocks(timed))
    assert "Observing" not in render(ladder_blocks(TUNED))
