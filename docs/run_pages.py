"""Runs the code and the commands of pages, and compares or writes their output.

    python docs/run_pages.py [--write] [--jobs N] [--gpu] [PAGE.md ...]

Each page runs in an empty folder of its own with a link to `examples`. What runs, from top to bottom:

- a fence `python` is a cell: the cells of a page share their names, as in a notebook;
- a fence `console` has commands behind `$ `, and their output;
- a fence `sh` is a script for bash whose output is not shown, and that ends where a command fails;
- any fence with `title="NAME"` is written to the file NAME, and not run;
- a fence `text` right after a cell is the cell's output.

A comment on the line before a fence changes that:

    <!-- run: measured -->        the output differs from run to run: it is written, and not compared
    <!-- run: tail 12 -->         the last 12 lines of the output are shown (`head 12`: the first)
    <!-- run: any-code -->        how the command ends depends on times: its code may be 0 or another, without a traceback
    <!-- run: fails -->           the command ends with another code than 0, the cell with an exception
    <!-- run: no, REASON -->      it is not run; the reason is for readers of the source
    <!-- run: gpu -->             it runs with `--gpu` alone (`gpu 2`: where there are two); the line after it, or its output,
                                  says on what GPU it ran, and when
    <!-- run: clone -->           its commands run in a clone of this repository's last commit, beside the page's folder
    <!-- run: environment -->     its commands run in an empty environment of Python's
    <!-- run: hidden ... -->      with lines of Python before the `-->`: a cell that the page does not show

With `--jobs`, a page that was wrong beside another runs again, alone.

Several may stand in one comment: `<!-- run: measured, tail 12 -->`. Output is compared with numbers masked. Pictures that code
saves under the file names of the page's images have to be there, and are written with `--write`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).parents[1]
DOCS: Final = ROOT / "docs"
CACHE: Final = ROOT / "build" / "docs-cache"
PAGES: Final = (
    "README.md",
    "docs/*.md",
    "docs/tutorials/*.md",
    "docs/how-to/*.md",
    "docs/recipes/*.md",
    "docs/experiments/*.md",
)
LONGEST_S: Final = 600
LONGEST_INSTALLING_S: Final = 1500
WIDTH: Final = 100
_FENCE: Final = re.compile(r"^(\s*)(`{3,})\s*([\w+-]*)(.*)$")
_RUN: Final = re.compile(r"^\s*<!-- run: (.*?)\s*(-->)?\s*$")
_TITLE: Final = re.compile(r'title="([^"]+)"')
_IMAGE: Final = re.compile(r"!\[[^\]]*\]\((?!https?:)([^)\s]+)\)")
_COLOUR: Final = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_NUMBER: Final = re.compile(r"\d+(?:[.,]\d+)*(?:e[-+]?\d+)?")

_IN_CI: Final = ("CI", "BUILD_NUMBER")
"""pytest does not shorten its lines where these are set."""

_RAN: Final = re.compile(r"^\*Ran on .+, torch \S+, \d{4}-\d\d-\d\d\.\*$")
"""The line behind a fence that only a GPU runs."""

_CELLS: Final = r"""
import json, linecache, os, sys, traceback
names = {"__name__": "__main__"}
replies = os.fdopen(int(sys.argv[1]), "w")
sys.path.insert(0, "")
for line in sys.stdin:
    cell = json.loads(line)
    linecache.cache[cell["name"]] = (len(cell["code"]), None, cell["code"].splitlines(True), cell["name"])
    failed = ""
    try:
        exec(compile(cell["code"], cell["name"], "exec"), names)
    except BaseException:
        kind, error, trace = sys.exc_info()
        failed = "".join(traceback.format_exception(kind, error, trace.tb_next))
    sys.stdout.flush()
    replies.write(json.dumps(failed) + "\n")
    replies.flush()
