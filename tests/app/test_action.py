"""The GitHub Action: its steps run as they stand in action.yml, on repositories made for it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml
from tests.command_line import QUICK
from tests.evidence_builder import EvidenceBuilder
from tests.run_action import ACTION, ActionError, ActionRun, Expression, read_outputs, run_action

from flatout.check.diagnosis import diagnose
from flatout.report.json_report import json_report

pytestmark = pytest.mark.slow

ACTION_TEXT = yaml.safe_load(ACTION.read_text(encoding="utf-8"))
STEPS = ACTION_TEXT["runs"]["steps"]
SOURCE = str(ACTION.parent / "src")

TRAIN = """\
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 128))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for step in range(20_000):
    x = torch.randn(64, 128)
    loss = (model(x) - x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
NEEDLESS = "    before = model(x.repeat(60, 1)).detach()\n"
SLOW = TRAIN.replace("    optimizer.zero_grad()\n", f"{NEEDLESS}    optimizer.zero_grad()\n")


class Repository:
    """A git repository with a few files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self.git("init", "--quiet", "--initial-branch", "main")

    def git(self, *arguments: str) -> str:
        identity = ("-c", "user.name=Ada", "-c", "user.email=ada@example.org", "-c", "protocol.file.allow=always")
        done = subprocess.run(
            ["git", *identity, *arguments],
            cwd=self.folder,
            env={**os.environ, "GIT_CONFIG_GLOBAL": os.devnull},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        return done.stdout.strip()

    def commit(self, message: str, **files: str) -> str:
        """Write the files, whose names end in .py, and commit them; the commit's id."""
        for name, text in files.items():
            (self.folder / f"{name}.py").write_text(text)
        self.git("add", "--all")
        self.git("commit", "--quiet", "--allow-empty", "--message", message)
        return self.git("rev-parse", "HEAD")


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path / "repository")


@pytest.fixture
def temporary(tmp_path: Path) -> Path:
    folder = tmp_path / "runner"
    folder.mkdir()
    return folder


# -------------------------------------------------------------------------------------------------------------- the text


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step["name"])
def test_a_step_reads_its_inputs_from_its_environment(step: dict[str, str]) -> None:
    assert "${{" not in step["run"]
    assert step["shell"] == "bash"
    used = set(re.findall(r"\bFLATOUT_[A-Z]+\b", step["run"]))
    assert used == {name for name in step.get("env", {}) if name.startswith("FLATOUT_")}
    checked = subprocess.run(["bash", "-n"], input=step["run"], text=True, capture_output=True, check=False)
    assert checked.returncode == 0, checked.stderr


def test_what_the_action_names_is_there() -> None:
    text = ACTION.read_text(encoding="utf-8")
    ids = {step["id"] for step in STEPS if "id" in step}
    assert set(re.findall(r"\binputs\.([\w-]+)", text)) == set(ACTION_TEXT["inputs"])
    assert {name for name, _ in re.findall(r"\bsteps\.([\w-]+)\.outputs\.([\w-]+)", text)} <= ids
    for name, output in re.findall(r"\bsteps\.([\w-]+)\.outputs\.([\w-]+)", text):
        [step] = [step for step in STEPS if step.get("id") == name]
        assert f"{output}=" in step["run"], f"step {name} writes no {output}"
    assert all(one["description"] for one in (*ACTION_TEXT["inputs"].values(), *ACTION_TEXT["outputs"].values()))


def test_the_page_has_every_input_and_output() -> None:
    page = (ACTION.parent / "docs" / "how-to" / "run-in-ci.md").read_text(encoding="utf-8")
    for name in (*ACTION_TEXT["inputs"], *ACTION_TEXT["outputs"]):
        assert re.search(rf"^\|[^|]*`{name}`", page, re.MULTILINE), f"{name} is in no table of the page"


# ------------------------------------------------------------------------------------------------------------ the runner


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("inputs.a-b", "yes"),
        ("inputs.none || steps.s.outputs.x", "3"),
        ("inputs.a-b == 'YES'", "true"),
        ("inputs.a-b != 'yes'", ""),
        ("inputs.a-b == 'no' || steps.s.outputs.x == '3' && !inputs.none", "true"),
        ("(inputs.a-b == 'no' || 'it''s') && inputs.none", ""),
        ("always()", "true"),
        ("success()", ""),
    ],
)
def test_expressions_come_to_what_github_makes_of_them(text: str, value: str) -> None:
    context = {"inputs.a-b": "yes", "steps.s.outputs.x": "3"}

    assert Expression(text, context, is_success=False).value() == value


