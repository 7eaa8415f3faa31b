"""What the engine promises of its C: no calls, no branches on data, the same bits everywhere, nothing read or written astray."""

from __future__ import annotations

import ctypes
import hashlib
import re
import shutil
import struct
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
import torch
from tests.blocks.inference.native.bare import Array, Bare, flags, guarded, run
from tests.blocks.inference.native.known_models import events, generated, known_model
from torch import Tensor, nn
from torch.nn import functional as F

from flatout.blocks.inference.native import program
from flatout.blocks.inference.native.library import Generated
from flatout.blocks.inference.native.packing import rounded_to_int8
from flatout.blocks.inference.native.program import Program
from flatout.core.errors import NativeError, UsageError
from flatout.core.runtime.c_compiler import STRICT_FLAGS, cpu_instruction_set, instruction_sets

KINDS = ("mlp", "gru", "lstm", "tcn", "windowed", "book")
_PURE = {"memcpy", "memset", "memmove", "memcmp", "fmaf", "fma", "floorf", "ceilf", "truncf", "rintf", "rint", "sqrtf"}
_BEST = cpu_instruction_set() or "plain"
_HERE = Path(__file__).parent
_TABLE = Path(program.__file__).parent / "c"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (shutil.which("gcc") and _BEST != "plain"), reason="needs gcc, and a CPU with AVX2"),
]


_Kept = TypeVar("_Kept")


class _Made(dict[str, _Kept]):
    """By kind, each made when it is first asked for: workers that share this file's tests need not make all."""

    def __init__(self, make: Callable[[str], _Kept]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, kind: str) -> _Kept:
        self[kind] = found = self._make(kind)
        return found


@pytest.fixture(scope="module")
def texts() -> dict[str, Generated]:
    return _Made(generated)


@pytest.fixture(scope="module")
def bares(texts: dict[str, Generated], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Bare]:
    folder = tmp_path_factory.mktemp("bare")
    return _Made(lambda kind: Bare(texts[kind], folder))


# ------------------------------------------------------------------------------------------------- what the object is made of


@pytest.mark.parametrize("isa", ["avx2", "plain"])
def test_the_object_calls_nothing_but_copies_of_memory_and_pure_functions(
    isa: str, texts: dict[str, Generated], tmp_path: Path
) -> None:
    source, made_of = tmp_path / "model.c", tmp_path / "model.o"
    source.write_text(texts["everything"].source)
    run(["gcc", *flags(isa), "-O1", f"-DFLATOUT_ISA={isa}", "-DFLATOUT_PART", "-c", str(source), "-o", str(made_of)])
    names = subprocess.run(["nm", "-u", str(made_of)], capture_output=True, text=True, check=True).stdout.split()
    assert {n for n in names if n != "U"} <= _PURE


@pytest.mark.parametrize(
    ("compiler", "kinds"), [("gcc", ("windowed", "book")), ("clang-14", KINDS)], ids=["gcc", "clang-14"]
)
@pytest.mark.long
def test_compilers_have_nothing_to_say(
    compiler: str, kinds: tuple[str, ...], texts: dict[str, Generated], tmp_path: Path
) -> None:
    """To gcc's -Werror all kinds go as `Bare`, and `everything` for each set of instructions."""
    if not shutil.which(compiler):
        pytest.skip(f"{compiler} is not here")
    for kind in kinds:
        source = tmp_path / f"{kind}.c"
        source.write_text(texts[kind].source)
        how = [*STRICT_FLAGS, "-O1", *instruction_sets("x86_64")["avx2"], "-Werror"]
        assert run([compiler, *how, "-c", str(source), "-o", str(tmp_path / "x.o")]) == ""


# ----------------------------------------------------------------------------------------------------------- driven from C


def _driver(text: Generated, folder: Path, options: Sequence[str], compiler: str = "gcc") -> list[str]:
    """A program that steps the model; what it takes after its own name and the number of events."""
    (folder / "model.c").write_text(text.source)
    (folder / "weights").write_bytes(text.weights)
    out = folder / "driven"
    run(
        [
            compiler,
            *STRICT_FLAGS,
            *options,
            f"-I{_TABLE}",
            str(_HERE / "driven.c"),
            str(folder / "model.c"),
            "-o",
            str(out),
            "-lm",
        ]
    )
    return [str(out)]


