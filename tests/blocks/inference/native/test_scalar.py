"""The C functions of one or two floats: errors against double precision, special values as torch's, the same bits everywhere."""

from __future__ import annotations

import ctypes
import platform
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

HEADER = Path(__file__).parents[4] / "src/flatout/blocks/inference/native/c/scalar.h"
FLAGS = ["-std=gnu11", "-O3", "-fPIC", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off", "-Wall", "-Wextra"]
AVX512 = ("-march=x86-64-v4", "-mprefer-vector-width=512")
ISAS = (
    {"plain": (), "avx2": ("-march=x86-64-v3",), "avx512": AVX512} if platform.machine() == "x86_64" else {"neon": ()}
)
RUNNABLE = {"AVX512": 3, "AVX2": 2}.get(torch.backends.cpu.get_cpu_capability(), 1)
"""How many of ISAS, in order, this processor runs."""
COMPILERS = [
    found[0] for names in (("gcc", "gcc-12"), ("clang", "clang-14")) if (found := [n for n in names if shutil.which(n)])
]
COMPILERS = COMPILERS or ["cc"]
FLT_MIN = float(np.finfo(np.float32).tiny)
INF, NAN = float("inf"), float("nan")

pytestmark = pytest.mark.skipif(not shutil.which(COMPILERS[0]), reason="no C compiler on the path")

Floats = NDArray[np.float32]
Torch = Callable[..., torch.Tensor]


class Close(NamedTuple):
    """A function whose error is at most `ulp` for `lo <= x <= hi`, and at most 1e-7 max(1, |x|) outside."""

    exact: Torch
    ulp: float
    lo: float = -INF
    hi: float = INF


CLOSE = {
    "exp": Close(torch.exp, 1.05),
    "exp2": Close(torch.exp2, 1.05),
    "expm1": Close(torch.expm1, 1.6),
    "log": Close(torch.log, 0.87),
    "log2": Close(torch.log2, 1.05),
    "log10": Close(torch.log10, 1.0),
    "log1p": Close(torch.log1p, 1.5),
    "sigmoid": Close(torch.sigmoid, 1.75),
    "tanh": Close(torch.tanh, 2.4),
    "erf": Close(torch.erf, 1.85),
    "sin": Close(torch.sin, 1.6, -1e15, 1e15),
    "cos": Close(torch.cos, 1.6, -1e15, 1e15),
    "atan": Close(torch.atan, 1.35),
    "sinh": Close(torch.sinh, 2.3),
    "cosh": Close(torch.cosh, 1.55),
    "sqrt": Close(torch.sqrt, 0.501),
    "rsqrt": Close(torch.rsqrt, 1.5),
    "silu": Close(lambda x: x * torch.sigmoid(x), 2.7, -87.0),
    "gelu": Close(lambda x: x * 0.5 * torch.erfc(-x * 0.5**0.5), 3.7, -1.0),
    "gelu_tanh": Close(lambda x: x * torch.sigmoid(1.5957691216057308 * (x + 0.044715 * x**3)), 2.7, -1.0),
    "mish": Close(lambda x: x * torch.tanh(torch.log1p(torch.exp(-x.abs())) + x.clamp(min=0)), 3.7, -20.0),
    "softplus": Close(lambda x: F.softplus(x, 2.0, 20.0), 2.0),
    "elu": Close(lambda x: torch.ops.aten.elu(x, 1.25, 1.5, 0.75), 3.0),
}
"""The lower end of a range is where the result is about to vanish against x."""
SAME: dict[str, Torch] = {
    "recip": torch.reciprocal,
    "relu": torch.relu,
    "leaky_relu": lambda x: F.leaky_relu(x, 0.125),
    "hardtanh": lambda x: F.hardtanh(x, -1.5, 2.0),
    "hardsigmoid": F.hardsigmoid,
    "hardswish": F.hardswish,
    "abs": torch.abs,
    "sign": torch.sign,
    "floor": torch.floor,
    "ceil": torch.ceil,
    "round": torch.round,
    "trunc": torch.trunc,
}
"""What float32 arithmetic in torch's order gives exactly."""
ARGUMENTS = {
    "leaky_relu": ", 0.125f",
    "hardtanh": ", -1.5f, 2.0f",
    "softplus": ", 2.0f, 20.0f",
    "elu": ", 1.25f, 1.5f, 0.75f",
}
UNARY, BINARY = [*CLOSE, *SAME], ["pow", "min", "max", "fmod", "remainder"]
POINTER = "const float *restrict"
LOOPS = '#include "scalar.h"\n' + "\n".join(
    [
        f"void loop_{name}(float *restrict z, {POINTER} x, int n) "
        f"{{ for (int i = 0; i < n; i++) z[i] = fo_{name}(x[i]{ARGUMENTS.get(name, '')}); }}"
        for name in UNARY
    ]
    + [
        f"void loop_{name}(float *restrict z, {POINTER} x, {POINTER} y, int n) "
        f"{{ for (int i = 0; i < n; i++) z[i] = fo_{name}(x[i], y[i]); }}"
        for name in BINARY
    ]
)
"""One loop a line, line 2 on, so that a compiler's remarks name the function."""


class Built(NamedTuple):
    """A library of all loops, and what the compiler said."""

    compiler: str
    isa: str
    library: ctypes.CDLL
    remarks: str

    def __call__(self, name: str, *arguments: Floats) -> Floats:
        arrays = [np.ascontiguousarray(a, dtype=np.float32) for a in arguments]
        out = np.empty_like(arrays[0])
        getattr(self.library, f"loop_{name}")(*(ctypes.c_void_p(a.ctypes.data) for a in (out, *arrays)), out.size)
        return out


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> list[Built]:
    """Best instruction set last, every compiler."""
    folder = tmp_path_factory.mktemp("scalar")
    (folder / "loops.c").write_text(LOOPS, encoding="ascii")
    return [one(folder, compiler, isa) for isa in list(ISAS)[:RUNNABLE] for compiler in COMPILERS]


def one(folder: Path, compiler: str, isa: str) -> Built:
    target = folder / f"{compiler}-{isa}.so"
    remark = "-Rpass=loop-vectorize" if "clang" in compiler else "-fopt-info-vec-optimized"
    command = [
        compiler,
        *FLAGS,
        *ISAS[isa],
        remark,
        f"-I{HEADER.parent}",
        "-shared",
        "loops.c",
        "-o",
        str(target),
        "-lm",
    ]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return Built(compiler, isa, ctypes.CDLL(str(target)), done.stderr)


def spread(count: int, seed: int = 0) -> Floats:
    """Normal floats: every exponent, random bits, a grid of everyday values, and what is beside special ones."""
    draw = np.random.default_rng(seed)
    exponents = np.repeat(np.arange(1, 255, dtype=np.uint32), count // 254) << 23
    exponents |= draw.integers(0, 1 << 23, exponents.size, dtype=np.uint32)
    exponents |= draw.integers(0, 2, exponents.size, dtype=np.uint32) << 31
    bits = draw.integers(0, 1 << 32, count, dtype=np.uint32)
    edges = np.array(
        [0, 0.5, 1, 2, 3, 6, 9, 17.33, 88.72284, 87.33654, 89.41599, 103.97, 126, 128, 3.92, 5.8, 1e5], np.float32
    )
    beside = [edges, np.nextafter(edges, np.float32(INF)), np.nextafter(edges, np.float32(-INF))]
    beside += [-part for part in beside]
    grid = [np.linspace(-scale, scale, count, dtype=np.float32) for scale in (1.0, 12.0, 100.0)]
    x = np.concatenate([exponents.view(np.float32), bits.view(np.float32), *beside, *grid])
    x = x[~np.isnan(x) & ((np.abs(x) >= FLT_MIN) | (x == 0))]
    return draw.permutation(x)


SPECIAL = np.array(
    [
        NAN,
        INF,
        -INF,
        0.0,
        -0.0,
        FLT_MIN,
        -FLT_MIN,
        3.4e38,
        -3.4e38,
        1,
        -1,
        0.5,
        -0.5,
        1.5,
        2.5,
        -2.5,
        1e-10,
        -1e-10,
        200,
        -200,
    ],
    np.float32,
)


def in_torch(function: Torch, *arguments: Floats, dtype: torch.dtype = torch.float64) -> NDArray[np.float64]:
    return function(*(torch.from_numpy(a.copy()).to(dtype) for a in arguments)).double().numpy()


def ulps(got: Floats, exact: NDArray[np.float64]) -> NDArray[np.float64]:
    """Errors in units of the exact result's last place. 0 where both are below FLT_MIN, overflow or are NaN alike."""
    with np.errstate(over="ignore", invalid="ignore"):
        rounded_to_int8 = exact.astype(np.float32)
        unit = np.spacing(np.maximum(np.abs(rounded_to_int8), np.float32(FLT_MIN))).astype(np.float64)
        error = np.abs(got.astype(np.float64) - exact) / unit
    alike = (got == rounded_to_int8) & np.isinf(rounded_to_int8) | np.isnan(got) & np.isnan(rounded_to_int8)
    vanished = (np.abs(exact) <= 1.0001 * FLT_MIN) & (np.abs(got) <= 1.0001 * FLT_MIN)
    return np.where(alike | vanished, 0.0, np.where(np.isfinite(error), error, INF))


def worst(got: Floats, exact: NDArray[np.float64], *arguments: Floats) -> tuple[float, list[float]]:
    error = ulps(got, exact)
    return float(error.max()), [float(a[error.argmax()]) for a in arguments]


def same_value(got: Floats, wanted: Floats) -> NDArray[np.bool_]:
    alike: NDArray[np.bool_] = (got == wanted) | (np.isnan(got) & np.isnan(wanted))
    return alike


@pytest.mark.slow
@pytest.mark.parametrize("name", CLOSE)
def test_the_error_stays_within_its_bound(name: str, built: list[Built]) -> None:
    case, x = CLOSE[name], spread(20000)
    exact, got = in_torch(case.exact, x), built[-1](name, x)
    within = (x >= case.lo) & (x <= case.hi)
    error, where = worst(got[within], exact[within], x[within])
    assert error <= case.ulp, where
    if name not in ("sin", "cos"):
        assert np.all(np.abs(got[~within] - exact[~within]) <= 1e-7 * np.maximum(1, np.abs(x[~within])))


@pytest.mark.parametrize("name", SAME)
@pytest.mark.slow
def test_simple_functions_give_what_torch_gives(name: str, built: list[Built]) -> None:
    x = np.concatenate([spread(20000), SPECIAL])
    wanted = in_torch(SAME[name], x, dtype=torch.float32).astype(np.float32)
    alike = same_value(built[-1](name, x), wanted) | (np.abs(wanted) < FLT_MIN)
    assert np.all(alike), x[~alike][:5]


@pytest.mark.parametrize("name", CLOSE)
def test_special_values_are_those_of_torch(name: str, built: list[Built]) -> None:
    x = SPECIAL
    if name in ("sin", "cos"):
        x = x[~(np.isfinite(x) & (np.abs(x) > 1e15))]
    if name == "gelu":
        x = x[~(np.abs(x) > 1e38)]
    eager: dict[str, Torch] = {
        "silu": F.silu,
        "gelu": F.gelu,
        "gelu_tanh": lambda v: F.gelu(v, approximate="tanh"),
        "mish": F.mish,
    }
    wanted = in_torch(eager.get(name, CLOSE[name].exact), x, dtype=torch.float32).astype(np.float32)
    got = built[-1](name, x)
    finite = np.isfinite(wanted)
    assert np.all(same_value(got, wanted)[~finite]), (x[~finite], got[~finite])
    assert np.allclose(got[finite], wanted[finite], rtol=5e-7, atol=1e-7)
    zero = (x == 0) & (name != "gelu")  # torch's gelu of - 0 is - 0 on some processors and 0 on others
    assert np.array_equal(np.signbit(got[zero]), np.signbit(wanted[zero]))


def test_gelu_at_infinity_is_its_limit_and_sine_far_out_is_nan(built: list[Built]) -> None:
    assert built[-1]("gelu", np.array([INF, -INF], np.float32)).tolist() == [INF, 0.0]
    assert np.all(np.isnan(built[-1]("sin", np.array([2e15, -3e38], np.float32))))
    assert np.all(np.isnan(built[-1]("cos", np.array([2e15, -3e38], np.float32))))


def pairs(count: int) -> tuple[Floats, Floats]:
    """Random pairs of any size, pairs of everyday values, integers, and every pair of special values."""
    draw = np.random.default_rng(3)
    wide = draw.permutation(spread(count, 1))[:count], draw.permutation(spread(count, 2))[:count]
    tame = draw.uniform(-8, 8, (2, count)).astype(np.float32)
    whole = draw.integers(-9, 9, (2, count)).astype(np.float32)
    special = [part.ravel() for part in np.meshgrid(np.append(SPECIAL, [3, -3, 1e7 + 1]).astype(np.float32), SPECIAL)]
    x, y = (np.concatenate(parts) for parts in zip(wide, tame, whole, special, strict=True))
    return x, y


def test_powers_are_those_of_c(built: list[Built]) -> None:
    x, y = pairs(40000)
    x, y = (
        np.append(x, np.geomspace(1e-4, 1e4, 40000)).astype(np.float32),
        np.append(y, np.linspace(-9, 9, 40000)).astype(np.float32),
    )
    with np.errstate(all="ignore"):
        exact = np.power(x.astype(np.float64), y.astype(np.float64))
    error, where = worst(built[-1]("pow", x, y), exact, x, y)
    assert error <= 1.2, where


def test_minimum_and_maximum_pass_nan_on(built: list[Built]) -> None:
    x, y = pairs(20000)
    assert np.all(
        same_value(built[-1]("min", x, y), in_torch(torch.minimum, x, y, dtype=torch.float32).astype(np.float32))
    )
    assert np.all(
        same_value(built[-1]("max", x, y), in_torch(torch.maximum, x, y, dtype=torch.float32).astype(np.float32))
    )


def test_remainders_are_exact_for_every_pair(built: list[Built]) -> None:
    x, y = pairs(40000)
    with np.errstate(all="ignore"):
        fmod = np.fmod(x.astype(np.float64), y.astype(np.float64)).astype(np.float32)
        remainder = np.where((fmod != 0) & ((fmod < 0) != (y < 0)), fmod + y, fmod)
    for name, wanted in (("fmod", fmod), ("remainder", remainder)):
        got = built[-1](name, x, y)
        wrong = ~same_value(got, wanted) & ~((np.abs(wanted) < FLT_MIN) & (np.abs(got) < FLT_MIN))
        assert not wrong.any(), (name, x[wrong][:5], y[wrong][:5], got[wrong][:5], wanted[wrong][:5])
    tame = np.abs(x) < 100
    eager = in_torch(torch.remainder, x[tame], y[tame], dtype=torch.float32).astype(np.float32)
    large = np.abs(y[tame]) > 0.01
    assert np.all(same_value(remainder[tame], eager)[large])


def results(library: Built) -> Iterator[tuple[str, Floats]]:
    x = np.concatenate([spread(4000), SPECIAL])
    for name in UNARY:
        yield name, library(name, x)
    for name in BINARY:
        yield name, library(name, *pairs(4000))


def test_every_instruction_set_and_compiler_gives_the_same_bits(built: list[Built]) -> None:
    wanted = {name: np.where(np.isnan(z), np.float32(NAN), z).view(np.uint32) for name, z in results(built[0])}
    for library in built[1:]:
        for name, z in results(library):
            got = np.where(np.isnan(z), np.float32(NAN), z).view(np.uint32)
            assert np.array_equal(got, wanted[name]), (library.compiler, library.isa, name)


def test_bounds_hold_where_denormals_are_flushed(built: list[Built]) -> None:
    x = spread(4000)
    exact = {name: in_torch(CLOSE[name].exact, x) for name in CLOSE}
    try:
        if not torch.set_flush_denormal(True):
            pytest.skip("this processor does not flush denormals")
        got = {name: built[-1](name, x) for name in CLOSE}
    finally:
        torch.set_flush_denormal(False)
    for name, case in CLOSE.items():
        sure = (x >= case.lo) & (x <= case.hi) & (np.abs(exact[name]) > 1e-36)
        assert ulps(got[name], exact[name])[sure].max() <= case.ulp, name


def test_compilers_do_not_warn(built: list[Built]) -> None:
    for library in built:
        assert "warning" not in library.remarks, library.remarks


def test_every_loop_becomes_vector_code(built: list[Built]) -> None:
    for library in built:
        if library.isa == "plain":
            continue
        lines = {
            int(line)
            for line in re.findall(r"loops\.c:(\d+):\d+: .*(?:loop vectorized|vectorized loop)", library.remarks)
        }
        missing = [name for line, name in enumerate([*UNARY, *BINARY], 2) if line not in lines]
        assert not missing, (library.compiler, library.isa)


@pytest.mark.slow
def test_sanitizers_find_nothing(tmp_path: Path) -> None:
    values = ", ".join(
        {"nan": "NAN", "inf": "INFINITY", "-inf": "-INFINITY"}.get(str(v), f"{v!r}f") for v in SPECIAL.tolist()
    )
    calls = [f"loop_{name}(z, x, N);" for name in UNARY]
    calls += [
        f"for (int i = 0; i < N; i++) {{ for (int j = 0; j < N; j++) y[j] = x[i]; loop_{name}(z, x, y, N); }}"
        for name in BINARY
    ]
    main = f"#include <math.h>\nenum {{ N = {SPECIAL.size} }};\n"
    main += f"static const float x[] = {{ {values} }};\nstatic float y[N], z[N];\n"
    main += "int main(void) {\n" + "\n".join(calls) + "\nreturn 0;\n}\n"
    (tmp_path / "main.c").write_text(f"{LOOPS}\n{main}", encoding="ascii")
    sanitizers = ["-fsanitize=undefined,address,float-cast-overflow", "-fno-sanitize-recover=all"]
    command = [
        COMPILERS[0],
        "-std=gnu11",
        "-O1",
        "-ffp-contract=off",
        *sanitizers,
        f"-I{HEADER.parent}",
        "main.c",
        "-o",
        "main",
        "-lm",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    if done.returncode != 0 and "san" in done.stderr and "cannot find" in done.stderr:
        pytest.skip("the compiler has no sanitizers installed")
    assert done.returncode == 0, done.stderr
    ran = subprocess.run([str(tmp_path / "main")], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