@pytest.mark.parametrize(
    "text", ["fromJSON('x')", "secrets.token", "inputs.a ==", "(inputs.a", "inputs.a inputs.b", "1 + 1"]
)
def test_an_expression_that_the_runner_does_not_know_is_refused(text: str) -> None:
    with pytest.raises(ActionError):
        Expression(text, {}, is_success=True).value()


def test_outputs_are_read_on_one_line_and_on_several() -> None:
    assert read_outputs("a=1=2\nb<<END\nx\ny=3\nEND\nc=\n") == {"a": "1=2", "b": "x\ny=3", "c": ""}


@pytest.mark.parametrize(
    ("step", "words"),
    [
        ({"shell": "bash", "run": "echo ${{ inputs.x }}"}, "put it into `env`"),
        ({"shell": "python", "run": "pass"}, "shell: bash"),
        ({"shell": "bash", "run": "true", "continue-on-error": True}, "continue-on-error"),
    ],
)
def test_a_step_that_would_run_otherwise_on_github_is_refused(
    tmp_path: Path, step: dict[str, object], words: str
) -> None:
    action = tmp_path / "action.yml"
    action.write_text(yaml.safe_dump({"runs": {"using": "composite", "steps": [{"name": "one", **step}]}}))

    with pytest.raises(ActionError, match=words):
        run_action({}, workspace=tmp_path, environment={"RUNNER_TEMP": str(tmp_path)}, action=action)


def test_after_a_step_that_failed_only_those_that_always_run_do(tmp_path: Path) -> None:
    steps = [
        {"name": "fails", "shell": "bash", "run": "false; echo on"},
        {"name": "waits for success", "shell": "bash", "run": "true"},
        {"name": "always", "if": "always()", "shell": "bash", "run": "true"},
    ]
    action = tmp_path / "action.yml"
    action.write_text(yaml.safe_dump({"runs": {"using": "composite", "steps": steps}}))

    ran = run_action({}, workspace=tmp_path, environment={"RUNNER_TEMP": str(tmp_path)}, action=action)

    assert [(step.name, step.code) for step in ran.steps] == [("fails", 1), ("always", 0)]
    assert ran.code == 1 and "on" not in ran.log


# -------------------------------------------------------------------------------------------------------------- the base


def base_of(folder: Path, temporary: Path, *, base: str = "", base_ref: str = "") -> ActionRun:
    """The action with a Python that does nothing, so that it comes no further than to what it compares with."""
    environment = {"RUNNER_TEMP": str(temporary), "GITHUB_BASE_REF": base_ref}
    inputs = {"script": "train.py", "base": base, "python": "/bin/true"}
    return run_action(inputs, workspace=folder, environment=environment)


def clone(repository: Repository, folder: Path, *options: str) -> None:
    repository.git("clone", "--quiet", *options, f"file://{repository.folder}", str(folder))


def test_a_push_is_compared_with_the_commit_before(repository: Repository, temporary: Path) -> None:
    first = repository.commit("one", train="")
    repository.commit("two")

    assert base_of(repository.folder, temporary).outputs["base"] == first
    assert repository.git("worktree", "list").count("\n") == 0, "the base is removed"


def test_a_pull_request_is_compared_with_what_it_is_merged_into(
    repository: Repository, temporary: Path, tmp_path: Path
) -> None:
    repository.commit("one", train="")
    repository.git("checkout", "--quiet", "-b", "change")
    repository.commit("a change", other="")
    repository.git("checkout", "--quiet", "main")
    main = repository.commit("meanwhile", third="")
    repository.git("checkout", "--quiet", "-b", "merge")
    repository.git("merge", "--quiet", "--no-ff", "change")
    clone(repository, tmp_path / "shallow", "--depth", "1", "--branch", "merge")

    assert base_of(tmp_path / "shallow", temporary, base_ref="main").outputs["base"] == main


def test_a_checkout_of_the_branch_itself_is_compared_with_where_it_left(
    repository: Repository, temporary: Path, tmp_path: Path
) -> None:
    first = repository.commit("one", train="")
    repository.git("checkout", "--quiet", "-b", "change")
    repository.commit("a change", other="")
    repository.commit("more of it", other="1")
    repository.git("checkout", "--quiet", "main")
    repository.commit("meanwhile", third="")
    clone(repository, tmp_path / "branch", "--branch", "change")

    assert base_of(tmp_path / "branch", temporary, base_ref="main").outputs["base"] == first


