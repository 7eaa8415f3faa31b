"""Training with products in float8, through torchao: on GPUs that multiply it, in the layers that are large enough to gain.

Weights, gradients and the optimizer stay as they are; each product's inputs are cast to float8, with scales of the moment. The
cast costs time in proportion to the inputs, the product gains in proportion to its work: small layers lose.
"""

from __future__ import annotations

import importlib
import math
import warnings
from collections.abc import Callable
from typing import Any, Final, Literal, NamedTuple

import torch
from torch import Tensor, nn

from flatout.errors import UsageError
from flatout.measure.timer import Timing, compare

Recipe = Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"]
FIRST: Final = (8, 9)
"""Compute capability from which on a GPU multiplies float8 (NVIDIA, CUDA programming guide: Ada, Hopper)."""
MULTIPLE: Final = 16
"""Inner sizes of a float8 product: cuBLASLt, data types of FP8 matrix multiplication."""
Sizes = Literal["gaining", "any"]


class Float8(NamedTuple):
    """What became of each Linear, by path: the converted ones, and why the others stayed."""

    converted: tuple[str, ...]
    left: dict[str, str]


def refusal(device: torch.device | str) -> str | None:
    """Why a device has no products in float8; None when it has."""
    device = torch.device(device)
    if device.type != "cuda":
        return f"'{device}' does not multiply float8; NVIDIA GPUs of compute capability {_dotted(FIRST)} and later do"
    if torch.version.hip is not None:
        return "float8 training is not known to gain on ROCm; nothing was measured there"
    has = torch.cuda.get_device_capability(device)
    return None if has >= FIRST else f"compute capability {_dotted(has)} has no float8; {_dotted(FIRST)} and later have"


def layer_refusal(layer: nn.Module, *, recipe: Recipe = "tensorwise", sizes: Sizes = "gaining") -> str | None:
    """Why a layer stays: its type, sizes that float8 does not take, or too small to gain; None when it is converted."""
    if type(layer) is not nn.Linear:
        return f"{type(layer).__name__} is not Linear"
    k, n = layer.in_features, layer.out_features
    odd = [side for side in (k, n) if side % MULTIPLE]
    if odd:
        return f"{odd[0]} is not a multiple of {MULTIPLE}"
    if sizes == "gaining" and _is_small(k, n, recipe):
        return f"{k} inputs, {n} outputs: with {recipe} scales casts cost more than the product gains"
    return None


def _is_small(k: int, n: int, recipe: Recipe) -> bool:
    """As torchao 0.18 measured it on H100s (float8_linear_utils.py); another GPU may differ: `measure` tells."""
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
    left: dict[str, str] = {}
    wanted: list[str] = []
    for path, layer in model.named_modules():
        if isinstance(layer, nn.Linear):
            told = "asked to stay" if path in skip else layer_refusal(layer, recipe=recipe, sizes=sizes)
            if path == "" and told is None:
                told = "the model itself is one layer, which cannot be replaced in place"
            left |= {path: told} if told else {}
            wanted += [] if told else [path]
    if not wanted:
        raise UsageError(f"no layer gains in float8: {left or 'the model has no Linear'}")
    torchao = _torchao()
    config = torchao.Float8LinearConfig.from_recipe_name(recipe)
    torchao.convert_to_float8_training(model, config=config, module_filter_fn=lambda _, path: path in wanted)
    return Float8(tuple(wanted), left)


def revert(model: nn.Module, converted: Float8) -> None:
    """Put plain Linear layers back, with the parameters that they have now."""
    for path in converted.converted:
        old = model.get_submodule(path)
        assert isinstance(old, nn.Linear)  # torchao's is one
        plain = nn.Linear(old.in_features, old.out_features, bias=old.bias is not None, device="meta")
        plain.weight, plain.bias = old.weight, old.bias
        plain.train(old.training)
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

    def stepping(module: nn.Module) -> Callable[[], None]:
        run = torch.compile(module)

        def step() -> None:
            y: Tensor = run(x)
            y.backward(torch.ones_like(y))

        return step

    runs: dict[str, Callable[[], object]] = {"bfloat16": stepping(plain), "float8": stepping(other)}
    return compare(runs, device=x.device, max_time_s=max_time_s)["float8"]


def _like(layer: nn.Linear) -> nn.Linear:
    made = nn.Linear(layer.in_features, layer.out_features, device=layer.weight.device, dtype=torch.bfloat16)
    nn.init.normal_(made.weight, std=1 / math.sqrt(layer.in_features))
    return made


def _torchao() -> Any:
    """torchao's float8; the filter of warnings that its import adds is taken away again."""
    try:
        with warnings.catch_warnings():
            return importlib.import_module("torchao.float8")
    except ImportError as e:
        raise UsageError("torchao is not installed; pip install 'flatout[quantise]'") from e


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"
