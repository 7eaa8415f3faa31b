"""What works on a machine, as `flatout doctor` says it."""

from __future__ import annotations

import os
import shutil
from types import SimpleNamespace

import pytest
from tests.command_line import flatout

from flatout.core.errors import EXTRA_OF
from flatout.machine.measure import abilities as module
from flatout.machine.measure.abilities import Ability, abilities


def by_name() -> dict[str, Ability]:
    return {one.name: one for one in abilities()}


def test_what_the_tests_run_with_works() -> None:
    found = by_name()
    assert found["Python"].works and found["torch"].works
    assert {one.name for one in found.values() if one.is_needed} == {"Python", "torch"}
    assert all(one.text for one in found.values())


def test_every_extra_of_a_module_has_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None if name != "torch" else object())
    text = " ".join(one.text for one in abilities() if not one.works)
    for extra in {*EXTRA_OF.values(), "loops"}:
        assert f"pip install 'flatout[{extra}]'" in text


def test_an_old_torch_is_named_and_nothing_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "version", lambda name: "2.10.1+cu128")
    assert by_name()["torch"] == Ability("torch", False, "2.10.1+cu128; 2.11 or newer is needed", is_needed=True)
    ended = flatout("doctor")
    assert ended.code == 1
    assert "missing" in ended.out


def test_small_shared_memory_names_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=64 << 20))
    found = by_name()["shared memory"]
    assert not found.works
    assert "0.1 GiB in /dev/shm" in found.text and "--shm-size" in found.text


def test_a_quota_below_the_cores_names_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    monkeypatch.setattr(module, "cpu_quota", lambda: 2.5)
    found = by_name()["cores"]
    assert not found.works
    assert "OMP_NUM_THREADS=2" in found.text


def test_missing_compilers_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    found = by_name()
    assert not found["C compiler"].works and not found["C++ compiler"].works


def test_the_verb_prints_a_row_for_each() -> None:
    ended = flatout("doctor")
    assert ended.code == 0, ended.err
    for one in abilities():
        assert one.name in ended.out