def test_a_base_that_the_checkout_lacks_is_fetched(repository: Repository, temporary: Path, tmp_path: Path) -> None:
    repository.commit("one", train="")
    repository.git("checkout", "--quiet", "-b", "release")
    release = repository.commit("released", other="")
    repository.git("checkout", "--quiet", "main")
    repository.commit("two")
    clone(repository, tmp_path / "shallow", "--depth", "1", "--branch", "main")

    assert base_of(tmp_path / "shallow", temporary, base="release").outputs["base"] == release


def test_a_first_commit_has_nothing_to_be_compared_with(repository: Repository, temporary: Path) -> None:
    repository.commit("one", train="")

    ran = base_of(repository.folder, temporary)

    assert ran.code == 2
    assert "give the input base" in ran.log


# -------------------------------------------------------------------------------------------- what is run, and what is red


RECORDED = """\
#!{python}
import json, os, shutil, sys
from pathlib import Path

folder, arguments = Path({folder!r}), sys.argv[1:]
if arguments[:4] != ["-P", "-m", "flatout", "check"]:
    os.execv({python!r}, [{python!r}, *arguments])
with open(folder / "calls.jsonl", "a+") as calls:
    calls.write(json.dumps([os.getcwd(), *arguments[4:]]) + "\\n")
    calls.seek(0)
    number = len(calls.readlines())
shutil.copy(folder / f"run{{number}}.json", arguments[arguments.index("--json") + 1])
"""
"""A Python that runs everything but `flatout check`, whose results were recorded: those of the first call, of the second, ..."""


class Recorded:
    """The action on a repository, with step times in place of runs."""

    def __init__(self, folder: Path, repository: Repository) -> None:
        self.folder = folder
        self.repository = repository
        self.python = folder / "python"
        self.python.write_text(RECORDED.format(python=sys.executable, folder=str(folder)))
        self.python.chmod(0o755)

    def run(
        self, *step_s: float, inputs: Mapping[str, str] | None = None, environment: Mapping[str, str] | None = None
    ) -> ActionRun:
        for number, seconds in enumerate(step_s, start=1):
            evidence = EvidenceBuilder(step_s=seconds, noise_s=0.01 * seconds).build()
            (self.folder / f"run{number}.json").write_bytes(json_report(evidence, diagnose(evidence, ())))
        return run_action(
            {"script": "train.py", "python": str(self.python), **(inputs or {})},
            workspace=self.repository.folder,
            environment={"RUNNER_TEMP": str(self.folder), "PYTHONPATH": SOURCE, **(environment or {})},
        )

    @property
    def calls(self) -> list[list[str]]:
        """The folder and the arguments of each `flatout check`."""
        return [json.loads(line) for line in (self.folder / "calls.jsonl").read_text().splitlines()]


@pytest.fixture
def recorded(temporary: Path, repository: Repository) -> Recorded:
    repository.commit("one", train="1")
    repository.commit("two", train="2")
    return Recorded(temporary, repository)


def test_what_is_slower_twice_is_red(recorded: Recorded) -> None:
    ran = recorded.run(0.1, 0.2, 0.21, 0.1)

    assert ran.code == 1 and ran.steps[-1].name == "Decide"
    assert ran.outputs["result"] == "slower"
    assert float(ran.outputs["ratio"]) == pytest.approx(2.1)
    assert "::error title=flatout%3A 2.10x slower" in ran.log
    assert "2.10x slower" in ran.summary
    assert Path(ran.outputs["markdown"]).read_text() == ran.summary
    assert ElementTree.parse(ran.outputs["junit"]).find(".//testcase[@name='step']/failure") is not None
    assert json.loads(Path(ran.outputs["json"]).read_text())["decision"]["outcome"] == "slower"


def test_what_is_slower_once_is_green(recorded: Recorded) -> None:
    ran = recorded.run(0.1, 0.2, 0.1, 0.1)

    assert ran.code == 0
    assert len(recorded.calls) == 4
    assert ran.outputs["result"] == "not slower"
    assert "::error" not in ran.log


def test_what_is_not_slower_is_checked_once(recorded: Recorded) -> None:
    ran = recorded.run(0.1, 0.1)

    assert ran.code == 0
    before, after = recorded.calls
    assert before[0].endswith("/base") and after[0] == str(recorded.repository.folder)
    assert ran.outputs["ratio"] == "1.0000"