def _inputs(folder: Path, arrays: Sequence[Array], name: str = "inputs") -> list[str]:
    """The rest of what the driver takes."""
    path = folder / name
    path.write_bytes(b"".join(a[i].tobytes() for i in range(len(arrays[0])) for a in arrays))
    return [str(path), str(folder / "weights"), str(folder / "outputs")]


def _strange(kind: str, n: int = 50) -> list[Array]:
    """Numbers of all kinds."""
    generator, found = np.random.default_rng(1), []
    strange = [np.nan, np.inf, -np.inf, 1e-40, -1e-42, 3e38, -3e38, 0.0, -0.0, 1e-20, 1e19]
    for array in (t.numpy().copy() for t in events(kind, n)):
        if array.dtype == np.float32:
            where = generator.random(array.shape) < 0.3
            array[where] = generator.choice(np.array(strange, np.float32), int(where.sum()))
        found.append(array)
    return found


@pytest.mark.long
def test_sanitizers_find_nothing_in_many_events(texts: dict[str, Generated], tmp_path: Path) -> None:
    options = ["-O0", "-g", "-march=x86-64-v3", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    command = _driver(texts["everything"], tmp_path, options)
    assert run([*command, "2000", *_inputs(tmp_path, _strange("everything"))]) == ""


@pytest.mark.skipif(not shutil.which("valgrind"), reason="needs valgrind")
@pytest.mark.parametrize("kind", ["gru", "windowed"])
@pytest.mark.long
def test_memcheck_finds_nothing_in_many_events(kind: str, texts: dict[str, Generated], tmp_path: Path) -> None:
    """Nothing that comes out depends on memory that was not initialised; nor does anything that decides."""
    command = _driver(texts[kind], tmp_path, ["-O2", "-g", "-march=x86-64-v3"])
    count = "10000" if kind == "gru" else "300"
    rest = _inputs(tmp_path, [t.numpy() for t in events(kind, 50)])
    run(["valgrind", "--error-exitcode=9", "-q", *command, count, *rest])


@pytest.mark.skipif(not shutil.which("valgrind"), reason="needs valgrind")
@pytest.mark.parametrize(
    ("kind", "compiler"),
    [("everything", "gcc"), ("mlp in 8 bits", "gcc"), ("windowed", "clang-14"), ("gru", "clang-14")],
)
@pytest.mark.long
def test_as_many_instructions_run_whatever_the_numbers_are(
    kind: str, compiler: str, texts: dict[str, Generated], tmp_path: Path
) -> None:
    if not shutil.which(compiler):
        pytest.skip(f"{compiler} is not here")
    text = texts[kind] if kind != "mlp in 8 bits" else generated("mlp", {"0.weight": "int8", "3.weight": "int8"})
    command = _driver(text, tmp_path, ["-march=x86-64-v3"], compiler)
    counts, usual = {}, [t.numpy() for t in events(text.name, 4)]
    for name, arrays in (
        ("usual_", usual),
        ("nan____", [np.nan * a for a in usual]),
        ("strange", _strange(text.name, 4)),
    ):
        rest = _inputs(tmp_path, arrays, name)
        tool = ["valgrind", "--tool=callgrind", "--toggle-collect=fo_step", f"--callgrind-out-file={tmp_path / 'out'}"]
        counts[name] = int(re.findall(r"Collected : (\d+)", run([*tool, *command, "4", *rest]))[0])
    assert len(set(counts.values())) == 1, counts
    assert counts["usual_"] > 1000


def test_the_control_register_is_as_before_whatever_it_was(texts: dict[str, Generated], tmp_path: Path) -> None:
    command = _driver(texts["gru"], tmp_path, ["-O1", "-march=x86-64-v3"])
    run([*command, "100", *_inputs(tmp_path, _strange("gru")), "modes"])  # the driver ends with 4 where it is not


def test_numbers_too_small_to_be_normal_are_zeros_inside(tmp_path: Path) -> None:
    class Halved(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x * 0.5, x * 1e30

    bare = Bare(Program.of(Halved(), (torch.zeros(1, 4),)).generated(), tmp_path)
    half, large = bare.step(bare.states(), [np.array([[1.2e-38, 1e-40, 1.0, -1.2e-38]], np.float32)])
    assert half.tolist() == [[0.0, 0.0, 0.5, 0.0]]
    assert large[0, 1] == 0.0
    assert large[0, 0] > 0
    assert np.float32(1.2e-38) * np.float32(0.5) > 0  # and here they are not


@pytest.mark.long
def test_memory_of_inputs_and_outputs_may_begin_anywhere(texts: dict[str, Generated], tmp_path: Path) -> None:
    bare = Bare(texts["mlp"], tmp_path, extra=("-O3",))
    inputs = events("mlp", 1)[0][0].numpy()
    expected = bare.step(bare.states(), [inputs])
    given = np.zeros(inputs.nbytes + 1, np.uint8)
    given[1:] = inputs.view(np.uint8).ravel()
    outs = [np.zeros(o.nbytes + 1, np.uint8) for o in expected]
    kinds = [ctypes.c_void_p] * 5
    x, y = (
        (ctypes.c_void_p * 1)(given.ctypes.data + 1),
        (ctypes.c_void_p * len(outs))(*(o.ctypes.data + 1 for o in outs)),
    )
    work, states = guarded(bare.table.work_bytes), bare.states()
    ctypes.CFUNCTYPE(None, *kinds)(bare.table.step)(
        bare.weights.ctypes.data, states.ctypes.data, work.ctypes.data, ctypes.addressof(x), ctypes.addressof(y)
    )
    assert [o[1:].tobytes() for o in outs] == [e.tobytes() for e in expected]


# --------------------------------------------------------------------------------------------------------------- the same bits


@pytest.mark.parametrize("kind", ["gru", "lstm", "tcn", "windowed", "book"])
def test_a_replay_after_reset_and_after_restore_has_the_same_bits(kind: str, bares: dict[str, Bare]) -> None:
    bare, arrays = bares[kind], [t.numpy() for t in events(kind, 23)]
    states, outs, snapshot = bare.states(), [], b""
    for i in range(23):
        if i == 11:
            snapshot = bare.snapshot(states)
        outs.append([o.tobytes() for o in bare.step(states, [a[i] for a in arrays])])
    last = bare.snapshot(states)
    again = bare.states()
    assert [[o.tobytes() for o in bare.step(again, [a[i] for a in arrays])] for i in range(23)] == outs
    bare.restore(states, snapshot)
    assert bare.snapshot(states) == snapshot
    assert [[o.tobytes() for o in bare.step(states, [a[i] for a in arrays])] for i in range(11, 23)] == outs[11:]
    assert bare.snapshot(states) == last == bare.snapshot(again)


def _own_isas() -> list[str]:
    known = list(instruction_sets("x86_64"))
    return known[known.index(_BEST) :]


@pytest.mark.parametrize("kind", ["everything"])
@pytest.mark.long
def test_every_set_of_instructions_gives_the_same_bits(kind: str, texts: dict[str, Generated], tmp_path: Path) -> None:
    """NaN is NaN, whatever it carries."""
    arrays, found = _strange(kind, 20), {}
    for isa in _own_isas():
        bare = Bare(texts[kind], tmp_path, isa=isa)
        found[isa] = [o for n in (1, 8) for o in _streamed(bare, arrays, n)]
    first, *others = found.values()
    for other in others:
        assert all(_same(a, b) for a, b in zip(first, other, strict=True))


def _streamed(bare: Bare, arrays: list[Array], n: int) -> list[Array]:
    """The outputs of n streams over a few events."""
    states = bare.states(n)
    return [o for i in range(0, 8, n) for o in bare.step_streams(states, [a[i : i + n] for a in arrays], n)]


def _same(a: Array, b: Array) -> bool:
    if a.dtype != np.float32:
        return bool((a == b).all())
    return bool(((a.view(np.uint32) == b.view(np.uint32)) | (np.isnan(a) & np.isnan(b))).all())


def test_eight_bits_are_the_same_on_every_set_of_instructions_and_near_to_eager(tmp_path: Path) -> None:
    model, _, _ = known_model("mlp")
    text = generated("mlp", {"0.weight": "int8", "3.weight": "int8"})
    assert [layer.precision for layer in text.layers] == ["int8", "int8"]
    arrays, found = [events("mlp", 20)[0].numpy()], []
    for isa in _own_isas():
        found.append(_streamed(Bare(text, tmp_path, isa=isa), arrays, 1))
    assert all(_same(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))
    with torch.no_grad():
        exact = model(torch.from_numpy(arrays[0][:8, 0])).numpy()
    assert 0 < np.abs(np.concatenate(found[0])[:, 0] - exact).max() < 0.02 * np.abs(exact).max()


@pytest.mark.parametrize(("k", "scale"), [(1300, 1.0), (512, 0.0), (513, 0.0), (3, 1e-3)])
def test_eight_bits_of_any_depth_are_the_product_of_the_rounded_weights(k: int, scale: float, tmp_path: Path) -> None:
    torch.manual_seed(k)
    model = nn.Linear(k, 37)
    if not scale:  # the largest sum that there is: every number at its largest, and of one sign
        nn.init.constant_(model.weight, 0.5)
    text = Program.of(model, (torch.zeros(1, k),)).generated(precision={"weight": "int8"})
    x = torch.randn(1, k) * scale if scale else torch.full((1, k), 3.0)
    found = [(bare := Bare(text, tmp_path, isa=isa)).step(bare.states(), [x.numpy()])[0] for isa in _own_isas()]
    assert all(_same(found[0], other) for other in found[1:])
    whole, step = rounded_to_int8(model.weight.detach().T)
    held = whole.double() * step.double()
    exact = (x.double() @ held + model.bias.detach().double()).numpy()
    rounding = float(x.abs().max()) / 65024 * held.abs().sum(0).numpy()  # half a step of each input
    assert (np.abs(found[0] - exact) <= rounding + 1e-6 * np.abs(exact).max()).all()


# ------------------------------------------------------------------------------------------------------------------- as eager


@pytest.mark.parametrize("kind", ["gru", "lstm"])
def test_the_error_stays_small_over_twenty_thousand_events(kind: str, bares: dict[str, Bare]) -> None:
    model, _, _ = known_model(kind)
    cell, n = model.cell, 20_000  # type: ignore[union-attr]
    whole = (nn.GRU if kind == "gru" else nn.LSTM)(cell.input_size, cell.hidden_size)
    whole.load_state_dict({f"{name}_l0": t for name, t in cell.state_dict().items()})
    x = events(kind, n, scale=2.0)[0]
    with torch.no_grad():
        exact = model.head.double()(whole.double()(x.double())[0])  # type: ignore[union-attr, operator]
    _assert_near(bares[kind].step_many(bares[kind].states(), [x.numpy()], n)[0], exact)


def test_the_error_of_a_tcn_stays_small_over_twenty_thousand_events(bares: dict[str, Bare]) -> None:
    model, _, _ = known_model("tcn")
    x = events("tcn", 20_000)[0]
    with torch.no_grad():
        wide = model.double()
        line = x.double().permute(1, 2, 3, 0).reshape(1, 4, -1)
        y = F.gelu(wide.first(F.pad(line, (2, 0))))  # type: ignore[operator]
        y = F.relu(wide.second(F.pad(y, (4, 0))))  # type: ignore[operator]
        exact = wide.head(y).reshape(-1, 1, 1, 1)  # type: ignore[operator]
    ours = bares["tcn"].step_many(bares["tcn"].states(), [x.numpy()], 20_000)[0]
    _assert_near(ours, exact)


def _assert_near(ours: Array, exact: Tensor) -> None:
    error = (torch.from_numpy(ours.copy()).double() - exact.reshape(ours.shape)).abs().max()
    assert error <= 1e-6 * exact.abs().max()


class _Ending(nn.Module):
    def __init__(self, call: nn.Module) -> None:
        super().__init__()
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(self.call(x), -1)


_STRANGE = {
    "mlp": lambda: nn.Sequential(nn.Linear(5, 17), nn.ReLU(), nn.Linear(17, 3)),
    "norm": lambda: nn.Sequential(nn.Linear(5, 16), nn.LayerNorm(16), nn.GELU()),
    "softmax": lambda: _Ending(nn.Identity()),
    "gates": lambda: nn.Sequential(nn.Linear(5, 20), nn.Tanh(), nn.Sigmoid()),
    "few": lambda: nn.Linear(5, 2),
}


@pytest.mark.parametrize("kind", _STRANGE)
def test_nan_infinity_tiny_and_huge_numbers_give_what_eager_gives(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(3)
    model = _STRANGE[kind]().eval()
    bare = Bare(Program.of(model, (torch.zeros(1, 5),)).generated(), tmp_path)
    for row in _rows_of_strange_numbers():
        if kind == "norm" and np.abs(row).max() > 1e20:
            continue  # squares overflow in float32: eager gives 0 for some widths, NaN for others
        ours = bare.step(bare.states(), [row])[0]
        with torch.no_grad():
            theirs = model(torch.from_numpy(row)).numpy()
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=1e-6, equal_nan=True, err_msg=str(row))


def test_a_gru_takes_strange_numbers_as_eager_does(bares: dict[str, Bare]) -> None:
    model, _, _ = known_model("gru")
    for row in _rows_of_strange_numbers(8):
        states, h = bares["gru"].states(), torch.zeros(1, 32)
        for _ in range(2):
            ours = bares["gru"].step(states, [row])[0]
            with torch.no_grad():
                theirs, h = model(torch.from_numpy(row), h)
            np.testing.assert_allclose(ours, theirs.numpy(), rtol=2e-5, atol=1e-6, equal_nan=True, err_msg=str(row))


def test_eight_bits_give_nan_where_eager_does(tmp_path: Path) -> None:
    torch.manual_seed(3)
    model = nn.Linear(5, 17)
    bare = Bare(Program.of(model, (torch.zeros(1, 5),)).generated(precision={"weight": "int8"}), tmp_path)
    for row in _rows_of_strange_numbers():
        with torch.no_grad():
            theirs = np.isnan(model(torch.from_numpy(row)).numpy())
        assert np.isnan(bare.step(bare.states(), [row])[0][theirs]).all()


def _rows_of_strange_numbers(n: int = 5) -> list[Array]:
    usual, rows = events("mlp", 1)[0][0].numpy()[:, :n], []
    for value in (np.nan, np.inf, -np.inf, 1e-41, -1e-41, 1e30, -1e30, 0.0, -0.0):
        row = usual.copy()
        row[0, 2] = value
        rows += [row, np.full((1, n), value, np.float32)]
    return rows


# ------------------------------------------------------------------------------------------------------------------ refusals


def _refusal(model: nn.Module, *examples: Tensor, state: str = "") -> str:
    with pytest.raises((NativeError, UsageError)) as told:
        Program.of(model, examples, state or ()).generated()
    return str(told.value)


class _Sorted(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.cumsum(1) + 1


class _Masked(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[x > 0]


class _Item(nn.Module):
    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        return x[int(at)]


class _Kept(nn.Module):
    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        return x + h, h + x


class _Decimals(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.round(x, decimals=2)


def test_an_operator_without_native_code_is_told_with_its_line() -> None:
    told = _refusal(_Sorted(), torch.zeros(2, 3))
    assert "aten.cumsum" in told
    assert "x.cumsum(1) + 1" in told
    assert "test_guarantees.py" in told


def test_an_option_without_native_code_is_refused_too() -> None:
    assert "aten.round.decimals with decimals" in _refusal(_Decimals(), torch.zeros(2, 3))


def test_sizes_that_change_are_told_with_the_line() -> None:
    told = _refusal(_Masked(), torch.zeros(4))
    assert "x[x > 0]" in told


def test_a_number_taken_out_of_a_tensor_is_told_with_the_line() -> None:
    assert "int(at)" in _refusal(_Item(), torch.zeros(4), torch.tensor(1))


def test_float64_is_refused() -> None:
    told = _refusal(_Sorted(), torch.zeros(2, 3, dtype=torch.float64))
    assert "float64" in told
    assert "float32" in told


def test_a_state_with_strides_is_refused() -> None:
    told = _refusal(_Kept(), torch.zeros(3, 2), torch.zeros(2, 3).T, state="h")
    assert "strides" in told


def test_a_state_of_another_shape_is_refused() -> None:
    assert "(2, 3)" in _refusal(_Kept(), torch.zeros(2, 3), torch.zeros(3), state="h")


def test_a_refused_model_is_as_it_was() -> None:
    model = _Sorted().train()
    _refusal(model, torch.zeros(2, 3))
    assert model.training
    assert not list(model.buffers())


# ------------------------------------------------------------------------------------------------------------------- weights


@pytest.mark.parametrize("kind", ["mlp", "gru", "tcn", "windowed", "book"])
def test_other_weights_are_packed_as_a_new_build_would(kind: str, texts: dict[str, Generated]) -> None:
    model, examples, state = known_model(kind)
    old = Program.of(model, examples, state, kind)
    before = texts[kind].weights
    torch.manual_seed(11)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter))
    new = Program.of(model, examples, state, kind)
    kept = {n: t for n, t in model.state_dict().items() if n in old.tensors()}
    assert old.packed(kept) == new.generated().weights != before


def test_weights_that_were_changed_on_the_way_are_refused(bares: dict[str, Bare], tmp_path: Path) -> None:
    text = bares["gru"].generated
    (tmp_path / "model.c").write_text(text.source)
    run(["gcc", *STRICT_FLAGS, "-O1", "-shared", str(tmp_path / "model.c"), "-o", str(tmp_path / "model.so"), "-lm"])
    check = ctypes.CDLL(str(tmp_path / "model.so")).gru_weights
    check.restype, check.argtypes = ctypes.c_void_p, (ctypes.c_void_p, ctypes.c_uint64)
    head = b"FLATOUTW" + struct.pack("<IIQ", 1, 0, len(text.weights)) + hashlib.sha256(text.weights).digest()
    whole = head.ljust(64, b"\0") + text.weights
    memory = guarded(len(whole))
    memory[: len(whole)] = np.frombuffer(whole, np.uint8)
    at = memory.ctypes.data
    assert check(at, len(whole)) == at + 64
    assert check(at, len(whole) - 1) is None
    assert check(None, len(whole)) is None
    for byte in (0, 8, 16, 24, 55, 64, 64 + len(text.weights) // 2, len(whole) - 1):
        memory[byte] ^= 4
        assert check(at, len(whole)) is None
        memory[byte] ^= 4
    assert check(at, len(whole)) == at + 64


# ------------------------------------------------------------------------------------------------------------------ dead rows


def test_the_last_block_computes_the_last_token_alone(bares: dict[str, Bare]) -> None:
    model, bare = known_model("windowed")[0], bares["windowed"]
    rows = {layer.name: layer.rows for layer in bare.generated.layers}
    assert rows["layers.0.linear1.weight"] == rows["layers.0.linear2.weight"] == 9
    assert rows["layers.1.linear1.weight"] == rows["layers.1.linear2.weight"] == 1
    assert rows["layers.1.self_attn.out_proj.weight"] == rows["head.weight"] == 1
    x, window, states = events("windowed", 20)[0], torch.zeros(1, 9, 16), bare.states()
    for event in x:
        ours = bare.step(states, [event.numpy()])[0]
        with torch.no_grad():
            theirs, window = model(event, window)
        np.testing.assert_allclose(ours, theirs.numpy(), atol=1e-5 * float(theirs.abs().max()))
