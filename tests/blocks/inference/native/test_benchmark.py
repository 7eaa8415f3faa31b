"""What is measured of an engine: numbers that belong together, whatever this machine's speed, and reasons where there is none."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from flatout.blocks.inference.native import benchmark as measuring
from flatout.blocks.inference.native.benchmark import measure_engine, rollout_errors
from flatout.blocks.inference.native.engine import Engine
from flatout.blocks.inference.native.library import Generated
from flatout.blocks.inference.native.program import Program
from flatout.blocks.inference.native.rollout import input_places, largest_errors, tensors_of
from flatout.core.errors import NativeError
from flatout.core.records.native import NativeReport

pytestmark = pytest.mark.skipif(not shutil.which("cc"), reason="no C compiler")


class Tracker(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.cell, self.head = nn.Embedding(7, 8), nn.GRUCell(8, 16), nn.Linear(16, 2)

    def forward(self, word: Tensor, h: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        h = self.cell(self.words(word), h)
        return scale * self.head(h), h


EXAMPLE = (torch.zeros(1, dtype=torch.int64), torch.zeros(1, 16), torch.ones(1, 2))


class Built:
    """An engine of native code, and what a report wants to know of it."""

    def __init__(self, cache: Path) -> None:
        torch.manual_seed(0)
        self.module = Tracker().eval()
        program = Program.of(self.module, EXAMPLE, "h")
        self.generated: Generated = program.generated()
        self.engine, self.compiled = Engine.compiled(
            self.generated, program=program, versions=("", ""), isas=("plain",), cache=cache
        )


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return Built(tmp_path_factory.mktemp("cache"))


def report_of(built: Built, *, is_native: bool = True) -> NativeReport:
    given = {"library": built.engine._library, "packed": built.generated.weights} if is_native else {}
    return measure_engine(
        built.engine, built.module, EXAMPLE, state="h", layers=built.generated.layers, num_events=300, **given
    )


@pytest.mark.slow
def test_a_report_has_all_figures_and_they_belong_together(built: Built) -> None:
    report = report_of(built)

    assert report.unknown == {}
    assert report.native is not None and report.python is not None and report.floor_s is not None
    for latency in (report.native, report.python):
        assert latency.num_events == 300
        assert 0 < latency.p50_s <= latency.p99_s <= latency.p999_s < 1
    assert report.floor_s > 0
    assert report.isa == built.engine.isa and report.weight_bytes == len(built.generated.weights)
    assert set(report.errors) == set(report.eager_errors) == {"y"}
    assert 0 < report.errors["y"] < 1e-5 and 0 < report.eager_errors["y"] < 1e-5


@pytest.mark.slow
def test_measuring_leaves_the_state_of_the_engine_and_the_random_numbers_alone(built: Built) -> None:
    built.engine.step(torch.tensor([3]), torch.ones(1, 2), out=torch.empty(1, 2))
    before, random = built.engine.snapshot(), torch.get_rng_state()
    weights = {name: tensor.clone() for name, tensor in built.module.state_dict().items()}

    report_of(built)

    assert built.engine.snapshot() == before
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in built.module.state_dict().items())


@pytest.mark.slow
def test_an_engine_without_a_library_is_measured_from_python_alone(built: Built) -> None:
    report = report_of(built, is_native=False)

    assert report.native is None and "no native library" in report.unknown["native"]
    assert report.python is not None and report.floor_s is not None
    assert report.state_bytes == 64


@pytest.mark.slow
def test_without_a_compiler_floor_and_native_latency_are_unknown(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> str:
        raise NativeError("no C compiler: none")

    monkeypatch.setattr(measuring, "find_compiler", missing)

    report = report_of(built)

    assert report.floor_s is None and report.native is None and report.python is not None
    assert report.unknown == {"native": "no C compiler: none", "floor_s": "no C compiler: none"}


@pytest.mark.slow
def test_other_weights_show_as_an_error(built: Built) -> None:
    where, tensors = input_places(built.module, EXAMPLE, "h"), tensors_of(EXAMPLE)
    torch.manual_seed(1)
    other = Tracker().eval()

    errors, eager_errors = rollout_errors(built.engine, other, tensors, where, seed=0)

    assert errors["y"] > 0.1 and eager_errors["y"] < 1e-5


@pytest.mark.slow
def test_a_module_that_cannot_be_float64_says_so(built: Built) -> None:
    class Stubborn(Tracker):
        def forward(self, word: Tensor, h: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
            out, h = super().forward(word, h.float(), scale)
            return out, h

    report = measure_engine(built.engine, Stubborn(), EXAMPLE, state="h", num_events=10)

    assert report.errors == {} and "cannot run in float64" in report.unknown["errors"]


def test_a_larger_buffer_has_a_larger_floor() -> None:
    meter = measuring.Meter()

    assert meter.floor_s(1 << 20) > meter.floor_s(1 << 10)


def test_errors_are_relative_to_the_largest_number_and_never_nan() -> None:
    exact = [[torch.tensor([4.0, 0.0]), torch.zeros(1)], [torch.tensor([-8.0, 0.0]), torch.zeros(1)]]
    found = [[torch.tensor([4.0, 1.0]), torch.zeros(1)], [torch.tensor([-8.0, 0.0]), torch.tensor([float("nan")])]]

    assert largest_errors(found, exact) == [1 / 8, float("inf")]
