"""The AOTInductor back end: carried steps are those of eager whatever the strides of states, and what it cannot do it says."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from flatout.blocks.inference.native import aoti
from flatout.blocks.inference.native.rollout import input_places, random_events, run, tensors_of
from flatout.core.errors import CheckpointError, NativeError, UsageError
from flatout.core.records.native import NativeManifest, Port

pytestmark = pytest.mark.long


class Mixed(nn.Module):
    """A vector, a window whose new value is a strided view, and a lag that is handed on as it is. State stands before inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(6, 10), nn.Linear(10, 3)

    def forward(self, h: Tensor, window: Tensor, x: Tensor, lag: Tensor) -> tuple[Tensor, ...]:
        h = self.cell(x, h)
        window = torch.cat([window, x[None]], 0)[1:].transpose(0, 1).contiguous().transpose(0, 1)
        out = self.head(h) + window.sum((0, 2)) + lag.mean()
        return out, h, window, x


def example() -> tuple[Tensor, ...]:
    torch.manual_seed(1)
    return torch.randn(1, 10), torch.zeros(4, 1, 6), torch.randn(1, 6), torch.zeros(1, 6)


STATE = ("h", "window", "lag")


@pytest.fixture(scope="module")
def module() -> nn.Module:
    torch.manual_seed(0)
    return Mixed()


@pytest.fixture(scope="module")
def built(module: nn.Module) -> aoti.AotiEngine:
    if not shutil.which("g++") and not shutil.which("clang++"):
        pytest.skip("no C++ compiler")
    # without the search over kernels, which is most of the time
    return aoti.build_aoti_engine(module, example(), state=STATE, configs={**aoti.CONFIGS, "max_autotune": False})


@pytest.fixture
def engine(built: aoti.AotiEngine) -> aoti.AotiEngine:
    built.reset()
    return built


def eager(module: nn.Module, xs: Sequence[Tensor]) -> list[Tensor]:
    where, tensors = input_places(module, example(), STATE), tensors_of(example())
    start = [tensors[at] for at in where.carried]
    return [out for (out,) in run(module, [(x,) for x in xs], where, dtype=torch.float32, start=start)]


def inputs(count: int) -> list[Tensor]:
    return list(torch.randn(count, 1, 6, generator=torch.Generator().manual_seed(2)))


@pytest.mark.slow
@pytest.mark.long
def test_carried_steps_are_those_of_eager(engine: aoti.AotiEngine, module: nn.Module) -> None:
    xs = inputs(30)

    found = torch.stack([torch.from_numpy(engine.step(x)) for x in xs])

    torch.testing.assert_close(found, torch.stack(eager(module, xs)), rtol=1e-5, atol=1e-5)
    assert [port.name for port in engine.manifest.state] == ["h", "window", "lag"]
    assert [port.name for port in engine.manifest.inputs] == ["x"]


@pytest.mark.slow
def test_an_input_that_is_written_over_later_does_not_change_the_state(engine: aoti.AotiEngine) -> None:
    x, other = inputs(2)
    engine.step(x)
    expected = engine.copy().step(other)

    engine.reset()
    own = x.clone()
    engine.step(own)
    own.fill_(100.0)

    assert (engine.step(other) == expected).all()


@pytest.mark.slow
def test_inputs_with_other_strides_and_of_other_kinds_give_the_same(engine: aoti.AotiEngine) -> None:
    x = inputs(1)[0]
    expected = engine.step(x)
    strided = torch.stack([x, x], -1)[..., 0]
    assert not strided.is_contiguous()

    for given in (strided, x.numpy(), strided.numpy(), x.numpy().tobytes()):
        engine.reset()
        assert (engine.step(given) == expected).all()


@pytest.mark.slow
def test_out_is_written_and_returned(engine: aoti.AotiEngine) -> None:
    x = inputs(1)[0]
    expected, out, array = engine.step(x), torch.empty(1, 3), np.empty((1, 3), np.float32)

    engine.reset()
    assert engine.step(x, out=out) is out
    engine.reset()
    engine.step(x, out=array)

    assert (out.numpy() == expected).all() and (array == expected).all()


@pytest.mark.slow
def test_many_events_are_the_same_as_one_after_the_other(engine: aoti.AotiEngine) -> None:
    xs = inputs(5)
    single = [engine.step(x).copy() for x in xs]

    engine.reset()

    assert (engine.step_many(torch.stack(xs)) == np.stack(single)).all()


@pytest.mark.slow
def test_a_snapshot_brings_the_state_back_bit_for_bit(engine: aoti.AotiEngine) -> None:
    first, second = inputs(2)
    engine.step(first)
    kept = engine.snapshot()
    expected = engine.step(second)

    engine.restore(kept)

    assert engine.snapshot() == kept and len(kept) == 40 + 96 + 24
    assert (engine.step(second) == expected).all()
    with pytest.raises(UsageError, match="160 bytes, got 159"):
        engine.restore(kept[:-1])


@pytest.mark.slow
def test_streams_have_states_of_their_own(engine: aoti.AotiEngine) -> None:
    xs, streams = torch.stack(inputs(3)), engine.streams(3)
    alone = [engine.streams(1) for _ in range(3)]

    for _ in range(4):
        together = streams.step(xs)
        apart = [one.step(x[None])[0] for one, x in zip(alone, xs, strict=True)]
        assert (together == np.stack(apart)).all()

    streams.restore(0, streams.snapshot(1))
    assert streams.snapshot(0) == alone[1].snapshot(0)
    streams.reset(2)
    assert streams.snapshot(2) == engine.snapshot() != streams.snapshot(1)


