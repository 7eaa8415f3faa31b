"""The language of pages, and that the reference has every public name and every option."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

import flatout
from flatout.app.cli.app import commands
from flatout.app.cli.parameters import parameters_of, verbs_within

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(
    (
        ROOT / "README.md",
        *DOCS.glob("*.md"),
        *(p for d in ("tutorials", "how-to", "recipes") for p in (DOCS / d).glob("*.md")),
    )
)
REFERENCE = {path.name: path.read_text() for path in (DOCS / "reference").glob("*.md")}
MOST_WORDS, MOST_LINES = 40, 6
PRIVATE = re.compile(r"\b(told|abreast|ledger|rungs?|zygote|beyond the card|the house|stakes|twins?)\b", re.IGNORECASE)
"""Words that mean something to us alone, and are allowed in code."""
GENERATED = {"benchmarks.md", "results.md", "architecture.md", "glossary.md"}
"""Pages of tables, of figures and of definitions."""


def paragraphs(text: str) -> Iterator[tuple[int, list[str]]]:
    """Prose, with the number of its first line: no code, table, heading, comment or list of definitions."""
    lines: list[str] = []
    is_code = is_comment = False
    for number, line in enumerate([*text.split("\n"), ""], 1):
        is_comment |= line.lstrip().startswith("<!--")
        is_fence = line.lstrip().startswith("```")
        is_prose = not (is_code or is_comment or is_fence) and re.match(r"\s*(\||#|!\[|\[!\[|:   |$)", line) is None
        starts_item = is_prose and re.match(r"\s*([-*]|\d+\.) ", line) is not None
        if lines and (not is_prose or starts_item):
            yield number - len(lines), lines
            lines = []
        if is_prose:
            lines.append(line)
        is_code ^= is_fence
        is_comment &= "-->" not in line


def plain(lines: list[str]) -> str:
    """A paragraph's words: code and links count as one."""
    text = re.sub(r"`[^`]*`", "code", " ".join(lines))
    return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_sentences_and_paragraphs_are_short_and_in_everybodys_words(page: Path) -> None:
    found: list[str] = []
    for number, lines in paragraphs(page.read_text()):
        text = plain(lines)
        if len(lines) > MOST_LINES:
            found.append(f"line {number}: a paragraph of {len(lines)} lines")
        sentences = re.split(r"(?<=[.!?:;])[*)\"]*\s+(?=[*(]*[A-Z0-9`\"(]|code)", text)
        found += [
            f"line {number}: {len(s.split())} words: {s[:60]}..." for s in sentences if len(s.split()) > MOST_WORDS
        ]
        if word := PRIVATE.search(text):
            found.append(f"line {number}: '{word[0]}'")
    assert not found or page.name in GENERATED, "\n".join(found)


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_every_public_name_is_on_a_page_of_the_reference() -> None:
    pages = "\n".join(text for name, text in REFERENCE.items() if name.startswith("api-"))
    names = [f"flatout.{name}" for name in flatout.__all__]
    for package in (
        "callbacks",
        "blocks.inference.native",
        "shrink.quantise",
        "shrink.prune",
        "shrink.distil",
        "shrink.search",
    ):
        names += [f"flatout.{package}.{name}" for name in import_module(f"flatout.{package}").__all__]
    assert [name for name in names if f"## {name}\n" not in pages] == []


def test_every_option_is_on_the_page_of_the_command_line() -> None:
    sections = dict(
        re.findall(r"^#{3,4} flatout ([\w -]+)\n(.*?)(?=^#{2,4} |\Z)", REFERENCE["cli.md"], re.DOTALL | re.MULTILINE)
    )
    for verb, command in commands():
        for name, parameters in {
            verb: parameters_of(command),
            **{f"{verb} {k}": v for k, v in verbs_within(command).items()},
        }.items():
            missing = [
                o for one in parameters if not one.is_hidden for o in one.options if f"`{o}`" not in sections[name]
            ]
            assert not missing, f"flatout {name} lacks {missing}"


@pytest.mark.parametrize("words", ["Jupyter", "CUDA out of memory", "warm up"])
def test_what_people_look_for_stands_on_a_page(words: str) -> None:
    assert any(words.lower() in page.read_text().lower() for page in PAGES)