def test_a_limit_is_the_callers(recorded: Recorded) -> None:
    assert recorded.run(0.1, 0.2, inputs={"fail-if-slower": "150%"}).outputs["result"] == "not slower"


def test_inputs_are_never_run_as_text_of_a_shell(recorded: Recorded, tmp_path: Path) -> None:
    bad = f"$(touch {tmp_path}/run) `touch {tmp_path}/run`; touch {tmp_path}/run"

    ran = recorded.run(
        0.1,
        0.1,
        inputs={"script": f"train.py {bad}", "arguments": f"--name 'two words' \"$HOME\" ';' {bad}"},
    )

    assert ran.code == 0, ran.log
    [before, _] = recorded.calls
    at = before.index("--")
    assert before[at - 1] == f"train.py {bad}"
    assert before[at + 1 : at + 5] == ["--name", "two words", "$HOME", ";"]
    assert not (tmp_path / "run").exists()


def test_arguments_with_an_open_quote_are_red_before_anything_runs(recorded: Recorded) -> None:
    ran = recorded.run(inputs={"arguments": "--name 'open"})

    assert ran.code != 0
    assert "No closing quotation" in ran.log
    assert not (recorded.folder / "calls.jsonl").exists()


def test_a_folder_is_that_of_either_version(recorded: Recorded) -> None:
    folder = recorded.repository.folder / "projects" / "one"
    folder.mkdir(parents=True)
    (folder / "train.py").write_text("")
    recorded.repository.commit("three")
    recorded.repository.commit("four")

    ran = recorded.run(0.1, 0.1, inputs={"folder": "projects/one"})

    assert ran.code == 0, ran.log
    before, after = recorded.calls
    assert before[0].endswith("/base/projects/one") and after[0] == str(folder)


def test_each_version_is_prepared_once(recorded: Recorded) -> None:
    ran = recorded.run(
        0.1,
        0.2,
        0.2,
        0.1,
        inputs={"prepare": f"cat train.py >> {recorded.folder}/prepared; echo >> {recorded.folder}/prepared"},
    )

    assert ran.code == 1
    assert (recorded.folder / "prepared").read_text().split() == ["1", "2"]


def test_a_script_that_the_base_lacks_is_new_and_green(recorded: Recorded) -> None:
    recorded.repository.commit("three", other="3")

    ran = recorded.run(inputs={"script": "other.py"})

    assert ran.code == 0, ran.log
    assert ran.outputs["result"] == "new"
    assert "no such script" in ran.summary


def test_neither_script_nor_module_is_an_error(recorded: Recorded) -> None:
    ran = recorded.run(inputs={"script": ""})

    assert ran.code == 2
    assert "give the input script, or module" in ran.log


def test_a_module_is_run_as_one(recorded: Recorded) -> None:
    recorded.run(0.1, 0.1, inputs={"script": "", "module": "package.train", "arguments": "--lr 0.1"})

    [call, _] = recorded.calls
    assert call[-5:] == ["-m", "package.train", "--", "--lr", "0.1"]


PIP = """\
#!/bin/sh
case "$*" in *"import flatout"*) exit 1;; esac
printf '%s\\n' "$@" > {log}
exit 3
"""
"""A Python that has no flatout, and can install none."""


def test_a_python_without_flatout_gets_that_of_the_action(repository: Repository, tmp_path: Path) -> None:
    repository.commit("one", train="")
    python, log = tmp_path / "python", tmp_path / "pip.log"
    python.write_text(PIP.format(log=log))
    python.chmod(0o755)

    ran = run_action(
        {"script": "train.py", "python": str(python)},
        workspace=repository.folder,
        environment={"RUNNER_TEMP": str(tmp_path)},
    )

    assert [(step.name, step.code) for step in ran.steps] == [("Install flatout", 3), ("Remove the base", 0)]
    assert log.read_text().splitlines() == ["-m", "pip", "install", "--quiet", str(ACTION.parent)]


# ----------------------------------------------------------------------------------------------------------- the comment


GH = """\
#!/bin/sh
printf '%s\\n' "$*" >> {log}
case "$*" in *--paginate*) printf '%s' "$FAKE_IDS"; exit "${{FAKE_CODE:-0}}";; esac
"""
"""A `gh` that notes how it was called, and has these comments."""


