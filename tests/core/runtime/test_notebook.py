"""Notebooks as Python: which lines are left out, how cells are numbered, and how they run as a script."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flatout.core.errors import ScriptError
from flatout.core.runtime.notebook import lines_of_cell, read_notebook
from flatout.core.runtime.script import load_script, run_script


def written(folder: Path, *cells: str, **changes: Any) -> Path:
    """A notebook with these code cells and one of text, as Jupyter writes it."""
    stored = [{"cell_type": "code", "source": text.splitlines(True), "outputs": [], "metadata": {}} for text in cells]
    notebook = {
        "nbformat": 4,
        "nbformat_minor": 5,
        "metadata": {"kernelspec": {"name": "python3", "language": "python", "display_name": "Python 3"}},
        "cells": [{"cell_type": "markdown", "source": ["# x = (\n"], "metadata": {}}, *stored],
        **changes,
    }
    path = folder / "train.ipynb"
    path.write_text(json.dumps(notebook))
    return path


def test_cells_are_numbered_as_jupyter_counts_them_when_all_are_run(tmp_path: Path) -> None:
    cells = read_notebook(written(tmp_path, "a = 1", "", "  \n", "b = 2\n", "%%bash\nls", "c = 3"))

    assert [(cell.number, cell.text) for cell in cells] == [(1, "a = 1"), (2, "b = 2\n"), (3, ""), (4, "c = 3")]
    assert cells[2].left_out == ("cell 3 is no Python and was left out: %%bash",)


@pytest.mark.parametrize(
    ("text", "python"),
    [
        ("%matplotlib inline\nx = 1", "pass\nx = 1"),
        ("!pip install torch \\\n  numpy\nx = 1", "pass\n\nx = 1"),
        ("if True:\n    !ls\nx = 1", "if True:\n    pass\nx = 1"),
        ("files = !ls", "pass"),
        ("here = %pwd", "pass"),
        ("torch.nn?", "pass"),
        ("?torch", "pass"),
        ("x??", "pass"),
        ("get_ipython().run_line_magic('matplotlib', 'inline')", "pass"),
        ("%%time\nx = 1", "\nx = 1"),
        ("%%capture out\nx = 1", "\nx = 1"),
        ("%%flatout --steps 30\nx = 1", "\nx = 1"),
        ("for i in x:\n    %time train(i)", "for i in x:\n    train(i)"),
    ],
)
def test_what_is_no_python_is_left_out_and_lines_stay_where_they_are(tmp_path: Path, text: str, python: str) -> None:
    [cell] = read_notebook(written(tmp_path, text))

    assert cell.text == python
    assert len(cell.left_out) == python.count("pass")
    compile(python, "cell", "exec")


@pytest.mark.parametrize(
    "text",
    [
        "x = (17\n% 5)",
        "x = 17 \\\n% 5",
        "text = '''\n%matplotlib inline\n!ls\nwhat?\n'''",
        "print('loss=%f' %\n0.5)  # why?",
        "x = 3 if y != 2 else 4",
        "x = [\n  1,  # right?\n]",
        "'%d' % 3",
    ],
)
def test_python_that_looks_like_a_magic_stays(tmp_path: Path, text: str) -> None:
    [cell] = read_notebook(written(tmp_path, text))

    assert cell.text == text
    assert cell.left_out == ()


def test_it_runs_as_one_script_with_arguments_and_its_errors_name_the_cell(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "beside.py").write_text("VALUE = 7\n")
    path = written(
        tmp_path,
        "import sys\nimport beside\nx = beside.VALUE",
        "def f():\n    display(x, 'shown')\n    return sys.argv[1:]",
        "%matplotlib inline\nprint(f(), __name__, '__file__' in globals())\n\n1 / 0",
    )

    script = load_script(str(path), ("--lr", "0.1"))
    outcome = run_script(script)

    assert outcome == ("ZeroDivisionError: division by zero", 1)
    printed = capsys.readouterr()
    assert printed.out == "7\nshown\n['--lr', '0.1'] __main__ False\n"
    assert f'File "{path}/cell 3", line 4, in <module>\n' in printed.err
    assert "script.py" not in printed.err
    assert script.notes == ("cell 3, line 1 is no Python and was left out: %matplotlib inline",)
    assert script.root == str(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"nbformat": 3, "cells": []}, r"has the notebook format 3, not 4"),
        ({"cells": []}, r"holds no code"),
        ({"metadata": {"kernelspec": {"name": "ir", "language": "R"}}}, r"is a notebook of R; give one of Python"),
        ({"cells": 3}, r"is no notebook: Expected `array`"),
    ],
)
def test_what_cannot_be_run_is_said(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ScriptError, match=message):
        load_script(str(written(tmp_path, "x = 1", **changes)), ())


def test_a_cell_that_does_not_compile_is_named(tmp_path: Path) -> None:
    with pytest.raises(ScriptError, match=r"cell 2 of '.*train\.ipynb' does not compile: .* \(line 2\); mend it"):
        load_script(str(written(tmp_path, "x = 1", "\nfor in x:")), ())


def test_the_lines_of_a_cell_are_found_by_its_file(tmp_path: Path) -> None:
    path = written(tmp_path, "x = 1", "y = 2\nz = 3")

    assert lines_of_cell(f"{path}/cell 2") == ("y = 2", "z = 3")
    assert lines_of_cell(f"{path}/cell 9") == ()
    assert lines_of_cell(f"{tmp_path}/gone.ipynb/cell 1") == ()
    assert lines_of_cell(f"{tmp_path}/cell 1") == ()
