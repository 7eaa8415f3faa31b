"""The words of the source: plain ones, one meaning each, understood where an IDE or the API page shows them alone."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "flatout"

PENDING: set[str] = set()
"""Areas of src/flatout that are not renamed yet. Take yours out when it is; nothing is added."""

FORBIDDEN = re.compile(
    "abreast|apart|aside|choices?|chosen|fronts?|given|held|kept|laid|lay|laying|lays|ledgers?|made|marks?|offers?|offered"
    "|promises?|purposes?|routes?|rungs?|said|says?|seams?|seats?|seen|shelf|shelves|shelved|slots?|subjects?|tells?|telling|told"
    "|turned|turning|twins?|ways?|zygote"
)
"""Words of no identifier: metaphors, and participles that leave open what a thing is (STYLE, section 4)."""

FORBIDDEN_IN = {"chain": "blocks/kernels", "epoch": "blocks/elastic", "stage": "tune/verify"}
"""Words that the field uses for one thing and that mean another in this folder."""

ALLOWED = {
    "hand_made_batch": "the id of a rule, which plans and reports hold",
    "HeldOut": "data that are not trained on",
    "held_out": "data that are not trained on",
    "num_kept": "a parameter of the public linear_cross_entropy",
    "device_slot": "a place for one block's weights on the device",
    "MemorySlot": "a place for one snapshot in memory",
    "memory_slot": "a place for one snapshot in memory",
    "__slots__": "Python's",
}
"""What an identifier may contain although a word of it is forbidden, and why. A plural is allowed with its singular."""

PROTOCOLS = {
    "apply",
    "bind",
    "check",
    "dtype",
    "edit",
    "environment",
    "main",
    "note",
    "options",
    "propose",
    "refusal",
    "run",
    "variants",
}
"""Functions that discovery looks for in many modules: each is what its module's constant holds."""

SHARED = {
    "price": "of a layout, `flatout.scale.price`, and of an architecture that is searched for, where nobody sees it from outside",
    "custom": "a mask and a score of attention by a function of the user: `masks.custom`, `scores.custom`",
    "expect": "the pytest fixture is named after the function that it gives",
    "prefix": "a mask of attention and prefix tuning: the field's word for both, each public in its own package",
}
"""Public functions that share a name although no discovery asks for it, and why."""

PREPOSITIONS = re.compile(
    r"(After|And|As|At|Behind|Beside|Between|But|By|For|From|In|Into|Of|On|Or|Out of|Over|See|That|Through|To|Under|Which|Whose"
    r"|With|Within|Without)\b"
)


class Module(NamedTuple):
    """A source file: its path below src/flatout, and its syntax tree."""

    path: str
    tree: ast.Module


@cache
def modules() -> tuple[Module, ...]:
    """Every source file that is not in a pending area."""
    paths = [p.relative_to(SOURCE).as_posix() for p in sorted(SOURCE.rglob("*.py"))]
    done = [p for p in paths if not any(p == area or p.startswith(f"{area}/") for area in PENDING)]
    return tuple(Module(p, ast.parse((SOURCE / p).read_text(encoding="utf-8"))) for p in done)


def names_bound_in(module: Module) -> Iterator[tuple[str, int]]:
    """Every name that a module gives to something, and the line; names of other libraries are read, not bound."""
    for part in Path(module.path).with_suffix("").parts:
        yield part, 1
    for node in ast.walk(module.tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name, node.lineno
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()) | ast.arg(arg=name):
                yield name, node.lineno
            case ast.alias(asname=str(name)) | ast.ExceptHandler(name=str(name)):
                yield name, node.lineno


def words_of(name: str) -> list[str]:
    """The words of an identifier in lower case, those that are allowed in it left out."""
    for allowed in ALLOWED:
        name = re.sub(rf"{allowed}(?![a-z])|{allowed}s(?![a-z])", "", name)
    return [word.lower() for word in re.findall(r"[a-z]+|[A-Z][a-z]*|[A-Z]+", name)]


def public_definitions(tree: ast.Module) -> Iterator[tuple[str, ast.AST, str]]:
    """(name, node, docstring) of the module, its public functions and classes, and their public methods."""
    if text := ast.get_docstring(tree):
        yield "the module", tree, text
    todo: list[ast.stmt] = list(tree.body)
    while todo:
        node = todo.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            if text := ast.get_docstring(node):
                yield node.name, node, text
            if isinstance(node, ast.ClassDef):
                todo += node.body


def what_is_wrong(docstring: str) -> str:
    """Why the first sentence of a docstring cannot be understood by itself; empty if it can."""
    first = docstring.partition("\n\n")[0].replace("\n", " ").strip()
    if PREPOSITIONS.match(first):
        return "begins with a preposition"
    if not re.match(r"[A-Z`0-9*'\"(]", first):
        return "begins with a small letter"
    if len(re.findall(r"[\w'`.-]+", first)) < 5:
        return "has fewer than five words"
    return "" if re.search(r"[.?!:)`\"]$", first) else "does not end with a full stop"


def plain(text: str) -> str:
    """The text in lower case, with single spaces for hyphens, underscores and line ends."""
    return re.sub(r"[\s_-]+", " ", text).lower()


def test_no_identifier_has_a_forbidden_word() -> None:
    wrong = sorted(
        {
            f"{module.path}:{line} {name}"
            for module in modules()
            for name, line in names_bound_in(module)
            for word in words_of(name)
            if FORBIDDEN.fullmatch(word) or module.path.startswith(FORBIDDEN_IN.get(word.removesuffix("s"), "-"))
        }
    )
    assert not wrong, "\n".join(wrong)


def test_no_two_classes_share_a_name() -> None:
    places = defaultdict(list)
    for module in modules():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(module.path)
    shared = {name: paths for name, paths in places.items() if len(paths) > 1}
    assert not shared, shared


def test_no_two_public_functions_share_a_name() -> None:
    places = defaultdict(set)  # a set: overloads of one function are one
    for module in modules():
        if module.path.startswith("app/cli/"):
            continue  # a verb's command is named after the verb, as the function in app/session.py is
        for node in module.tree.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_"):
                places[node.name].add(module.path)
    shared = {name: paths for name, paths in places.items() if len(paths) > 1 and name not in PROTOCOLS | SHARED.keys()}
    assert not shared, shared


def test_a_docstring_is_understood_without_the_name_above_it() -> None:
    wrong = [
        f"{module.path}:{getattr(node, 'lineno', 1)} {name} {why}"
        for module in modules()
        for name, node, text in public_definitions(module.tree)
        if (why := what_is_wrong(text))
    ]
    assert not wrong, "\n".join(wrong)


def test_every_term_of_the_glossary_is_used() -> None:
    glossary = ROOT / "docs" / "glossary.md"
    heads = re.findall(r"^(.+)\n:   ", glossary.read_text(encoding="utf-8"), re.MULTILINE)
    terms = [term for head in heads for term in re.split(r", | \(|\)", head) if term]
    files = [p for p in [*SOURCE.rglob("*.py"), *(ROOT / "docs").rglob("*.md")] if p != glossary]
    text = plain("\n".join(p.read_text(encoding="utf-8") for p in files))
    assert [term for term in terms if plain(term) not in text] == []


def test_pending_areas_exist() -> None:
    assert [area for area in sorted(PENDING) if not (SOURCE / area).exists()] == []
