from __future__ import annotations

import array
import gc
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.blocks.inference.native import hand_made
from tests.blocks.inference.native.hand_made import average, compiled_engine, expected, pair, weights

from flatout.blocks.inference.native import library
from flatout.blocks.inference.native.engine import Engine
from flatout.blocks.inference.native.library import BusyError, CallError, find_extension
from flatout.core.errors import CheckpointError, NativeError, UsageError

X = np.array([1, 2, 3], np.float32)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def averages(cache: Path) -> Engine:
    return compiled_engine(average(), cache=cache)


@pytest.fixture(scope="module")
def pairs(cache: Path) -> Engine:
    return compiled_engine(pair(), cache=cache)


@pytest.fixture
def engine(averages: Engine) -> Engine:
    """Of its own: other tests' states and weights are not seen."""
    averages.load_weights({"w": torch.tensor(hand_made.W)})
    averages.reset()
    return averages


@pytest.fixture
def two(pairs: Engine) -> Engine:
    pairs.reset()
    return pairs


# ------------------------------------------------------------------------------------------------------------------ one event


@pytest.mark.slow
def test_steps_carry_the_state(engine: Engine) -> None:
    found = [engine.step(X) for _ in range(4)]

    assert np.array_equal(found, expected(np.tile(X, (4, 1))))
    assert found[0].dtype == np.float32 and found[0].shape == (2,)


def test_an_output_is_written_where_it_is_asked_for_and_returned(engine: Engine) -> None:
    first, second, y = np.zeros(2, np.float32), np.zeros(2, np.float32), expected(np.tile(X, (2, 1)))

    assert engine.step(X, first) is first
    assert engine.step(X, out=second) is second
    assert np.array_equal(first, y[0]) and np.array_equal(second, y[1])
    assert engine.step(X, out=None).shape == (2,)


@pytest.mark.parametrize(
    "of",
    [
        bytes,
        bytearray,
        memoryview,
        lambda x: array.array("f", x),
        lambda x: x.view(np.uint8),
        lambda x: x.reshape(1, 3),
        lambda x: x.astype(">f4").astype("<f4"),
        lambda x: np.ma.array(x).data.view(type("Sub", (np.ndarray,), {})),
        torch.from_numpy,
        lambda x: torch.nn.Parameter(torch.from_numpy(x)),
    ],
    ids=["bytes", "bytearray", "memoryview", "array", "uint8", "1x3", "little", "subclass", "tensor", "parameter"],
)
def test_whatever_holds_the_numbers_they_are_the_same(engine: Engine, of: Callable[[Any], object]) -> None:
    given = of(X.copy())

    assert engine.step(given).tobytes() == expected(X[None])[0].astype(np.float32).tobytes()


