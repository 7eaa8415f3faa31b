from __future__ import annotations

from pathlib import Path

import pytest
from tests.fleet_jobs import finding, job

from flatout.blocks.recording.job_store.opening import policy_of
from flatout.blocks.recording.job_store.policy import FleetPolicy, Redact, redacted, without_folders
from flatout.core.errors import UsageError

RECORD = job(
    command="train.py --data /scratch/ada/secret-project/set.bin --lr 0.1",
    error="FileNotFoundError: [Errno 2] No such file or directory: '/home/ada/data/x.bin'",
    user="ada",
    findings=(
        finding((1.1, 1.2), file="/home/ada/code/train.py", because="open('/home/ada/x') 3 times", edit="x = 1"),
    ),
)


def test_without_a_policy_nothing_but_credentials_is_left_out() -> None:
    assert redacted(RECORD, Redact()) == RECORD
    secret = job(error="RuntimeError: 401 for https://me:hunter2@host/x with WANDB_API_KEY=abcdef")

    shown = redacted(secret, Redact()).error

    assert "hunter2" not in shown
    assert "abcdef" not in shown
    assert "401" in shown


def test_arguments_are_left_out_and_the_script_stays() -> None:
    shown = redacted(RECORD, Redact(arguments=True))

    assert shown.command == "train.py <left out>"
    assert redacted(job(command="train.py"), Redact(arguments=True)).command == "train.py"


def test_folders_are_left_out_everywhere_and_names_of_files_stay() -> None:
    shown = redacted(RECORD, Redact(paths=True))

    text = repr(shown)
    assert "ada/" not in text
    assert "scratch" not in text
    assert shown.command == "train.py --data set.bin --lr 0.1"
    assert shown.error.endswith("'x.bin'")
    assert shown.findings[0].file == "train.py"
    assert "open('x')" in shown.findings[0].because


def test_users_code_and_messages_are_left_out() -> None:
    shown = redacted(RECORD, Redact(users=True, code=True, errors=True))

    assert shown.user == ""
    assert shown.team == RECORD.team
    assert shown.findings[0].edit == shown.findings[0].because == "<left out>"
    assert (shown.findings[0].line, shown.findings[0].title) == (12, RECORD.findings[0].title)
    assert shown.error == "FileNotFoundError"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a/b.py", "a/b.py"),
        ("~/x/y.txt", "y.txt"),
        ("../data/y.txt", "y.txt"),
        ("--out=/a/b/c", "--out=c"),
        ("1/2 of 3 items/s", "1/2 of 3 items/s"),
        ("C:\\Users\\ada\\x.py", "x.py"),
    ],
)
def test_paths_lose_their_folders_and_fractions_stay(text: str, shown: str) -> None:
    assert without_folders(text) == shown


def test_a_policy_is_read_beside_an_sqlite_file_and_in_a_folder(tmp_path: Path) -> None:
    (tmp_path / "fleet.toml").write_text('[prices]\ngpu_hour = 2.5\n[teams]\nvision = ["ada", "bob"]\n')

    for path in (tmp_path, tmp_path / "jobs.sqlite"):
        policy = policy_of(path)
        assert policy.prices.gpu_hour == 2.5
        assert policy.team_of("bob") == "vision"
        assert policy.team_of("eve") == ""
    assert policy_of(tmp_path / "elsewhere") == FleetPolicy()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[watch]\ncost_fraction = 2.0\n", "cost_fraction = 2.0 must be above 0"),
        ("[watch]\nheartbeat_s = 0\n", "heartbeat_s"),
        ("[retention]\ndays = -1\n", "retention.days"),
        ("[redact]\nargument = true\n", "unknown field `argument`"),
        ("[prices\n", "fleet.toml"),
        ("[prices]\ngpu_hour = 'much'\n", "gpu_hour"),
    ],
)
def test_a_wrong_policy_is_refused_by_name(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "fleet.toml").write_text(text)

    with pytest.raises(UsageError, match=r"fleet\.toml") as caught:
        policy_of(tmp_path)
    assert message in str(caught.value)