"""
"""Runs cells one after the other, in a process of its own."""


class Fence(NamedTuple):
    """A fence of a page, or a hidden cell."""

    first: int
    """Index of its opening line; `last` is that of its closing line."""
    last: int
    language: str
    title: str
    lines: tuple[str, ...]
    words: tuple[str, ...]
    """What the comment before it says."""
    indent: str = ""

    def has(self, word: str) -> str | None:
        """What stands behind a word of its comment; None where the word is not there."""
        return next((w[len(word) :].strip() for w in self.words if w.split(" ")[0] == word), None)


class Gpus(NamedTuple):
    """What fences for GPUs run on."""

    line: str
    """What the page says of it: devices, torch, date."""
    num: int


class PageError(Exception):
    """Something of a page did not run as the page says."""


def fences(lines: Sequence[str]) -> Iterator[Fence]:
    """The fences of a page, and its hidden cells, in order. Raises PageError for one that does not end."""
    words: tuple[str, ...] = ()
    index = 0
    while index < len(lines):
        line = lines[index]
        if comment := _RUN.match(line):
            words = (
                tuple(w.strip() for w in comment[1].split(",")) if comment[2] or comment[1] != "hidden" else ("hidden",)
            )
            if not comment[2]:
                last = _closing(lines, index, lambda text: text.strip() == "-->")
                yield Fence(index, last, "python", "", tuple(lines[index + 1 : last]), words)
                words, index = (), last
        elif fence := _FENCE.match(line):
            indent, ticks, language, rest = fence.groups()
            last = _closing(lines, index, lambda text, ticks=ticks: text.strip() == ticks)  # type: ignore[misc]
            title = _TITLE.search(rest)
            body = tuple(text.removeprefix(indent) for text in lines[index + 1 : last])
            yield Fence(index, last, language, title[1] if title else "", body, words, indent)
            words, index = (), last
        elif line.strip():
            words = ()
        index += 1


def _closing(lines: Sequence[str], first: int, is_end: object) -> int:
    for index in range(first + 1, len(lines)):
        if is_end(lines[index]):  # type: ignore[operator]
            return index
    raise PageError(f"line {first + 1}: what begins here does not end")


class Outputs:
    """Runs the fences of one page in a folder, and collects the lines that take their places."""

    def __init__(self, page: Path, folder: Path, *, gpus: Gpus | None = None) -> None:
        """`gpus`: those on which fences for GPUs run; None where these are left out."""
        self.page, self.folder = page, folder
        self._ran_on, self._num_gpus = (gpus.line, gpus.num) if gpus is not None else ("", 0)
        self.replacements: dict[tuple[int, int], list[str]] = {}
        """New lines for [first, last) of the page."""
        self.differences: list[str] = []
        self.num_run = 0
        self._cells: subprocess.Popen[str] | None = None
        self._stdout = folder.parent / "stdout"

    def run(self, lines: Sequence[str]) -> None:
        """Run the page. Raises PageError where something ends otherwise than the page says."""
        found = list(fences(lines))
        try:
            for number, fence in enumerate(found):
                after = found[number + 1] if number + 1 < len(found) else None
                is_output = after is not None and after.language == "text" and not after.title and not after.words
                between = lines[fence.last + 1 : after.first] if after is not None else ()
                output = after if is_output and not any(text.strip() for text in between) else None
                is_for_gpu = fence.has("gpu") is not None
                if is_for_gpu:  # its output is of the run that the stamp names
                    num_gpus = int(fence.has("gpu") or 1)
                    self._stamp((output or fence).last + 1, lines, num_gpus=num_gpus)
                    if self._num_gpus < num_gpus:
                        continue
                if self._ran_on and not is_for_gpu:
                    self._prepare(fence)
                else:
                    self._fence(fence, output)
        finally:
            if self._cells is not None:
                self._cells.kill()
                self._cells.communicate()
                self._replies.close()

    def _stamp(self, after: int, lines: Sequence[str], *, num_gpus: int) -> None:
        """Have the line that says on what GPU a fence ran. Raises PageError where no GPU has run it."""
        found = next((n for n in range(after, len(lines)) if lines[n].strip()), None)
        is_there = found is not None and _RAN.match(lines[found].strip()) is not None
        if self._num_gpus >= num_gpus:
            first = found if is_there and found is not None else after
            self.replacements[first, first + is_there] = [self._ran_on] if is_there else ["", self._ran_on]
        elif not is_there:
            raise PageError(f"line {after}: no line '*Ran on ...*' follows: run the page on a GPU, with --gpu --write")

    def _prepare(self, fence: Fence) -> None:
        """Write a file, or run a cell for its names, without a judgement; commands may take minutes, and are left out."""
        text = "\n".join(fence.lines) + "\n"
        if fence.title:
            self._fence(fence, None)
        elif fence.language == "python" and fence.has("no") is None and fence.has("no,") is None:
            self._ask(text, f"{self.page.stem}.md, line {fence.first + 2}")

    def _fence(self, fence: Fence, output: Fence | None) -> None:
        text = "\n".join(fence.lines) + "\n"
        if fence.has("no") is not None or fence.has("no,") is not None:
            return
        if fence.title:
            path = self.folder / fence.title
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        elif fence.language == "python":
            self._cell(fence, text, output)
        elif fence.language == "console":
            self._console(fence)
        elif fence.language == "sh":
            code, printed = self._shell(text, fence)
            self._judge(fence, code != 0, printed)

    def _cell(self, fence: Fence, code: str, output: Fence | None) -> None:
        failed, printed = self._ask(code, f"{self.page.stem}.md, line {fence.first + 2}")
        self._judge(fence, bool(failed), printed + failed)
        shown = self._shown(fence, printed + (failed.splitlines()[-1] if failed else ""))
        if output is not None:
            self._replace(fence, output.first + 1, output.last, list(output.lines), shown, output.indent)
        elif shown and fence.has("hidden") is None:
            self.differences.append(f"line {fence.first + 1}: prints, and no fence 'text' follows it")
            here = (fence.last + 1, fence.last + 1)
            self.replacements[here] = ["", "```text", *shown, "```", *self.replacements.get(here, [])]

    def _console(self, fence: Fence) -> None:
        new: list[str] = []
        for line in self._commands(fence.lines):
            code, printed = self._shell(line, fence)
            self._judge(fence, code != 0, printed)
            new += [*(("$ " + line).split("\n")), *self._shown(fence, printed)]
        self._replace(fence, fence.first + 1, fence.last, list(fence.lines), new, fence.indent)

    @staticmethod
    def _commands(lines: Sequence[str]) -> Iterator[str]:
        """The commands of a console, with the lines that continue them."""
        command = ""
        for line in lines:
            if line.startswith("$ "):
                command = line[2:]
            elif command.endswith("\\"):
                command += "\n" + line
            else:
                continue
            if not command.endswith("\\"):
                yield command

    def _replace(self, fence: Fence, first: int, last: int, before: list[str], after: list[str], indent: str) -> None:
        self.replacements[first, last] = [indent + line if line else line for line in after]
        if fence.has("measured") is None and not self._ran_on and masked(before) != masked(after):
            self.differences.append(
                f"line {first + 1}: the page has\n" + "\n".join(before) + "\nand it printed\n" + "\n".join(after)
            )

    def _judge(self, fence: Fence, has_failed: bool, printed: str) -> None:
        self.num_run += 1
        if fence.has("any-code") is not None and "Traceback (most recent call last)" in printed:
            raise PageError(f"line {fence.first + 1}: a traceback\n{self._plain(printed)[-3000:]}")
        if fence.has("any-code") is None and has_failed != (fence.has("fails") is not None):
            how = "failed" if has_failed else "did not fail"
            raise PageError(f"line {fence.first + 1}: it {how}\n{self._plain(printed)[-3000:]}")

    def _shown(self, fence: Fence, printed: str) -> list[str]:
        lines = self._plain(printed).rstrip().splitlines()
        if (most := fence.has("tail")) and len(lines) > int(most):
            lines = ["...", *lines[-int(most) :]]
        if (most := fence.has("head")) and len(lines) > int(most):
            lines = [*lines[: int(most)], "..."]
        return [line.rstrip() for line in lines]

    def _plain(self, printed: str) -> str:
        """Without colours and progress lines, and without paths of this machine."""
        lines = [line.rpartition("\r")[2] for line in _COLOUR.sub("", printed).replace("\r\n", "\n").split("\n")]
        text = "\n".join(lines).replace(f"{self.folder}/", "").replace(str(self.folder), ".")
        return text.replace(str(CACHE), "~/.cache").replace(f"{ROOT}/", "").replace(str(Path.home()), "~")

    def _clone(self) -> Path:
        """A clone of this repository's last commit, beside the page's folder."""
        folder = self.folder.parent / ROOT.name
        if not folder.exists():
            subprocess.run(["git", "clone", "-q", "--no-hardlinks", str(ROOT), str(folder)], check=True)
        return folder

    def _empty_environment(self) -> dict[str, str]:
        """What makes pip and Python mean an environment that has nothing but pip, with torch as this repository pins it."""
        folder = self.folder.parent / "environment"
        if not folder.exists():
            subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        around = self._environment()
        path = os.pathsep.join((str(folder / "bin"), os.environ.get("PATH", "")))
        return {**around, "PATH": path, "PIP_CONSTRAINT": str(ROOT / "constraints.txt")}

    def _shell(self, command: str, fence: Fence) -> tuple[int, str]:
        longest_s = LONGEST_S if fence.has("environment") is None else LONGEST_INSTALLING_S
        try:
            done = subprocess.run(
                ["bash", *(("-e",) if fence.language == "sh" else ()), "-c", command],
                cwd=self.folder if fence.has("clone") is None else self._clone(),
                env=self._environment() if fence.has("environment") is None else self._empty_environment(),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                text=True,
                errors="replace",
                timeout=longest_s,
                check=False,
            )
        except subprocess.TimeoutExpired as e:
            raise PageError(f"`{command}` took more than {longest_s} s") from e
        return done.returncode, done.stdout

    def _ask(self, code: str, name: str) -> tuple[str, str]:
        """Run a cell: how it failed ('' where it did not), and what it printed."""
        if self._cells is None:
            there, here = os.pipe()
            self._stdout.touch()
            with self._stdout.open("a") as printed_to:
                self._cells = subprocess.Popen(
                    [sys.executable, "-u", "-c", _CELLS, str(here)],
                    cwd=self.folder,
                    env=self._environment(),
                    stdin=subprocess.PIPE,
                    stdout=printed_to,
                    stderr=subprocess.DEVNULL,
                    text=True,
                    pass_fds=(here,),
                )
            os.close(here)
            self._replies = os.fdopen(there)
        start = self._stdout.stat().st_size
        assert self._cells.stdin is not None
        self._cells.stdin.write(json.dumps({"code": code, "name": name}) + "\n")
        self._cells.stdin.flush()
        reply = self._replies.readline()
        printed = self._stdout.read_bytes()[start:].decode(errors="replace")
        return (json.loads(reply) if reply else f"its process ended with {self._cells.wait()}"), printed

    def _environment(self) -> dict[str, str]:
        """This Python's programs first, one width, a cache for what is measured of the machine, and nothing that only CI sets."""
        path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
        CACHE.mkdir(parents=True, exist_ok=True)
        own = {"PATH": path, "COLUMNS": str(WIDTH), "XDG_CACHE_HOME": str(CACHE), "NO_COLOR": "1", "MPLBACKEND": "svg"}
        own |= {"XDG_DATA_HOME": str(self.folder.parent / "data")}  # watched jobs go into no store of the user's
        around = {name: value for name, value in os.environ.items() if name not in _IN_CI}
        return {**around, **own, "PYTHONWARNINGS": "ignore"}


