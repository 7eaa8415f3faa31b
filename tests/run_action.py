"""Runs the steps of action.yml on this machine, as GitHub's runner does: `python tests/run_action.py --input script=train.py`.

It takes what a composite action of plain `run` steps needs and refuses all else: `if`, `env`, `shell: bash`, outputs, the job's
summary, and expressions of contexts, strings, `==`, `!=`, `!`, `&&`, `||` and `always()`. A step's text is never a template: an
expression in it is refused, since what it stands for would be run.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

ROOT = Path(__file__).resolve().parent.parent
ACTION = ROOT / "action.yml"

_EXPRESSION = re.compile(r"\$\{\{(.*?)\}\}", re.DOTALL)
_TOKEN = re.compile(r"\s*(?:(?P<text>'(?:[^']|'')*')|(?P<name>[A-Za-z_][\w.-]*)|(?P<sign>==|!=|&&|\|\||!|\(|\)))")
_STEP_KEYS = {"name", "id", "if", "shell", "env", "run"}


class ActionError(Exception):
    """What action.yml or a caller of it has wrong."""


class StepRun(NamedTuple):
    """A step that ran, its exit code, and all that it printed."""

    name: str
    code: int
    log: str


class ActionRun(NamedTuple):
    """What an action did: it fails where a step did. `summary` is the Markdown of the job."""

    steps: tuple[StepRun, ...]
    outputs: dict[str, str]
    summary: str

    @property
    def code(self) -> int:
        """The exit code of the first step that failed; 0 where none did."""
        return next((step.code for step in self.steps if step.code), 0)

    @property
    def log(self) -> str:
        """Everything that the steps printed."""
        return "".join(step.log for step in self.steps)


class Expression:
    """Reads one expression of GitHub Actions in a context of dotted names."""

    def __init__(self, text: str, context: Mapping[str, str], *, is_success: bool) -> None:
        self._context = {"always()": "true", "success()": "true" if is_success else "", **context}
        self._tokens: list[str] = []
        at = 0
        while text[at:].strip():
            found = _TOKEN.match(text, at)
            if found is None:
                raise ActionError(f"'{text.strip()}' is no expression that this runner knows")
            self._tokens.append(found[0].strip())
            at = found.end()

    def value(self) -> str:
        """What it comes to: text, '' for what is false or not there."""
        result = self._either()
        if self._tokens:
            raise ActionError(f"'{self._tokens[0]}' is too much in an expression")
        return result

    def _either(self) -> str:
        result = self._both()
        while self._next("||"):
            other = self._both()
            result = result or other
        return result

    def _both(self) -> str:
        result = self._equal()
        while self._next("&&"):
            other = self._equal()
            result = other if result else result
        return result

    def _equal(self) -> str:
        result = self._one()
        for sign in ("==", "!="):
            if self._next(sign):
                is_same = result.lower() == self._one().lower()  # GitHub ignores the case of strings
                return "true" if is_same == (sign == "==") else ""
        return result

    def _one(self) -> str:
        if self._next("!"):
            return "" if self._one() else "true"
        if self._next("("):
            result = self._either()
            if not self._next(")"):
                raise ActionError("a bracket of an expression is not closed")
            return result
        if not self._tokens:
            raise ActionError("an expression ends too soon")
        token = self._tokens.pop(0)
        if token.startswith("'"):
            return token[1:-1].replace("''", "'")
        if self._next("("):
            token += "()"
            if not self._next(")") or token not in self._context:
                raise ActionError(f"'{token}' is no function that this runner knows")
        elif token.partition(".")[0] not in ("inputs", "steps", "github"):
            raise ActionError(f"'{token}' is in no context that this runner knows")
        return self._context.get(token, "")

    def _next(self, sign: str) -> bool:
        if self._tokens[:1] != [sign]:
            return False
        del self._tokens[0]
        return True


def run_action(
    inputs: Mapping[str, str],
    *,
    workspace: Path,
    environment: Mapping[str, str] | None = None,
    action: Path = ACTION,
    is_shown: bool = False,
) -> ActionRun:
    """Run the steps of an action in the checkout at `workspace`; `is_shown` prints what they print as they do.

    `environment` is added to that of this process. Files that the outputs name lie in its RUNNER_TEMP, or in a new folder that
    stays.

    Raises ActionError where action.yml has something that this runner does not know, or an input is not one of its.
    """
    described = yaml.safe_load(action.read_text(encoding="utf-8"))
    context = {f"inputs.{name}": value for name, value in _inputs(described, inputs).items()}
    own_environment = dict(environment or {})
    done: list[StepRun] = []
    with tempfile.TemporaryDirectory(prefix="action-") as temporary:
        folder = Path(temporary)
        summary = folder / "summary.md"
        summary.touch()
        base = {
            **os.environ,
            "GITHUB_ACTIONS": "true",
            "GITHUB_BASE_REF": "",
            "GITHUB_REF": "refs/heads/main",
            "RUNNER_TEMP": own_environment.get("RUNNER_TEMP") or tempfile.mkdtemp(prefix="runner-"),
            **own_environment,
            "GITHUB_ACTION_PATH": str(action.parent),
            "GITHUB_WORKSPACE": str(workspace),
            "GITHUB_STEP_SUMMARY": str(summary),
        }
        for number, step in enumerate(_steps(described)):
            is_success = not any(one.code for one in done)
            if not Expression(_condition(step), context, is_success=is_success).value():
                continue
            own = {name: _filled(str(value), context) for name, value in step.get("env", {}).items()}
            output = folder / f"output{number}"
            output.touch()
            script = folder / f"step{number}.sh"
            script.write_text(step["run"], encoding="utf-8")
            ran = _run(step["name"], script, workspace, {**base, **own, "GITHUB_OUTPUT": str(output)}, is_shown)
            done.append(ran)
            for name, value in read_outputs(output.read_text(encoding="utf-8")).items():
                context[f"steps.{step.get('id', '')}.outputs.{name}"] = value
        outputs = {name: _filled(one["value"], context) for name, one in described.get("outputs", {}).items()}
        return ActionRun(tuple(done), outputs, summary.read_text(encoding="utf-8"))


def read_outputs(text: str) -> dict[str, str]:
    """The names and values in a file that GITHUB_OUTPUT names: `name=value`, or `name<<END`, lines and END."""
    found: dict[str, str] = {}
    lines = iter(text.splitlines())
    for line in lines:
        name, equals, value = line.partition("=")
        if "<<" in name:
            name, _, end = line.partition("<<")
            several = []
            for one in lines:
                if one == end:
                    break
                several.append(one)
            found[name] = "\n".join(several)
        elif equals:
            found[name] = value
        elif line:
            raise ActionError(f"'{line}' in GITHUB_OUTPUT is no name=value")
    return found


def _inputs(described: Mapping[str, Any], inputs: Mapping[str, str]) -> dict[str, str]:
    known = described.get("inputs", {})
    if unknown := sorted(inputs.keys() - known.keys()):
        raise ActionError(f"the action has no input {', '.join(unknown)}; it has {', '.join(known)}")
    defaults = {name: _filled(str(one.get("default", "")), {}) for name, one in known.items()}
    return {**defaults, **inputs}


def _steps(described: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The steps of a composite action, each checked to be one that can be run here."""
    if described["runs"]["using"] != "composite":
        raise ActionError(f"this runner knows composite actions alone, not '{described['runs']['using']}'")
    steps: list[dict[str, Any]] = described["runs"]["steps"]
    for step in steps:
        name = step.get("name", "a step without a name")
        if more := sorted(step.keys() - _STEP_KEYS):
            raise ActionError(f"'{name}' has {', '.join(more)}, which this runner does not know")
        if step.get("shell") != "bash" or "run" not in step:
            raise ActionError(f"'{name}' is no `run` with `shell: bash`")
        if "${{" in step["run"]:
            raise ActionError(
                f"'{name}' has an expression in its text, where its value would be run; put it into `env`"
            )
    return steps


