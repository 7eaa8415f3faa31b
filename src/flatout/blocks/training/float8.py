"""Training with products in float8, through torchao: on GPUs that multiply it, in the layers that are large enough to gain.

Weights, gradients and the optimizer stay as they are; each product's inputs are cast to float8, with scales of the moment. The
cast costs time in proportion to the inputs, the product gains in proportion to its work: small layers lose.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import warnings
from collections import Counter
from collections.abc import Callable
from types import FunctionType
from typing import Any, Final, Literal, NamedTuple

import torch
from torch import Tensor, nn

from flatout.core.errors import UsageError
from flatout.machine.measure.timer import Timing, compare_times

Recipe = Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"]
FIRST: Final = (8, 9)
"""Compute capability from which on a GPU multiplies float8 (NVIDIA, CUDA programming guide: Ada, Hopper)."""
MULTIPLE: Final = 16
"""Inner sizes of a float8 product: cuBLASLt, data types of FP8 matrix multiplication."""
_ABSENT: Final = "torchao is not installed; pip install 'flatout[quantise]'"
Sizes = Literal["gaining", "any"]


class Float8(NamedTuple):
    """What became of each Linear, by path: the converted ones, why others stayed, and `plain`, those that were replaced."""

    converted: tuple[str, ...]
    left: dict[str, str]
    plain: dict[str, nn.Linear]


def refusal(device: torch.device | str) -> str | None:
    """Why a device has no products in float8; None when it has."""
    device = torch.device(device)
    if device.type != "cuda":
        return f"'{device}' does not multiply float8; NVIDIA GPUs of compute capability {_dotted(FIRST)} and later do"
    if torch.version.hip is not None:
        return "float8 training is not known to gain on ROCm; nothing was measured there"
    has = torch.cuda.get_device_capability(device)
    return None if has >= FIRST else f"compute capability {_dotted(has)} has no float8; {_dotted(FIRST)} and later have"


def absence() -> str | None:
    """Why torchao cannot be had, with what to do; None when it is installed. Imports nothing."""
    return None if importlib.util.find_spec("torchao") is not None else _ABSENT


def layer_refusal(layer: nn.Module, *, recipe: Recipe = "tensorwise", sizes: Sizes = "gaining") -> str | None:
    """Why a layer stays: its type, what hangs on it, its sizes; None when it is converted."""
    if type(layer) is not nn.Linear:
        return f"{type(layer).__name__} is not Linear"
    if type(layer.weight) is not nn.Parameter:
        return f"its weight is a {type(layer.weight).__name__}; convert before weights are sharded or wrapped"
    if layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks:
        return "hooks hang on it, which would be lost"
    if layer._compiled_call_impl is not None:
        return "it is compiled by itself, which would be lost"
    return size_refusal(layer.in_features, layer.out_features, recipe=recipe, sizes=sizes)


def size_refusal(k: int, n: int, *, recipe: Recipe = "tensorwise", sizes: Sizes = "gaining") -> str | None:
    """Why a layer of `k` inputs and `n` outputs stays: sizes that float8 does not take, or too small to gain."""
    odd = [side for side in (k, n) if side % MULTIPLE]
    if odd:
        return f"{odd[0]} is not a multiple of {MULTIPLE}"
    if sizes == "gaining" and _is_small(k, n, recipe):
        return f"{k} inputs, {n} outputs: with {recipe} scales casts cost more than the product gains"
    return None


def _is_small(k: int, n: int, recipe: Recipe) -> bool:
    """Whether a layer is too small to gain, as torchao 0.18 measured it on H100s (float8_linear_utils.py).

    Another GPU may differ, as `measure` shows: an H200 lost with 4096 x 4096 and 8192 rows
    (bench/results/2026-11-23-h200/float8_device.json).
    """
    if recipe == "tensorwise":
        return k <= 4096 and n <= 1024
    return n <= 2048 or k <= 1024 or (n <= 4096 and k <= 2048)


def convert(
    model: nn.Module, *, recipe: Recipe = "tensorwise", sizes: Sizes = "gaining", skip: tuple[str, ...] = ()
) -> Float8:
    """Replace the large Linear layers of `model`, in place, by torchao's, with the same parameters under the same names.

    `sizes` "any": also those that torchao measured to lose on H100s. `skip`: paths that stay (an output layer whose loss is
    sensitive). Compile the model afterwards: without, the casts are kernels of their own and cost more than is gained. torchao
    patches Inductor's minimum and maximum for the whole process when it converts. Raises UsageError on a device without float8,
    when no layer is left, and without torchao.
    """
    first = next(model.parameters(), None)
    why = "the model has no parameters" if first is None else refusal(first.device)
    if why is not None:
        raise UsageError(f"cannot train in float8: {why}")
    linears = {p: m for p, m in model.named_modules(remove_duplicate=False) if isinstance(m, nn.Linear)}
    places = Counter(map(id, linears.values()))
    left: dict[str, str] = {}
    for path, layer in linears.items():
        why = _place_refusal(path, places[id(layer)], skip) or layer_refusal(layer, recipe=recipe, sizes=sizes)
        left |= {path: why} if why else {}
    plain = {path: layer for path, layer in linears.items() if path not in left}
    if not plain:
        raise UsageError(f"no layer gains in float8: {left or 'the model has no Linear'}")
    torchao = _torchao()
    config = torchao.Float8LinearConfig.from_recipe_name(recipe)
    torchao.convert_to_float8_training(model, config=config, module_filter_fn=lambda _, path: path in plain)
    for path, layer in plain.items():
        model.get_submodule(path).train(layer.training)  # torchao's begins in training mode
    return Float8(tuple(plain), left, plain)


def _place_refusal(path: str, num_places: int, skip: tuple[str, ...]) -> str | None:
    if path in skip:
        return "asked to stay"
    if path == "":
        return "the model itself is one layer, which cannot be replaced in place"
    return "the model holds it in several places" if num_places > 1 else None


def revert(model: nn.Module, converted: Float8) -> None:
    """Put the plain Linear layers back: the same objects, with the parameters and the mode that torchao's have now."""
    for path, plain in converted.plain.items():
        now = model.get_submodule(path)
        assert isinstance(now, nn.Linear)  # torchao's is one
        plain.weight, plain.bias = now.weight, now.bias
        plain.train(now.training)
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, plain)