def masked(lines: Sequence[str]) -> str:
    """Text without its numbers and the widths of its columns."""
    return re.sub(r"[\s-]+", " ", _NUMBER.sub("#", "\n".join(lines))).strip()


def gpus_here() -> Gpus:
    """The GPUs of this machine. Raises PageError where there is none."""
    import torch

    if not torch.cuda.is_available():
        raise PageError("--gpu needs a GPU, and torch finds none here")
    names = Counter(torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count()))
    devices = " and ".join(f"{num} x {name}" if num > 1 else name for name, num in names.items())
    line = f"*Ran on {devices}, torch {torch.__version__.partition('+')[0]}, {datetime.now(UTC).date()}.*"
    return Gpus(line, torch.cuda.device_count())


def run_page(page: Path, *, is_written: bool, gpus: Gpus | None = None) -> str:
    """Run one page; a line about it. Raises PageError where it does not do what it says."""
    began = monotonic()
    text = page.read_text()
    lines = text.split("\n")
    with tempfile.TemporaryDirectory(prefix="page-") as name:
        folder = Path(name) / "here"
        folder.mkdir()
        (folder / "examples").symlink_to(ROOT / "examples")
        outputs = Outputs(page, folder, gpus=gpus)
        outputs.run(lines)
        for target in _IMAGE.findall(text):
            drawn, image = folder / Path(target).name, (page.parent / target).resolve()
            if drawn.is_file() and is_written:
                image.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(drawn, image)
            elif not image.exists() and gpus is None:
                raise PageError(f"there is no image {target}")
    if is_written:
        for (first, last), new in sorted(outputs.replacements.items(), reverse=True):
            lines[first:last] = new
        page.write_text("\n".join(lines))
    elif outputs.differences:
        raise PageError("\n".join(outputs.differences))
    return f"{outputs.num_run} run in {monotonic() - began:.0f} s"


