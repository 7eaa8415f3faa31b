from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from flatout.check import rules as rule_package
from flatout.core import registry
from flatout.core.errors import UsageError
from flatout.core.records.finding import Rule

SECTIONS = ("Costs", "Evidence", "Levers", "False alarm")
FILES = sorted(p for p in Path(rule_package.__path__[0]).glob("*/*.py") if p.name != "__init__.py")
MODULES = [importlib.import_module(f"flatout.check.rules.{p.parent.name}.{p.stem}") for p in FILES]

every_module = pytest.mark.parametrize("module", MODULES, ids=lambda m: m.__name__.removeprefix("flatout.check.rules."))


class Point:
    """An entry point of another package."""

    def __init__(self, rule: Rule) -> None:
        self.load: Callable[[], Rule] = lambda: rule


def search_with(monkeypatch: pytest.MonkeyPatch, *others: Rule) -> tuple[Rule, ...]:
    """What a fresh search finds when other packages bring these rules."""
    monkeypatch.setattr(registry, "entry_points", lambda group: [Point(r) for r in others])
    return registry.rules.__wrapped__()


def section(module: ModuleType, name: str) -> str:
    """The text of one section of the module's docstring, its lines joined."""
    names = "|".join(SECTIONS)
    found = re.search(rf"^{name}  +(.*?)(?=^(?:{names})  |\Z)", module.__doc__ or "", re.MULTILINE | re.DOTALL)
    return " ".join(found[1].split()) if found else ""


def test_every_folder_and_every_file_in_it_is_found() -> None:
    names = {info.name for info in pkgutil.iter_modules(rule_package.__path__) if info.ispkg}
    assert names == {rule.id.split(".")[0] for rule in registry.rules()}
    assert {m.__name__ for m in MODULES} == {rule.module for rule in registry.rules()}


def test_ids_are_unique_and_sorted() -> None:
    ids = [rule.id for rule in registry.rules()]
    assert ids == sorted(set(ids))


@every_module
def test_a_docstring_has_a_first_sentence_and_the_four_sections_in_order(module: ModuleType) -> None:
    lines = (module.__doc__ or "").splitlines()
    assert lines[0].endswith(".")
    assert lines[1] == ""
    heads = [line[:11].rstrip() for line in lines[2:] if line and not line.startswith(" ")]
    assert heads == list(SECTIONS)
    assert all(section(module, name) for name in SECTIONS)


@every_module
def test_a_title_is_a_phrase(module: ModuleType) -> None:
    title = module.RULE.title
    assert title[0].isupper()
    assert not title.endswith(".")


def test_another_package_may_bring_a_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = Rule(id="bandwidth.aaa", title="Theirs", module="theirs", check=lambda _: iter(()))
    found = search_with(monkeypatch, theirs)
    assert theirs in found
    assert [r.id for r in found] == sorted(r.id for r in found)


def test_an_id_that_is_taken_is_refused_with_both_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = registry.rules()[0]
    theirs = Rule(id=taken.id, title="Theirs", module="theirs.rules", check=lambda _: iter(()))
    with pytest.raises(UsageError, match=re.escape(taken.id)) as error:
        search_with(monkeypatch, theirs)
    assert taken.module in str(error.value)
    assert "theirs.rules" in str(error.value)