@pytest.mark.slow
def test_a_saved_engine_goes_on_from_its_beginning(engine: aoti.AotiEngine, tmp_path: Path) -> None:
    x = inputs(1)[0]
    expected = engine.step(x)

    engine.save(tmp_path / "engine")
    loaded = aoti.load_aoti_engine(tmp_path / "engine")

    assert (loaded.step(x) == expected).all()
    assert loaded.manifest == engine.manifest
    (tmp_path / "engine" / aoti.START).write_bytes(b"")
    with pytest.raises(CheckpointError, match="torn"):
        aoti.load_aoti_engine(tmp_path / "engine")
    (tmp_path / "engine" / aoti.PACKAGE).write_bytes(b"other")
    with pytest.raises(CheckpointError, match="not the package"):
        aoti.load_aoti_engine(tmp_path / "engine")


@pytest.mark.slow
def test_other_weights_are_refused_with_the_reason(engine: aoti.AotiEngine, module: nn.Module) -> None:
    with pytest.raises(NativeError, match="folded in and packed"):
        engine.load_weights(module.state_dict())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "0 inputs; this engine takes 1: x"),
        ((torch.zeros(1, 5),), "'x' is float32 of shape"),
        ((torch.zeros(1, 6, dtype=torch.float64),), "got torch.float64"),
        ((np.zeros((1, 6)),), "format 'd'"),
        ((b"123",), "'x' is float32 of shape .*: got 3 bytes, expected 24"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(engine: aoti.AotiEngine, arguments: tuple[Any, ...], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        engine.step(*arguments)


@pytest.mark.slow
def test_an_output_that_cannot_be_written_is_refused(engine: aoti.AotiEngine) -> None:
    with pytest.raises(UsageError, match="cannot be written in one piece"):
        engine.step(inputs(1)[0], out=torch.empty(3, 1, 2)[..., 0].T)
    with pytest.raises(UsageError, match="out has 2 buffers"):
        engine.step(inputs(1)[0], out=(torch.empty(1, 3), torch.empty(1, 3)))


# ------------------------------------------------------------------------------------------------ without compiling


class Integrator(nn.Module):
    def forward(self, x: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
        return 2 * (total + x), total + x


class Package:
    """Stands for a compiled Integrator that reads its state as if it lay transposed."""

    def boxed_run(self, tensors: list[Tensor]) -> list[Tensor]:
        x, total = tensors
        new = total.flatten().reshape(total.shape[::-1]).T + x
        return [2 * new, new]


def test_a_package_that_reads_its_state_wrongly_is_found_at_build(tmp_path: Path) -> None:
    module, examples = Integrator(), (torch.zeros(2, 3), torch.zeros(2, 3))
    shape = {"dtype": "float32", "shape": (2, 3)}
    manifest = NativeManifest(
        name="model",
        inputs=(Port(name="x", **shape),),
        outputs=(Port(name="y", **shape),),
        state=(Port(name="total", **shape),),
        isas=(aoti.ISA,),
        weights_bytes=0,
        weights_sum="",
        torch="",
        flatout="",
    )
    engine = aoti.AotiEngine(tmp_path, manifest, examples[1:], loader=Package())

    with pytest.raises(NativeError, match=r"wrong numbers: output 'y' is .* off"):
        aoti._verify(engine, module, examples, input_places(module, examples, "total"))


def test_no_compiler_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import cpp_builder
    from torch._inductor.exc import InvalidCxxCompiler

    def missing() -> str:
        raise InvalidCxxCompiler

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", missing)
    with pytest.raises(NativeError, match=r"no C\+\+ compiler"):
        aoti.build_aoti_engine(Integrator(), (torch.zeros(2), torch.zeros(2)), state="total")


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        return x + self.count


def test_a_module_that_changes_its_buffers_is_refused_and_left_as_it_was() -> None:
    module = Counting()
    with pytest.raises(NativeError, match="changes its buffer 'count'"):
        aoti.build_aoti_engine(module, (torch.zeros(2),))
    assert module.count.item() == 0 and module.training


def test_states_and_outputs_that_do_not_fit_are_refused() -> None:
    class Halved(nn.Module):
        def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
            return x, h[:1]

    class Only(nn.Module):
        def forward(self, x: Tensor, h: Tensor) -> Tensor:
            return h + x

    given = (torch.zeros(2), torch.zeros(2))
    with pytest.raises(UsageError, match=r"'h' is .2,. of torch.float32, and its new value .1,."):
        aoti.build_aoti_engine(Halved(), given, state="h")
    with pytest.raises(NativeError, match="one more at least"):
        aoti.build_aoti_engine(Only(), given, state="h")
    with pytest.raises(UsageError, match="state 'k' is no parameter"):
        aoti.build_aoti_engine(Only(), given, state="k")


def test_indices_are_valid_in_every_embedding() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.large, self.small = nn.Embedding(100, 2), nn.Embedding(3, 2)

        def forward(self, word: Tensor) -> Tensor:
            return self.large(word) + self.small(word)

    module, example_inputs = Words(), (torch.zeros(4, dtype=torch.int64),)
    events = random_events(module, example_inputs, input_places(module, example_inputs, ()), num_events=50, seed=0)

    assert {int(i) for (word,) in events for i in word} == {0, 1, 2}
