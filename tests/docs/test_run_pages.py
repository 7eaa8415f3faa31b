"""The tool that runs the code of pages: what runs, what is compared, and that an error is one."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.slow

PAGE = """\
# Page

<!-- run: hidden
x = 3
-->

```python
print("x is", x + 1)
```

```text
x is 4
```

```python title="part/script.py"
import sys

print("script", *sys.argv[1:])
```

```console
$ python part/script.py one \\
    two
script one two
$ ls
examples
part
```

<!-- run: fails -->
```python
raise ValueError("no such thing")
```

```text
ValueError: no such thing
```

<!-- run: no, it needs a cluster -->
```sh
exit 1
```

```toml
steps = 3
```
"""


def run(page: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "docs" / "run_pages.py"), *options, str(page)]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


def test_a_page_that_does_what_it_says_is_ok_and_writing_changes_nothing(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    done = run(page)
    assert done.returncode == 0, done.stdout
    assert run(page, "--write").returncode == 0
    assert page.read_text() == PAGE


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("x is 4\n", "x was 4\n", "the page has\nx was 4\nand it printed\nx is 4"),
        ("x + 1)", "y + 1)", "NameError: name 'y' is not defined"),
        ("$ ls\n", "$ ls nothing\n", "it failed"),
        ("<!-- run: fails -->\n", "", "ValueError: no such thing"),
        ('raise ValueError("no such thing")', "pass", "it did not fail"),
        ("```text\nx is 4\n```\n", "", "no fence 'text' follows it"),
        ("<!-- run: no, it needs a cluster -->\n", "", "it failed"),
        ("```toml\nsteps = 3\n```\n", "```toml\nsteps = 3\n", "does not end"),
        ("# Page", "# Page\n\n![x](../images/none.svg)", "no image ../images/none.svg"),
    ],
)
def test_what_differs_from_the_page_is_an_error(before: str, after: str, said: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    assert before in PAGE
    page.write_text(PAGE.replace(before, after, 1))
    done = run(page)
    assert done.returncode == 1
    assert said in done.stdout


def test_numbers_may_differ_and_measured_output_too_and_both_are_written(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    text = '```python\nprint("took 12.5 ms")\n```\n\n```text\ntook 3 ms\n```\n\n'
    text += '<!-- run: measured, tail 2 -->\n```python\nprint("a\\nb\\nc")\n```\n\n```text\nold\n```\n'
    page.write_text(text)
    assert run(page).returncode == 0
    assert run(page, "--write").returncode == 0
    assert page.read_text() == text.replace("took 3 ms", "took 12.5 ms").replace("old", "...\nb\nc")


def test_a_picture_that_the_code_draws_is_written_beside_the_page(tmp_path: Path) -> None:
    page = tmp_path / "docs" / "page.md"
    page.parent.mkdir()
    page.write_text('![drawn](images/it.svg)\n\n```python\nopen("it.svg", "w").write("<svg/>")\n```\n')
    assert run(page).returncode == 1
    assert run(page, "--write").returncode == 0
    assert (tmp_path / "docs" / "images" / "it.svg").read_text() == "<svg/>"


@pytest.mark.parametrize("code", [0, 3])
def test_where_the_code_depends_on_times_any_is_right(code: int, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"<!-- run: any-code -->\n```console\n$ echo told; exit {code}\ntold\n```\n")
    assert run(page).returncode == 0


def test_a_traceback_is_never_right(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- run: any-code, measured -->\n```console\n$ python -c 'raise ValueError(3)'\n```\n")
    done = run(page)
    assert done.returncode == 1 and "a traceback" in done.stdout


def test_a_page_that_was_wrong_beside_another_runs_again_alone(tmp_path: Path) -> None:
    once, always = tmp_path / "once.md", tmp_path / "always.md"
    once.write_text(
        f"<!-- run: measured -->\n```console\n$ test -e {tmp_path}/ran || (touch {tmp_path}/ran; false)\n```\n"
    )
    always.write_text("```console\n$ false\n```\n")
    both = run(always, "--jobs", "2", str(once))
    assert both.returncode == 1
    assert [line.partition(":")[0] for line in both.stdout.splitlines() if line.startswith(("ok", "WRONG"))] == [
        f"WRONG  {once}",
        f"WRONG  {always}",
        f"ok     {once}",
        f"WRONG  {always}",
    ]
    (tmp_path / "ran").unlink()
    assert run(once, "--jobs", "2").returncode == 0
    (tmp_path / "ran").unlink()
    assert run(once).returncode == 1


RAN = "*Ran on A GPU, torch 2.11.0, 2026-11-28.*"
FOR_GPU = """\
```python
x = 3
```

<!-- run: gpu -->
```python
print("x is", x)
```

```text
x is 4
```

<!-- run: gpu 2 -->
```console
$ echo two
three
```
"""


def on_gpus(page: Path, line: str, num: int) -> str:
    """What the tool says of a page that is run for its fences for GPUs, and written."""
    spec = importlib.util.spec_from_file_location("run_pages", ROOT / "docs" / "run_pages.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["run_pages"] = module
    spec.loader.exec_module(module)
    said: str = module.run_page(page, is_written=True, gpus=module.Gpus(line, num))
    return said


def test_what_needs_a_gpu_must_have_run_on_one_and_is_not_run_here(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(FOR_GPU)
    done = run(page)
    assert done.returncode == 1
    assert "no line '*Ran on ...*' follows" in done.stdout

    page.write_text(FOR_GPU.replace("x is 4\n```\n", f"x is 4\n```\n\n{RAN}\n") + f"\n{RAN}\n")
    done = run(page)
    assert done.returncode == 0, done.stdout
    assert "1 run" in done.stdout


def test_on_a_gpu_its_output_and_the_day_are_written_and_what_needs_two_is_left(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(FOR_GPU + f"\n{RAN}\n")

    on_gpus(page, RAN, 1)
    first = page.read_text()
    on_gpus(page, later := RAN.replace("28", "29"), 2)

    assert first == FOR_GPU.replace("x is 4\n```\n", f"x is 3\n```\n\n{RAN}\n") + f"\n{RAN}\n"
    assert page.read_text() == first.replace(RAN, later).replace("three", "two")


def test_a_first_run_on_a_gpu_adds_output_and_day(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text('<!-- run: gpu -->\n```python\nprint("x")\n```\n')

    on_gpus(page, RAN, 1)

    assert page.read_text() == f'<!-- run: gpu -->\n```python\nprint("x")\n```\n\n```text\nx\n```\n\n{RAN}\n'
