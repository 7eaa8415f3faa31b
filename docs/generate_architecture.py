"""Write what docs/architecture.md and CONTRIBUTING.md show of the import contract, and the picture docs/images/rooms.svg.

python docs/generate_architecture.py            writes them
python docs/generate_architecture.py --check    writes nothing; exits with 1 and names the files that are out of date

The contract is the one in pyproject.toml that `lint-imports` holds; the picture shows the imports that there are.
"""

from __future__ import annotations

import argparse
import ast
import sys
import tomllib
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import grimp

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("docs/architecture.md", "CONTRIBUTING.md")
PICTURE = "docs/images/rooms.svg"
BEGIN, END = "<!-- contract: written by make docs -->", "<!-- end of contract -->"
WIDTH, HEIGHT, GAP, ROW = 300, 58, 36, 104
"""Pixels: a room's width and height, the space between rooms of a floor, and from one floor to the next."""


def contracts() -> Sequence[Mapping[str, Any]]:
    """The contracts of the import linter, as pyproject.toml has them."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    found: list[Mapping[str, Any]] = tomllib.loads(text)["tool"]["importlinter"]["contracts"]
    return found


def floors() -> list[list[str]]:
    """Rooms by floor, the lowest floor first; rooms of one floor never import one another."""
    layers = next(c["layers"] for c in contracts() if c["id"] == "rooms")
    rows = [[room.strip() for room in layer.split("|")] for layer in reversed(layers)]
    return [row for row in rows if row != ["__main__"]]


def in_words() -> str:
    """The contract as Markdown: the order of the rooms, then what else holds."""
    order = " < ".join(row[0] if len(row) == 1 else f"({' | '.join(row)})" for row in floors())
    lines = ["```", order, "```", "", "`lint-imports` holds:", ""]
    lines += [f"- {c['name']}." for c in contracts()]
    light = next(c["source_modules"] for c in contracts() if c["id"] == "thinking")
    names = ", ".join(f"`{name.removeprefix('flatout.').replace('.', '/')}`" for name in light)
    return "\n".join([*lines, "", f"The thinking half: {names}."])


def with_contract(text: str) -> str:
    """A page with the contract between its two comments.

    Raises SystemExit where the page has no place for it.
    """
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"no '{BEGIN}' and '{END}' in the page; put them where the contract belongs")
    return f"{head}{BEGIN}\n{in_words()}\n{END}{tail}"


def purpose_of(room: str) -> str:
    """The first sentence of the room's docstring."""
    text = (ROOT / "src" / "flatout" / room / "__init__.py").read_text(encoding="utf-8")
    docstring = ast.get_docstring(ast.parse(text)) or ""
    return docstring.split("\n\n")[0].replace("\n", " ").rstrip(".")


def arrows() -> list[tuple[str, str]]:
    """(importer, imported) of rooms between which there are imports, less those that follow from others."""
    graph = grimp.build_graph("flatout", cache_dir=None)
    rooms = {room for row in floors() for room in row}
    found = set()
    for module in graph.modules:
        for other in graph.find_modules_directly_imported_by(module):
            pair = tuple(name.split(".")[1] if "." in name else "" for name in (module, other))
            if pair[0] != pair[1] and set(pair) <= rooms:
                found.add((pair[0], pair[1]))
    below = {room: {b for a, b in found if a == room} for room in rooms}
    for _ in rooms:  # as often as the longest path may be long
        below = {room: others.union(*(below[other] for other in others)) for room, others in below.items()}
    return sorted((a, b) for a, b in found if not any(b in below[other] for x, other in found if x == a and other != b))


def picture() -> str:
    """The rooms floor by floor as SVG, with an arrow from each room to those that it imports first."""
    rows = floors()
    width = max(len(row) for row in rows) * (WIDTH + GAP) + GAP
    height = len(rows) * ROW + 20
    place: dict[str, tuple[float, float]] = {}
    for number, row in enumerate(rows):
        left = (width - len(row) * WIDTH - (len(row) - 1) * GAP) / 2
        for column, room in enumerate(row):
            place[room] = left + column * (WIDTH + GAP), height - (number + 1) * ROW + 20
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0 8 4 0 8z" fill="#888"/></marker></defs>',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
    ]
    for importer, imported in arrows():
        (x0, y0), (x1, y1) = place[importer], place[imported]
        path = f"M{x0 + WIDTH / 2} {y0 + HEIGHT}L{x1 + WIDTH / 2 + (x0 - x1) / 2.2} {y1}"
        title = f"<title>{importer} imports {imported} and what is below it</title>"
        out.append(f'<path d="{path}" fill="none" stroke="#888" marker-end="url(#tip)">{title}</path>')
    for room, (x, y) in place.items():
        out.append(f'<rect x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="6" fill="#eef4fb" stroke="#4a78a8"/>')
        out.append(f'<text x="{x + 12}" y="{y + 20}" font-size="15" font-weight="bold" fill="#1d3a57">{room}</text>')
        for number, line in enumerate(_lines(purpose_of(room))):
            out.append(
                f'<text x="{x + 12}" y="{y + 36 + 13 * number}" font-size="10.5" fill="#333">{escape(line)}</text>'
            )
    return "\n".join([*out, "</svg>", ""])


def _lines(text: str, most: int = 50) -> list[str]:
    """At most two lines of at most so many characters."""
    words, lines = text.split(), [""]
    for word in words:
        if len(lines[-1]) + len(word) + 1 > most:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines[:2]


def main() -> int:
    """The exit status: 1 where --check finds files that are out of date."""
    parser = argparse.ArgumentParser(description="Write the import contract into the pages, and its picture.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 when a file is out of date")
    is_check = parser.parse_args().check
    wanted = {name: with_contract((ROOT / name).read_text(encoding="utf-8")) for name in PAGES} | {PICTURE: picture()}
    stale = [name for name, text in wanted.items() if not _holds(ROOT / name, text)]
    for name in stale:
        if is_check:
            sys.stdout.write(f"{name} is out of date; run 'make docs' and commit it\n")
        else:
            (ROOT / name).write_text(wanted[name], encoding="utf-8")
    return 1 if is_check and stale else 0


def _holds(path: Path, text: str) -> bool:
    return path.is_file() and path.read_text(encoding="utf-8") == text


if __name__ == "__main__":
    sys.exit(main())