def main() -> int:
    """Run the pages; 1 where one of them does not do what it says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", type=Path, nargs="*")
    parser.add_argument("--write", action="store_true", help="write the output into the pages")
    parser.add_argument("--jobs", type=int, default=1, help="pages at a time")
    parser.add_argument("--gpu", action="store_true", help="run what needs a GPU, and nothing else")
    options = parser.parse_args()
    try:
        gpus = gpus_here() if options.gpu else None
    except PageError as e:
        parser.error(str(e))
    pages = [page.resolve() for page in options.pages] or sorted(p for one in PAGES for p in ROOT.glob(one))

    def is_right(page: Path, word: str, text: str) -> bool:
        where = page.relative_to(ROOT) if page.is_relative_to(ROOT) else page
        sys.stdout.write(f"{word:5}  {where}: {text}\n")
        sys.stdout.flush()
        return word == "ok"

    def outcome(page: Path) -> tuple[str, str]:
        try:
            return "ok", run_page(page, is_written=options.write, gpus=gpus)
        except PageError as e:
            return "WRONG", str(e)

    with ThreadPoolExecutor(options.jobs) as pool:
        wrong = [page for page, said in zip(pages, pool.map(outcome, pages), strict=True) if not is_right(page, *said)]
    if wrong and options.jobs > 1 and not options.write:
        sys.stdout.write("wrong beside another page; once more, alone\n")
        wrong = [page for page in wrong if not is_right(page, *outcome(page))]
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
