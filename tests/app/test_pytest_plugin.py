"""The pytest plugin in a pytest of its own. The page that explains it is run by docs/run_pages.py."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TESTS = """
import pytest
import torch


@pytest.mark.expect(forward_kernels=1)
def test_kept():
    torch.ones(3)


@pytest.mark.expect(forward_kernels=1)
class TestAll:
    def test_broken(self):
        torch.ones(3).exp()

    @pytest.mark.expect(forward_kernels=2)
    def test_nearer(self):
        torch.ones(3).exp()


@pytest.mark.expect(forward_kernels=0)
def test_own_error():
    torch.ones(3)
    raise ValueError("of its own")


@pytest.mark.expect(forward_kernels=0)
def test_skipped():
    pytest.skip("no time")


@pytest.mark.expect(3)
def test_without_a_name():
    pass


@pytest.mark.expect()
def test_seen():
    torch.ones(3)


def test_fixture(expect):
    x = torch.ones(3)
    with expect(host_waits=0):
        x.sum().item()


@pytest.mark.expect(host_waits=0)
def test_inner_expectation_is_reported_as_it_is(expect):
    with expect(forward_kernels=0):
        torch.ones(3)
"""


def python(*arguments: str, folder: Path) -> tuple[int, str]:
    """Run Python there, with nothing but our plugin; its exit code and its output."""
    ended = subprocess.run(
        [sys.executable, *arguments],
        check=False,
        capture_output=True,
        text=True,
        cwd=folder,
        timeout=100,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "COLUMNS": "116"},
    )
    return ended.returncode, ended.stdout + ended.stderr


def run_pytest(*names: str, folder: Path) -> str:
    """The output of a pytest run of these files, strict about markers and warnings."""
    options = ["-p", "flatout.app.pytest_plugin", "--strict-markers", "-W", "error", "-rA", "-p", "no:cacheprovider"]
    return python("-m", "pytest", *options, *names, folder=folder)[1]


def outcome(output: str, name: str) -> str:
    """'PASSED', 'FAILED', ... of a test."""
    found = re.search(rf"^(\w+) (?:\[1\] )?test_them\.py(?:::|:\d+: ).*?{name}", output, flags=re.MULTILINE)
    return found[1] if found else ""


@pytest.mark.slow
@pytest.mark.long
def test_marked_tests_pass_and_fail_with_their_lines(tmp_path: Path) -> None:
    (tmp_path / "test_them.py").write_text(TESTS, encoding="utf-8")

    output = run_pytest("test_them.py", folder=tmp_path)

    assert outcome(output, "test_kept") == "PASSED"
    assert outcome(output, "test_broken") == "FAILED"
    assert "'test_them.py::TestAll::test_broken' failed an expectation\n  forward_kernels=1: 2 ran" in output
    assert "1 x aten::exp  test_them.py:14: torch.ones(3).exp()" in output
    # the nearer mark goes first
    assert outcome(output, "test_nearer") == "PASSED"
    # so do a test's own failure and skip
    assert "ValueError: of its own" in output
    assert "'test_them.py::test_own_error' broke" not in output
    assert "1 skipped" in output
    # limits need names
    assert outcome(output, "test_without_a_name") == "FAILED"
    assert "limits have names, as in @pytest.mark.expect(host_waits=0)" in output
    # a marker without limits shows what was observed
    assert outcome(output, "test_seen") == "PASSED"
    assert re.search(r"_ test_seen _+\n-+ Captured expect call -+\nforward_kernels   1\n", output)
    # the fixture is for regions inside
    assert "1 x item  test_them.py:45: x.sum().item()" in output
    assert "forward_kernels=0: 1 ran" in output


def test_the_plugin_does_not_import_torch() -> None:
    code = "import sys, flatout.app.pytest_plugin; sys.exit('torch' in sys.modules)"

    assert python("-c", code, folder=ROOT) == (0, "")


def test_pytest_finds_the_plugin_by_its_entry_point() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["entry-points"][
        "pytest11"
    ]

    assert declared == {"flatout": "flatout.app.pytest_plugin"}
    point = importlib.metadata.EntryPoint("flatout", declared["flatout"], "pytest11")
    assert point.load().__name__ == "flatout.app.pytest_plugin"
