from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import flatout
from flatout.core.records.workload import Source
from flatout.core.runtime.source_sites import Loops, Sites


def run_file(path: Path, text: str) -> dict[str, Any]:
    path.write_text(textwrap.dedent(text))
    scope: dict[str, Any] = {"sys": sys}
    exec(compile(path.read_text(), str(path), "exec"), scope)
    return scope


def test_a_frame_is_named_by_its_innermost_user_line(tmp_path: Path) -> None:
    scope = run_file(
        tmp_path / "train.py",
        """
        def inner():
            return sys._getframe()

        def outer():
            return inner()
        """,
    )
    frame: FrameType = scope["outer"]()
    sites = Sites()

    index = sites.of_frame(frame)
    source = sites.table()[index]

    assert (source.file, source.line, source.function) == (str(tmp_path / "train.py"), 3, "inner")
    assert source.text == "return sys._getframe()"


def test_a_library_below_the_user_is_kept_beside_the_users_line(tmp_path: Path) -> None:
    library = tmp_path / "site-packages" / "lib"
    library.mkdir(parents=True)
    inside = run_file(library / "core.py", "def call():\n    return sys._getframe()\n")
    scope = run_file(tmp_path / "train.py", "def step(call):\n    return call()\n")
    frames: list[FrameType] = [scope["step"](inside["call"])]
    sites = Sites()

    index = sites.of_frame(frames[0])
    source = sites.table()[index]

    assert source.line == 2
    assert source.library == "lib/core.py:2"


@pytest.mark.parametrize("name", ["sitecustomize.py", "generated_while_running.py"])
def test_what_nobody_edits_is_no_users_line(tmp_path: Path, name: str) -> None:
    user = run_file(tmp_path / "train.py", "def step(call):\n    return call()\n")
    sites = Sites()
    inside = run_file(tmp_path / name, "def call():\n    return sys._getframe()\n")
    later_s = (tmp_path / name).stat().st_mtime + 1  # clocks of files are coarse
    os.utime(tmp_path / name, (later_s, later_s))

    index = sites.of_frame(user["step"](inside["call"]))

    assert (sites.table()[index].file, sites.table()[index].line) == (str(tmp_path / "train.py"), 2)


def chain_of_libraries(tmp_path: Path, packages: dict[str, str]) -> tuple[Sites, int]:
    """A user's line calls the first file, each calls `below` of the next, and the last gives its own frame away."""
    inner: Any = sys._getframe
    for name in reversed(packages):
        path = tmp_path / "site-packages" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        scope = run_file(path, packages[name])
        scope["below"] = inner
        inner = scope["run"]
    user = run_file(tmp_path / "train.py", "def main(run):\n    return run()\n")
    frame: FrameType = user["main"](inner)
    sites = Sites()
    return sites, sites.of_frame(frame)


TRAINER = """
def run():
    return inner_loop()

def inner_loop():
    return below()
"""
PLAIN = "def run():\n    return below()\n"


def test_the_way_to_a_librarys_line_is_told_outermost_first_one_line_a_file(tmp_path: Path) -> None:
    sites, index = chain_of_libraries(tmp_path, {"lib/trainer.py": TRAINER, "lib/models/bert.py": PLAIN})

    via = sites.table()[index].via

    assert [frame.place for frame in via] == ["lib/trainer.py:6", "lib/models/bert.py:2"]
    assert [frame.package for frame in via] == ["lib", "lib"]
    assert (via[-1].function, via[-1].text) == ("run", "return below()")


def test_a_long_way_is_its_outermost_file_and_the_last_ones(tmp_path: Path) -> None:
    sites, index = chain_of_libraries(tmp_path, {f"lib/f{number}.py": PLAIN for number in range(7)})

    assert [frame.file for frame in sites.table()[index].via] == ["lib/f0.py", "lib/f4.py", "lib/f5.py", "lib/f6.py"]


