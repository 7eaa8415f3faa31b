"""`flatout fleet` and its verbs, on a store of built jobs."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.command_line import flatout
from tests.fleet_jobs import NOW_S, WEEK_S, finding, fleet, job

from flatout.app.fleet.overview import last_week, week_of
from flatout.blocks.recording.job_store.opening import open_store
from flatout.core.records.fleet import FleetSummary
from flatout.core.records.job import JobRecord
from flatout.core.records.record import from_json

NAMED = datetime.fromtimestamp(NOW_S - 86400.0, UTC).strftime("%G-W%V")
WORST = job(10**6, name="worst.py", seconds=36_000.0, findings=(finding((3.0, 4.0), line=77),), saved_fraction=0.75)


def of_week(records: list[JobRecord]) -> list[JobRecord]:
    """The jobs with all of them in the named week."""
    began_s = week_of(NAMED).since_s + 3600.0
    ends_s = [began_s + min(r.seconds, 36_000.0) for r in records]
    return [
        msgspec.structs.replace(r, began_s=began_s, written_s=end_s, last_step_s=end_s)
        for r, end_s in zip(records, ends_s, strict=True)
    ]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("stores") / "fleet"
    opened = open_store(path)
    for record in of_week([*fleet(60), WORST]):
        opened.write(record)
    return path


def test_the_worst_job_is_shown_first_with_its_cause_and_its_line(store: Path) -> None:
    ended = flatout("fleet", "--store", store, "--week", NAMED, "--price", "2.5")

    assert (ended.code, ended.err) == (0, "")
    first = next(line for line in ended.out.splitlines() if line.lstrip().startswith("1 "))
    assert "worst.py" in first
    assert "61 jobs" in ended.out
    assert "data.py:77" in ended.out
    assert "$" in ended.out
    assert "61 of 61 jobs were looked into; watching took" in ended.out


def test_all_forms_say_the_same(store: Path, tmp_path: Path) -> None:
    paths = {name: tmp_path / name for name in ("json", "html", "markdown", "prometheus")}
    options = [text for name, path in paths.items() for text in (f"--{name}", path)]

    assert flatout("fleet", "--store", store, "--week", NAMED, *options).code == 0

    summary = from_json(paths["json"].read_bytes(), FleetSummary)
    assert summary.jobs[0].name == "worst.py"
    assert "worst.py" in paths["html"].read_text()
    assert "| 1 |" in paths["markdown"].read_text()
    families = {f.name: f for f in text_string_to_metric_families(paths["prometheus"].read_text())}
    jobs = {s.labels["outcome"]: s.value for s in families["flatout_jobs"].samples}
    assert sum(jobs.values()) == summary.num_jobs == 61


def test_json_goes_to_standard_output_and_the_report_aside(store: Path) -> None:
    ended = flatout("fleet", "--store", store, "--week", NAMED, "--json", "-")

    assert json.loads(ended.out)["num_jobs"] == 61
    assert "worst.py" in ended.err


def test_one_job_is_shown_with_its_edit(store: Path) -> None:
    ended = flatout("fleet", "show", WORST.job, "--store", store, "--days", "3000")

    assert ended.code == 0, ended.err
    for text in ("worst.py", "data.py:77", "prepare it once", "input.slow-item", "8 x NVIDIA H200"):
        assert text in ended.out
    some = flatout("fleet", "show", "job", "--store", store, "--days", "3000")
    assert (some.code, "61 jobs have an id that begins with 'job'" in some.err) == (2, True)
    assert "no job of this time" in flatout("fleet", "show", "zzz", "--store", store, "--days", "3000").err


def test_a_week_is_told_in_markdown(store: Path, tmp_path: Path) -> None:
    printed = flatout("fleet", "digest", "--week", NAMED, "--store", store)
    written = flatout("fleet", "digest", "--week", NAMED, "--store", store, "--out", tmp_path / "week.md")

    assert printed.code == written.code == 0
    assert (tmp_path / "week.md").read_text() == printed.out
    assert f"The fleet in {NAMED}" in printed.out
    assert printed.out.index("worst.py") < printed.out.index("train")
    assert "What to mend first" in printed.out


def test_jobs_can_be_selected(store: Path) -> None:
    ended = flatout("fleet", "--store", store, "--week", NAMED, "--where", "name=worst.py", "--where", "team=vision")

    assert "1 job," in ended.out
    assert "No job ran in this time" in flatout("fleet", "--store", store, "--where", "team=nobody").out


def test_tidying_gathers_and_removes(tmp_path: Path) -> None:
    store = open_store(tmp_path / "fleet")
    for record in (job(1, began_s=NOW_S - 3 * WEEK_S), job(2, began_s=datetime.now(UTC).timestamp() - 7200.0)):
        store.write(record)

    assert flatout("fleet", "tidy", "--store", tmp_path / "fleet").out == "2 rows gathered, 0 removed\n"
    (tmp_path / "fleet" / "fleet.toml").write_text("[retention]\ndays = 1\n")
    assert flatout("fleet", "tidy", "--store", tmp_path / "fleet").out == "0 rows gathered, 1 removed\n"
    assert [r.job for r in store.read().jobs] == [job(2).job]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("fleet", "--store", "nowhere"), "there is no store 'nowhere'"),
        (("fleet", "--days", "0"), "--days 0 must be above 0"),
        (("fleet", "--days", "-3"), "--days -3 must be"),
        (("fleet", "--week", "47"), "the week '47' is none; give one like 2026-W47"),
        (("fleet", "--top", "0"), "--top 0 must be at least 1"),
        (("fleet", "--price", "-1"), "--price -1.0 must be at least 0"),
        (("fleet", "--where", "colour=red"), "give FIELD=VALUE with one of team"),
        (("fleet", "--where", "team"), "--where team: give FIELD=VALUE"),
        (("fleet", "tidy", "--store", "nowhere"), "there is no store 'nowhere'"),
        (("fleet", "digest", "--week", "soon", "--store", "nowhere"), "the week 'soon' is none"),
        (("fleet", "serve", "--store", "nowhere"), "there is no store 'nowhere'"),
        (("fleet", "--html", "no/such/folder.html"), "no folder"),
        (("watch", "--store", "file", "train.py"), "the store 'file' is a file"),
    ],
)
def test_bad_input_gets_one_line_that_says_what_to_do(
    tmp_path: Path, arguments: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    (tmp_path / "file").write_text("")

    ended = flatout(*arguments, folder=tmp_path)

    assert ended.code == 2
    assert message in ended.err
    assert ended.err.count("\n") == 1
    assert "Traceback" not in ended.err


def test_the_store_of_the_environment_is_the_usual_one(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLATOUT_STORE", str(store))

    assert "61 jobs" in flatout("fleet", "--week", NAMED).out


@pytest.mark.parametrize(
    ("now", "week"), [("2026-11-28", "2026-W47"), ("2026-01-01", "2025-W52"), ("2027-01-04", "2026-W53")]
)
def test_the_last_week_is_the_last_whole_one_of_the_iso_calendar(now: str, week: str) -> None:
    assert last_week(now=datetime.fromisoformat(now).replace(tzinfo=UTC)) == week
    assert week_of(week).until_s <= datetime.fromisoformat(now).replace(tzinfo=UTC).timestamp()