@pytest.mark.parametrize("make", [lambda: bytearray(8), lambda: torch.zeros(2), lambda: array.array("f", [0, 0])])
def test_outputs_may_be_any_memory_that_can_be_written(engine: Engine, make: Callable[[], Any]) -> None:
    y = make()

    assert engine.step(X, y) is y
    assert (
        bytes(memoryview(y.numpy() if isinstance(y, torch.Tensor) else y))
        == expected(X[None])[0].astype("f4").tobytes()
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (np.zeros(4, np.float32), r"'x' .*got 16 bytes, expected 12"),
        (np.zeros(0, np.float32), r"'x' .*got 0 bytes, expected 12"),
        (b"12345678", r"'x' .*got 8 bytes, expected 12"),
        (np.zeros(3, np.float64), r"'x' is float32.*format 'd'"),
        (np.zeros(3, np.int32), r"'x' is float32.*format 'i'"),
        (np.zeros(3, ">f4"), r"'x' is float32.*format '>f'"),
        (np.zeros(3, "f4,f4")["f0"], r"'x'.*not contiguous; give numpy.ascontiguousarray"),
        (np.zeros(6, np.float32)[::2], r"'x'.*not contiguous"),
        (torch.zeros(6)[::2], r"'x'.*not contiguous; give tensor.contiguous"),
        (torch.zeros(3, dtype=torch.float64), r"'x' .*got a tensor of torch.float64; convert it"),
        (torch.zeros(4), r"'x' .*got 16 bytes, expected 12"),
        (torch.zeros(3, device="meta"), r"'x'.*not on the CPU"),
        (torch.zeros(1, dtype=torch.complex64).conj().imag.expand(1), r"'x'.*resolve_neg"),
        ([1.0, 2.0, 3.0], r"'x'.*got 'list'; give a NumPy array"),
        (None, r"'x'.*got 'NoneType'"),
        (np.zeros(3, "M8[s]"), r"'x'.*cannot include dtype 'M'"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_an_input_that_does_not_fit_is_refused_and_changes_nothing(engine: Engine, given: Any, message: str) -> None:
    before = engine.snapshot()

    for call in (engine.step, lambda x: engine.step(x, out=bytearray(8))):
        with pytest.raises(CallError, match=message):
            call(given)

    assert engine.snapshot() == before
    assert issubclass(CallError, ValueError) and issubclass(CallError, UsageError)


@pytest.mark.parametrize(
    ("out", "message"),
    [
        (b"12345678", "'y'.*read-only"),
        (np.zeros(3, np.float32), "'y'.*got 12 bytes, expected 8"),
        (np.zeros(2, np.float64), "'y' is float32.*format 'd'"),
        (np.zeros(4, np.float32)[::2], "'y'.*not contiguous"),
        (np.broadcast_to(np.zeros(2, np.float32), (1, 2)), "'y'.*read-only"),
    ],
)
def test_an_output_that_does_not_fit_is_refused(engine: Engine, out: Any, message: str) -> None:
    for call in (lambda: engine.step(X, out), lambda: engine.step(X, out=out)):
        with pytest.raises(CallError, match=message):
            call()


def test_an_output_over_an_input_is_refused(engine: Engine) -> None:
    memory = np.ones(5, np.float32)

    with pytest.raises(CallError, match="'y' lies in the memory of 'x'"):
        engine.step(memory[:3], memory[2:4])
    assert np.array_equal(engine.step(memory[:3], memory[3:]), [6, 15])


def test_arguments_are_counted(two: Engine) -> None:
    a, k, on = X, np.int64(2).tobytes(), b"\1"

    for call in (
        lambda: two.step(a, k),
        lambda: two.step(a, k, on, bytearray(12)),
        lambda: two.step(a, k, on, out=bytearray(12)),
        lambda: two.step(a, k, on, out=(bytearray(12),)),
        lambda: two.step(a, k, on, bytearray(12), bytearray(8), out=(bytearray(12), bytearray(8))),
        lambda: two.step(a, k, on, into=bytearray(12)),
        two.step,
        lambda: two.step_many(a, k),
    ):
        with pytest.raises(TypeError):
            call()


def test_several_inputs_and_outputs_of_several_types(two: Engine) -> None:
    k, on = np.array(3, np.int64), np.array([True])

    s, c = two.step(X, k, on)
    assert np.array_equal(s, 3 * X) and np.array_equal(c, [3, 1])
    assert (s.dtype, c.dtype, s.shape, c.shape) == (np.float32, np.int32, (3,), (2,))

    s, c = np.empty(3, np.float32), np.empty(2, np.int32)
    by_position = two.step(X, k, ~on, s, c)
    assert by_position[0] is s and by_position[1] is c
    assert np.array_equal(s, 0 * X) and np.array_equal(c, [3, 2])
    both = (s, c)
    assert two.step(torch.from_numpy(X), torch.tensor(3), torch.tensor([True]), out=both) is both
    assert np.array_equal(s, 3 * X) and np.array_equal(c, [3, 3])


def test_types_of_several_inputs_are_told_apart(two: Engine) -> None:
    good = (X, np.array(3, np.int64), np.array([True]))

    for at, bad in (
        (1, np.array(3.0)),
        (1, np.array(3, np.uint64)),
        (2, np.array([1], np.float16)),
        (1, torch.tensor(3.0)),
    ):
        with pytest.raises(CallError, match=r"'k' is int64|'on' is bool"):
            two.step(*good[:at], bad, *good[at + 1 :])
    assert np.array_equal(two.step(good[0], np.array(3, np.longlong), good[2])[1], [3, 1])


def test_step_is_the_function_of_the_extension_itself(averages: Engine) -> None:
    assert type(averages.step).__name__ == "builtin_function_or_method"


# -------------------------------------------------------------------------------------------------------- many events, streams


def test_step_many_gives_the_bits_of_single_steps(engine: Engine) -> None:
    x = np.random.default_rng(0).standard_normal((50, 3), np.float32)
    one_by_one = np.array([engine.step(row) for row in x])
    state = engine.snapshot()
    engine.reset()

    at_once = engine.step_many(x)

    assert at_once.tobytes() == one_by_one.tobytes() and at_once.shape == (50, 2)
    assert engine.snapshot() == state
    engine.reset()
    y = torch.empty(50, 2)
    assert engine.step_many(torch.from_numpy(x), y) is y
    assert y.numpy().tobytes() == one_by_one.tobytes()


def test_step_many_takes_as_many_of_every_input(two: Engine) -> None:
    a, k, on = np.ones((4, 3), np.float32), np.arange(4), np.ones((4, 1), bool)

    s, c = two.step_many(a, k, on)
    assert np.array_equal(s, k[:, None] * a) and np.array_equal(c, np.stack((k, k + 1), 1))
    with pytest.raises(CallError, match=r"'k' is int64 of shape \(\): got 24 bytes"):
        two.step_many(a, k[:3], on)
    with pytest.raises(
        CallError, match=r"'a' is float32 of shape \(3,\): got 44 bytes, no multiple of the 12 of one event"
    ):
        two.step_many(a.ravel()[:11], k, on)
    with pytest.raises(CallError, match="'c' is int32"):
        two.step_many(a, k, on, out=(np.empty((4, 3), np.float32), np.empty((5, 2), np.int32)))


def test_no_events_are_none(engine: Engine) -> None:
    assert engine.step_many(np.empty((0, 3), np.float32)).shape == (0, 2)
    assert engine.snapshot() == bytes(8)


def test_streams_are_engines_side_by_side(engine: Engine) -> None:
    x = np.random.default_rng(1).standard_normal((7, 4, 3), np.float32)
    streams = engine.streams(4)

    first = streams.step(x[0])
    rest = streams.step_many(x[1:])

    assert (first.shape, rest.shape, streams.num_streams) == ((4, 2), (6, 4, 2), 4)
    for i in range(4):
        engine.reset()
        alone = engine.step_many(np.ascontiguousarray(x[:, i]))
        assert np.concatenate((first[None], rest))[:, i].tobytes() == alone.tobytes()
        assert streams.snapshot(i) == engine.snapshot()


def test_one_stream_is_reset_and_restored_alone(engine: Engine) -> None:
    streams = engine.streams(3)
    streams.step(np.ones((3, 3), np.float32))
    kept = [streams.snapshot(i) for i in range(3)]

    streams.reset(1)
    assert [streams.snapshot(i) for i in range(3)] == [kept[0], bytes(8), kept[2]]
    streams.restore(1, kept[0])
    assert streams.snapshot(1) == kept[0]
    copied = streams.copy()
    streams.reset()
    assert [streams.snapshot(i) for i in range(3)] == [bytes(8)] * 3
    assert [copied.snapshot(i) for i in range(3)] == [kept[0], kept[0], kept[2]]


def test_streams_refuse_what_is_not_theirs(engine: Engine) -> None:
    streams = engine.streams(3)

    for call in (
        lambda: streams.snapshot(3),
        lambda: streams.reset(-1),
        lambda: streams.restore(3, bytes(8)),
        lambda: engine.streams(0),
    ):
        with pytest.raises(CallError, match="stream"):
            call()
    with pytest.raises(CallError, match="'x' is float32"):
        streams.step(np.zeros((2, 3), np.float32))
    with pytest.raises(CallError, match="'x' is float32"):
        streams.step_many(np.zeros((5, 3), np.float32))


# ---------------------------------------------------------------------------------------------------------------------- state


@given(at=st.integers(0, 20), events=st.integers(0, 20), seed=st.integers(0, 9))
def test_a_restored_state_gives_the_same_bits(averages: Engine, at: int, events: int, seed: int) -> None:
    engine = averages
    x = np.random.default_rng(seed).standard_normal((at + events, 3), np.float32)
    engine.reset()
    engine.step_many(x[:at])
    snapshot, copied = engine.snapshot(), engine.copy()
    y = engine.step_many(x[at:])

    engine.restore(snapshot)

    assert engine.step_many(x[at:]).tobytes() == y.tobytes()
    assert copied.step_many(x[at:]).tobytes() == y.tobytes()
    assert copied.snapshot() == engine.snapshot()


def test_a_snapshot_of_another_size_is_refused(engine: Engine) -> None:
    with pytest.raises(CallError, match="a snapshot of this model has 8 bytes, got 9"):
        engine.restore(bytes(9))


# -------------------------------------------------------------------------------------------------------------------- weights


def test_other_weights_are_for_copies_and_streams_too(engine: Engine) -> None:
    copied, streams = engine.copy(), engine.streams(2)

    copied.load_weights(weights(1.0))

    assert np.array_equal(engine.step(X), [6, 6]) and np.array_equal(copied.step(X), [6, 6])
    assert np.array_equal(streams.step(np.tile(X, (2, 1))), np.full((2, 2), 6))


def test_weights_of_another_size_are_refused(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hand_made.Packing, "packed", lambda *_, **__: bytes(60))

    with pytest.raises(NativeError, match="60 bytes of weights, 64 are needed"):
        engine.load_weights(weights(1.0))


def test_a_call_under_way_ends_with_the_weights_it_began_with(averages: Engine) -> None:
    """The first weight 1000 makes step_many slow: it is caught in the middle."""
    engine = averages.copy()
    engine.load_weights(weights(1000.0))
    engine.reset()
    found: list[np.ndarray] = []
    x = np.ones((100, 3), np.float32)
    thread = threading.Thread(target=lambda: found.append(engine.step_many(x)))
    thread.start()
    _wait_until_busy(engine)

    engine.load_weights(weights(1.0))
    assert thread.is_alive()  # or the test shows nothing
    thread.join()

    assert np.allclose(found[0], expected(x, np.full((2, 3), 1000.0)), rtol=1e-6)
    engine.reset()
    assert np.allclose(engine.step_many(x), expected(x, np.ones((2, 3))), rtol=1e-6)


def test_rows_are_of_one_set_of_weights_while_another_thread_changes_them(averages: Engine) -> None:
    engine, stop = averages.copy(), threading.Event()
    x = np.ones((64, 3), np.float32)
    known = {_alone(engine, value, x) for value in (1.0, 2.0)}

    def swap() -> None:
        while not stop.is_set():
            engine.load_weights(weights(2.0))
            engine.load_weights(weights(1.0))

    engine.load_weights(weights(1.0))
    thread = threading.Thread(target=swap)
    thread.start()
    seen = set()
    try:
        for _ in range(300):
            engine.reset()
            seen.add(engine.step_many(x).tobytes())
    finally:
        stop.set()
        thread.join()
    assert seen <= known and len(known) == 2


def _alone(engine: Engine, value: float, x: np.ndarray) -> bytes:
    engine.load_weights(weights(value))
    engine.reset()
    outputs: bytes = engine.step_many(x).tobytes()
    return outputs


def test_two_threads_in_one_engine_are_refused(averages: Engine) -> None:
    engine = averages.copy()
    engine.load_weights(weights(1000.0))
    y = np.zeros(2, np.float32)
    thread = threading.Thread(target=engine.step_many, args=(np.ones((100, 3), np.float32),))
    thread.start()
    _wait_until_busy(engine)

    for call in (
        lambda: engine.step(X, y),
        lambda: engine.step_many(np.ones((2, 3), np.float32)),
        engine.reset,
        engine.snapshot,
        lambda: engine.restore(bytes(8)),
        engine.copy,
    ):
        with pytest.raises(BusyError, match="stepping in another thread"):
            call()
    assert thread.is_alive() and issubclass(BusyError, RuntimeError)
    thread.join()
    assert np.array_equal(y, [0, 0])
    engine.step(X, y)


def test_threads_with_copies_do_not_disturb_each_other(engine: Engine) -> None:
    x = np.random.default_rng(2).standard_normal((4, 200, 3), np.float32)
    found: dict[int, np.ndarray] = {}
    copies = [engine.copy() for _ in range(4)]
    threads = [
        threading.Thread(
            target=lambda i=i: found.update(
                {i: np.concatenate([copies[i].step_many(x[i, t : t + 1]) for t in range(200)])}
            )
        )
        for i in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    for i in range(4):
        engine.reset()
        assert found[i].tobytes() == engine.step_many(x[i]).tobytes()


def _wait_until_busy(engine: Engine) -> None:
    for _ in range(10_000):
        try:
            engine.snapshot()
        except BusyError:
            return
        threading.Event().wait(0.0005)
    raise AssertionError("step_many did not begin")


# --------------------------------------------------------------------------------------------------------------------- memory


@pytest.mark.slow
@pytest.mark.long
def test_100_000_steps_leave_no_reference_behind(averages: Engine, pairs: Engine) -> None:
    engine, two = averages.copy(), pairs.copy()
    y, tensor, good = np.zeros(2, np.float32), torch.ones(3), X.tobytes()
    k, on, both = np.array(3), np.array([True]), (np.zeros(3, np.float32), np.zeros(2, np.int32))
    objects = (X, y, tensor, good, k, on, both, *both, engine._caller, None, True)

    def steps(count: int) -> None:
        for _ in range(count):
            engine.step(X, y)
            engine.step(tensor, out=y)
            engine.step(good)
            engine.step_many(X)
            two.step(X, k, on, out=both)
            two.step(X, k, on, *both)
            two.step(X, k, on)
            engine.restore(engine.snapshot())
            for bad in ((good[1:],), (X, good), (y[::-1],), (tensor, tensor), (X, y, y), ([],)):
                with suppress(CallError, TypeError):
                    engine.step(*bad)

    steps(20)
    gc.collect()
    before = [sys.getrefcount(one) for one in objects[:-2]]
    tracemalloc.start()
    try:
        steps(10)
        start = tracemalloc.get_traced_memory()[0]
        steps(7000)  # 14 calls each
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0] - start
    finally:
        tracemalloc.stop()

    assert [sys.getrefcount(one) for one in objects[:-2]] == before
    assert grown < 20_000


def test_engines_copies_and_streams_are_freed(averages: Engine) -> None:
    caller_ = averages._caller
    weights_ = averages._weights
    before = sys.getrefcount(caller_), sys.getrefcount(weights_)

    for _ in range(100):
        copied = averages.copy()
        streams = copied.streams(3)
        streams.copy().step(np.ones((3, 3), np.float32))
    del copied, streams

    assert (sys.getrefcount(caller_), sys.getrefcount(weights_)) == before


def test_buffers_are_let_go_of(engine: Engine) -> None:
    x, y = bytearray(X.tobytes()), bytearray(8)
    engine.step(x, y)
    engine.step_many(x, y)
    with pytest.raises(CallError):
        engine.step(x, bytearray(9))
    with pytest.raises(CallError):
        engine.step_many(x + b"1", y)

    x.extend(b"1")  # BufferError while anybody holds it
    y.extend(b"1")


# -------------------------------------------------------------------------------------------------------------- the extension


def test_the_extension_is_compiled_once(cache: Path, averages: Engine) -> None:
    files = {path: path.stat().st_mtime_ns for path in cache.glob("flatout_caller-*")}

    assert len(files) == 1
    assert find_extension(cache=cache) is find_extension(cache=cache)
    assert {path: path.stat().st_mtime_ns for path in cache.glob("flatout_caller-*")} == files


def test_without_a_compiler_the_extension_compiled_before_is_taken(
    cache: Path, averages: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flatout.core.runtime.c_compiler.shutil.which", lambda name: None)

    assert find_extension(cache=cache).name.startswith("flatout_caller-")
    with pytest.raises(NativeError, match=r"no C compiler.*an engine's folder brings that along"):
        find_extension(cache=tmp_path)


def test_without_a_compiler_the_extension_that_was_saved_is_taken(
    averages: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    averages.save(tmp_path / "model")
    averages.reset()
    monkeypatch.setattr("flatout.core.runtime.c_compiler.shutil.which", lambda name: None)

    loaded = Engine.load(tmp_path / "model", cache=tmp_path / "empty")

    assert Path(loaded._extension.module.__file__).parent == tmp_path / "model"
    assert loaded.step(X).tobytes() == averages.step(X).tobytes()


def test_without_headers_the_reason_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library.sysconfig, "get_path", lambda name: str(tmp_path))

    with pytest.raises(NativeError, match=r"no headers of Python.*install python3-dev"):
        find_extension(cache=tmp_path / "cache")


def test_a_cache_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(NativeError, match="cannot create the folder"):
        find_extension(cache=tmp_path / "file" / "cache")


def test_ports_that_are_not_the_librarys_are_refused(averages: Engine, pairs: Engine) -> None:
    one, two = averages, pairs
    wide = one._parts._replace(manifest=hand_made.with_dtype(one.manifest, dtype="int64"))
    own = {"library": one._library, "extension": one._extension}

    with pytest.raises(CheckpointError, match="has other inputs or outputs than were described"):
        Engine(one._parts, library=two._library, extension=two._extension, weights=two._weights)
    with pytest.raises(CheckpointError, match="'x' has 24 bytes by its shape, 12 in the library"):
        Engine(wide, **own, weights=one._weights)
    with pytest.raises(CheckpointError, match="60 bytes of weights, the library needs 64"):
        Engine(one._parts, **own, weights=one._extension.weights(bytes(60)))


def test_an_engine_is_imported_without_torch() -> None:
    code = "import flatout.blocks.inference.native.engine, sys; assert not {'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
