"""The package's page on an index: the README's links lead into the repository, wherever that is."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"\]\(([^)\s]+)\)")


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The build's hook; what builds packages is not installed here."""
    interface = ModuleType("hatchling.metadata.plugin.interface")
    interface.MetadataHookInterface = object  # type: ignore[attr-defined]
    for name in ("hatchling", "hatchling.metadata", "hatchling.metadata.plugin"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, interface.__name__, interface)
    return runpy.run_path(str(ROOT / "hatch_build.py"))


def page(hook: dict[str, Any], folder: Path) -> dict[str, Any]:
    made: dict[str, Any] = {}
    instance = hook["CustomMetadataHook"]()
    instance.root = str(folder)
    instance.update(made)
    return made


def test_every_link_of_the_readme_leads_to_a_file_and_into_the_repository(
    hook: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLATOUT_REPOSITORY", "https://example.org/team/flatout.git")
    found = page(hook, ROOT)
    before = LINK.findall((ROOT / "README.md").read_text())
    after = LINK.findall(found["readme"]["text"])
    assert len(before) == len(after) > 10
    for short, full in zip(before, after, strict=True):
        if not short.startswith("https://"):
            assert (ROOT / short).exists(), short
            assert re.fullmatch(rf"https://example\.org/team/flatout/(blob|raw)/main/{re.escape(short)}", full)
            assert ("/raw/" in full) == short.endswith((".png", ".svg"))
    assert found["urls"]["Repository"] == "https://example.org/team/flatout"


@pytest.mark.parametrize(
    ("origin", "address"),
    [
        ("https://example.org/team/flatout.git", "https://example.org/team/flatout"),
        ("https://user:secret@example.org/flatout", ""),
        ("git@example.org:team/flatout.git", ""),
        ("/srv/git/flatout", ""),
        ("", ""),
    ],
)
def test_the_address_is_gits_where_it_is_one_for_browsers(
    hook: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, origin: str, address: str
) -> None:
    monkeypatch.delenv("FLATOUT_REPOSITORY", raising=False)
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    if origin:
        subprocess.run(["git", "-C", str(tmp_path), "remote", "add", "origin", origin], check=True)
    (tmp_path / "README.md").write_text("[page](docs/page.md)")
    found = page(hook, tmp_path)
    assert found.get("urls", {}).get("Repository", "") == address
    assert found["readme"]["text"] == (
        f"[page]({address}/blob/main/docs/page.md)" if address else "[page](docs/page.md)"
    )