def _condition(step: Mapping[str, Any]) -> str:
    """When the step runs: what its `if` says, and where that names no state of the job only while nothing has failed."""
    text = str(step.get("if", "success()"))
    if wrapped := _EXPRESSION.fullmatch(text.strip()):
        text = wrapped[1]
    return text if re.search(r"\b(always|success)\(\)", text) else f"success() && ({text})"


def _filled(text: str, context: Mapping[str, str]) -> str:
    return _EXPRESSION.sub(lambda found: Expression(found[1], context, is_success=True).value(), text)


def _run(name: str, script: Path, folder: Path, environment: Mapping[str, str], is_shown: bool) -> StepRun:
    command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", str(script)]
    lines = []
    if is_shown:
        print(f"== {name}", flush=True)
    with subprocess.Popen(
        command,
        cwd=folder,
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if is_shown:
                print(line, end="", flush=True)
    return StepRun(name, process.returncode, "".join(lines))


def main() -> int:
    """Run the action in a folder, print what its steps print, and exit with its code."""
    parser = argparse.ArgumentParser(description="Run the steps of action.yml on this machine.")
    parser.add_argument("--input", action="append", default=[], metavar="NAME=VALUE", help="an input of the action")
    parser.add_argument(
        "--workspace", type=Path, default=Path.cwd(), help="the checkout that is checked; else this folder"
    )
    parser.add_argument("--action", type=Path, default=ACTION, help="the action.yml; else that of this repository")
    options = parser.parse_args()
    pairs = [one.partition("=") for one in options.input]
    if wrong := [name for name, equals, _ in pairs if not equals]:
        parser.error(f"--input {wrong[0]} is no NAME=VALUE")
    try:
        ran = run_action(
            {name: value for name, _, value in pairs},
            workspace=options.workspace.resolve(),
            action=options.action,
            is_shown=True,
        )
    except ActionError as e:
        parser.error(str(e))
    print("== outputs", *(f"{name}={value}" for name, value in ran.outputs.items()), sep="\n")
    print("== summary", ran.summary, sep="\n")
    return ran.code


if __name__ == "__main__":
    sys.exit(main())