def measure(rows: int, layer: nn.Linear, *, recipe: Recipe = "tensorwise", max_time_s: float = 5.0) -> Timing:
    """Forward and backward of one layer in float8 over bfloat16, both compiled, for `rows` rows: `ratio` < 1 is a gain.

    Raises UsageError where `convert` would.
    """
    why = refusal(layer.weight.device) or layer_refusal(layer, sizes="any")
    if why is not None:
        raise UsageError(f"cannot measure float8: {why}")
    if rows < 1 or rows % MULTIPLE:
        raise UsageError(f"{rows} rows; the gradient's product takes a multiple of {MULTIPLE}")
    plain, other = (nn.Sequential(_like(layer)) for _ in range(2))
    convert(other, recipe=recipe, sizes="any")
    x = torch.randn(rows, layer.in_features, device=layer.weight.device, dtype=torch.bfloat16, requires_grad=True)
    seed = torch.randn(rows, layer.out_features, device=x.device, dtype=torch.bfloat16)

    def stepping(module: nn.Module) -> Callable[[], object]:
        run, wanted = torch.compile(_alone(module), fullgraph=True, dynamic=False), [x, *module.parameters()]
        return lambda: torch.autograd.grad(run(x), wanted, seed)

    runs: dict[str, Callable[[], object]] = {"bfloat16": stepping(plain), "float8": stepping(other)}
    for run in runs.values():
        run()  # compiles, which is not to count as time spent
    return compare_times(runs, device=x.device, max_time_s=max_time_s)["float8"]


def _alone(module: nn.Module) -> Callable[[Tensor], Tensor]:
    """A call of the module with code of its own: dynamo gives up a code that was compiled for many modules, without a word."""

    def call(x: Tensor) -> Tensor:
        return module(x)  # type: ignore[no-any-return]

    return FunctionType(call.__code__.replace(), call.__globals__, call.__name__, None, call.__closure__)


def _like(layer: nn.Linear) -> nn.Linear:
    has_bias, where = layer.bias is not None, layer.weight.device
    layer_copy = nn.Linear(layer.in_features, layer.out_features, has_bias, device=where, dtype=torch.bfloat16)
    nn.init.normal_(layer_copy.weight, std=1 / math.sqrt(layer.in_features))
    return layer_copy


def _torchao() -> Any:
    """The float8 package of torchao; the filter of warnings that its import adds is removed again."""
    try:
        with warnings.catch_warnings():
            return importlib.import_module("torchao.float8")
    except ImportError as e:
        raise UsageError(_ABSENT) from e


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"