@pytest.fixture
def comment(recorded: Recorded, tmp_path: Path) -> Iterator[Callable[..., tuple[ActionRun, list[str]]]]:
    """Runs the action with `comment` on a pull request where there are comments of these ids."""
    programs, log = tmp_path / "programs", tmp_path / "gh.log"
    programs.mkdir()
    (programs / "gh").write_text(GH.format(log=log))
    (programs / "gh").chmod(0o755)

    def run(*, ids: str = "", code: int = 0, ref: str = "refs/pull/12/merge") -> tuple[ActionRun, list[str]]:
        environment = {
            "PATH": f"{programs}:{os.environ['PATH']}",
            "GITHUB_REF": ref,
            "GITHUB_REPOSITORY": "ada/gpt",
            "FAKE_IDS": ids,
            "FAKE_CODE": str(code),
        }
        ran = recorded.run(0.1, 0.1, inputs={"comment": "true"}, environment=environment)
        return ran, log.read_text().splitlines() if log.exists() else []

    yield run


def test_a_first_comment_is_written(comment: Callable[..., tuple[ActionRun, list[str]]]) -> None:
    ran, calls = comment()

    assert ran.code == 0
    assert calls[-1] == (
        f"api --silent --method POST repos/ada/gpt/issues/12/comments -F body=@{ran.outputs['markdown']}"
    )
    assert ran.summary.startswith("<!-- flatout ")


def test_a_later_run_changes_its_comment(comment: Callable[..., tuple[ActionRun, list[str]]]) -> None:
    _, calls = comment(ids="345\n678\n")

    assert calls[-1].startswith("api --silent --method PATCH repos/ada/gpt/issues/comments/345 -F body=@")


def test_a_token_that_may_not_write_is_a_warning(comment: Callable[..., tuple[ActionRun, list[str]]]) -> None:
    ran, _ = comment(code=1)

    assert ran.code == 0
    assert "::warning title=flatout::the comment could not be written" in ran.log


def test_a_push_has_nothing_to_comment_on(comment: Callable[..., tuple[ActionRun, list[str]]]) -> None:
    ran, calls = comment(ref="refs/heads/main")

    assert ran.code == 0 and calls == []


# ------------------------------------------------------------------------------------------------------------- real runs


def checked(repository: Repository, temporary: Path, cache_home: Path, **inputs: str) -> ActionRun:
    environment = {**QUICK, "RUNNER_TEMP": str(temporary), "PYTHONPATH": SOURCE, "XDG_CACHE_HOME": str(cache_home)}
    wanted = {"script": "train.py", "python": sys.executable, "seconds": "1", "fail-if-slower": "50%", **inputs}
    return run_action(wanted, workspace=repository.folder, environment=environment)


@pytest.mark.timeout(400)
@pytest.mark.long
def test_a_needless_forward_is_red_and_its_line_is_named(
    repository: Repository, temporary: Path, cache_home: Path
) -> None:
    repository.commit("one", train=TRAIN)
    repository.commit("two", train=SLOW)

    ran = checked(repository, temporary, cache_home)

    assert ran.code == 1, ran.log
    assert ran.outputs["result"] == "slower"
    number = SLOW.splitlines().index(NEEDLESS.rstrip("\n")) + 1
    assert f"::error file=train.py,line={number},title=flatout%3A new%2C" in ran.log
    assert f"<code>train.py:{number}</code>" in ran.summary
    failure = ElementTree.parse(ran.outputs["junit"]).find(".//testcase[@name='step']/failure")
    assert failure is not None and f"train.py:{number}" in (failure.text or "")


@pytest.mark.timeout(400)
@pytest.mark.long
def test_an_unchanged_script_is_green_and_proved_equal(
    repository: Repository, temporary: Path, cache_home: Path
) -> None:
    repository.commit("one", train=TRAIN)
    repository.commit("a word in a text", README="# a word\n")

    ran = checked(repository, temporary, cache_home, **{"prove-equal": "true"})

    assert ran.code == 0, ran.log
    assert ran.outputs["result"] in ("not slower", "cannot tell")
    assert "::error" not in ran.log
    assert "PROVED: equal" in ran.summary
    [verdict] = temporary.glob("flatout.*/verdict.xml")
    cases = {
        case.get("name"): [element.tag for element in case] for case in ElementTree.parse(verdict).iter("testcase")
    }
    assert cases == {"equality": ["system-out"], "speed": ["skipped"]}
