"""`flatout build`: what a factory may return, what is refused before anything is built, and what is printed."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from tests.command_line import Ended, flatout
from torch import nn

from flatout.blocks.inference import native
from flatout.core.records.native import Latency, NativeReport

FACTORIES = """\
import torch
from torch import nn


class Summed(nn.Module):
    def forward(self, x, total):
        total = total + x
        return 2 * total, total


def with_state():
    return Summed(), (torch.zeros(1, 3), torch.zeros(1, 3)), "total"


def plain():
    return nn.Linear(3, 2), torch.zeros(1, 3)


def on_itself():
    module = nn.Linear(3, 2)
    module.example_inputs = (torch.zeros(1, 3),)
    return module


def bare():
    return nn.Linear(3, 2)


def wrong():
    return 1, 2


number = 3
"""
REPORT = NativeReport(
    hardware="Example CPU",
    isa="plain",
    compiler="cc 12",
    build_s=1.0,
    layers=(),
    weight_bytes=64,
    state_bytes=64,
    python=Latency(p50_s=1e-6, p99_s=1e-6, p999_s=1e-6, num_events=7),
)


class Stand(NamedTuple):
    """In place of an engine."""

    report: NativeReport | None

    def save(self, folder: Path) -> None:
        folder.mkdir()


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """What build was called with; it returns an engine that was measured."""
    (tmp_path / "factories_of_builds.py").write_text(FACTORIES)
    calls: list[dict[str, Any]] = []

    def build(module: nn.Module, example_inputs: tuple[torch.Tensor, ...], **options: Any) -> Stand:
        calls.append({"module": module, "example_inputs": example_inputs, **options})
        return Stand(REPORT)

    monkeypatch.setattr(native, "build", build, raising=False)
    yield calls


def built(folder: Path, factory: str, *options: object) -> Ended:
    return flatout("build", f"factories_of_builds:{factory}", "-o", "engine", *options, folder=folder)


def test_a_factory_may_name_state(asked: list[dict[str, Any]], tmp_path: Path) -> None:
    ended = built(tmp_path, "with_state", "--name", "summed", "--precision", "int8", "--events", 7)

    assert ended.code == 0, ended.err
    (call,) = asked
    assert type(call["module"]).__name__ == "Summed" and len(call["example_inputs"]) == 2
    assert {key: call[key] for key in ("state", "name", "precision", "backend", "events")} == {
        "state": ("total",),
        "name": "summed",
        "precision": "int8",
        "backend": "native",
        "events": 7,
    }
    assert "Example CPU, plain, cc 12" in ended.out and ended.out.endswith("written to engine\n")
    assert (tmp_path / "engine").is_dir()


@pytest.mark.parametrize("factory", ["plain", "on_itself"])
def test_examples_stand_beside_the_module_or_on_it(asked: list[dict[str, Any]], tmp_path: Path, factory: str) -> None:
    assert built(tmp_path, factory, "--backend", "aoti").code == 0
    (call,) = asked
    assert [tensor.shape for tensor in call["example_inputs"]] == [(1, 3)]
    assert call["state"] == () and call["backend"] == "aoti"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("factory", "options", "said"),
    [
        ("bare", (), "returned a Linear without example_inputs; return (module, example_inputs)"),
        ("wrong", (), "returned a tuple of 2 (int, int); return (module, example_inputs)"),
        ("number", (), "is of type int; name a function"),
        ("missing", (), "has no attribute 'missing'"),
        ("plain", ("--precision", "int4"), "--precision int4 is none of float32, int8"),
        ("plain", ("--backend", "onnx"), "--backend onnx is none of native, aoti"),
        ("plain", ("--backend", "aoti", "--precision", "int8"), "is of the native back end"),
        ("plain", ("--events", 0), "--events 0"),
        ("plain", ("--max-error", 0), "--max-error 0.0"),
        ("plain", ("-o", "no/engine"), "there is no folder"),
        ("plain", ("-o", "factories_of_builds.py"), "is a file"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_built(
    asked: list[dict[str, Any]], tmp_path: Path, factory: str, options: tuple[object, ...], said: str
) -> None:
    ended = built(tmp_path, factory, *options)

    assert ended.code == 2 and said in ended.err
    assert asked == [] and not (tmp_path / "engine").exists()


@pytest.mark.slow
def test_a_name_without_a_function_is_refused(asked: list[dict[str, Any]], tmp_path: Path) -> None:
    for name in ("factories_of_builds", "factories_of_builds:", ":plain", "no_such_module_at_all:plain"):
        ended = flatout("build", name, "-o", "engine", folder=tmp_path)
        assert ended.code == 2 and f"'{name}'" in ended.err


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("cc"), reason="no C compiler")
def test_an_engine_is_built_measured_and_steps(tmp_path: Path) -> None:
    from flatout.blocks.inference.native.engine import Engine

    (tmp_path / "factories_of_builds.py").write_text(FACTORIES)

    ended = built(tmp_path, "with_state", "--events", 100)

    assert ended.code == 0, ended.err
    assert "from Python" in ended.out and "in C" in ended.out
    engine = Engine.load(tmp_path / "engine")
    engine.step(torch.ones(1, 3))
    assert engine.step(torch.ones(1, 3)).tolist() == [[4.0, 4.0, 4.0]]
    assert (tmp_path / "engine" / "report.json").is_file()