def test_two_lines_of_a_library_below_one_of_the_users_are_two_sources(tmp_path: Path) -> None:
    library = tmp_path / "site-packages" / "lib"
    library.mkdir(parents=True)
    inside = run_file(
        library / "core.py", "def call(n):\n    if n:\n        return sys._getframe()\n    return sys._getframe()\n"
    )
    scope = run_file(tmp_path / "train.py", "def step(call):\n    return [call(n) for n in (0, 1)]\n")
    sites = Sites()

    first, second = (sites.of_frame(frame) for frame in scope["step"](inside["call"]))

    assert first != second
    assert [s.via[-1].line for s in sites.table()] == [4, 3]
    assert sites.line_of(first) == sites.line_of(second)


def test_no_user_frame_gives_minus_one() -> None:
    assert Sites().of_frame(None) == -1


def test_the_user_root_makes_an_installed_package_the_users(tmp_path: Path) -> None:
    package = tmp_path / "site-packages" / "app"
    package.mkdir(parents=True)
    scope = run_file(package / "main.py", "def here():\n    return sys._getframe()\n")

    assert Sites(user_root=str(package)).is_user_code(scope["here"].__code__)
    assert not Sites().is_user_code(scope["here"].__code__)


def test_an_environment_inside_of_the_users_folder_is_not_theirs(tmp_path: Path) -> None:
    packages = tmp_path / ".venv" / "lib" / "site-packages"
    packages.mkdir(parents=True)
    scope = run_file(packages / "library.py", "def here():\n    return sys._getframe()\n")
    assert not Sites(user_root=str(tmp_path)).is_user_code(scope["here"].__code__)
    above = Path(textwrap.__file__).parents[2]
    assert not Sites(user_root=str(above)).is_user_code(textwrap.dedent.__code__)


LOOPS = textwrap.dedent(
    """
    for epoch in range(3):
        for batch in data:
            step(batch)

    def forward(x):
        y = x
        while y:
            y = [f(z)
                 for z in y]
        return y
    """
)


@pytest.mark.parametrize(
    ("line", "expected"), [(2, (2,)), (4, (2, 3)), (6, ()), (7, ()), (9, (8, 9)), (10, (8, 9)), (11, ())]
)
def test_loops_are_those_of_the_lines_own_function(line: int, expected: tuple[int, ...]) -> None:
    assert Loops(LOOPS).around(line) == expected


@given(st.text(max_size=200))
def test_text_that_is_no_python_has_no_loops(text: str) -> None:
    assert all(Loops(text).around(line) == () for line in range(1, 4)) or "for" in text or "while" in text


def test_lines_are_read_when_they_are_met_and_loops_are_found_when_the_table_is_asked_for(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("for i in range(3):\n    x = i\n")
    sites = Sites()
    index = sites.add(Source(file=str(script), line=2, function="f"))

    script.write_text("pass\npass\n")  # edited while it runs

    source = sites.table()[index]
    assert (source.text, source.loops) == ("x = i", (1,))
    assert sites.table()[index] == source


THROUGH_A_LINK = """
import subprocess
import sys
import torch
from torch.utils._pytree import tree_map
from flatout.core.runtime.source_sites import Sites

sites = Sites()
found = []
sys.setprofile(lambda frame, event, _: found.append(sites.of_frame(frame)) if "torch" in frame.f_code.co_filename else None)
tree_map(lambda x: x, [1])
sys.setprofile(None)
assert found and torch.__file__.startswith(sys.argv[1]), torch.__file__
print(sites.table()[found[0]].library)
"""


@pytest.mark.slow
def test_torch_in_an_environment_behind_a_link_is_still_torch(tmp_path: Path) -> None:
    folder = Path(torch.__file__).parents[1]
    link = tmp_path / "site-packages"
    link.symlink_to(folder)
    script = tmp_path / "train.py"
    script.write_text(THROUGH_A_LINK)
    search_path = os.pathsep.join([str(link), str(Path(flatout.__file__).parents[1])])
    done = subprocess.run(
        [sys.executable, script, link],
        env={**os.environ, "PYTHONPATH": search_path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "\n"), done.stderr
