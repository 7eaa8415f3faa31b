"""What convolutions in a trace make, from the numbers that they were called with. Needs no torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import msgspec


class _Arguments(NamedTuple):
    """Where an operator's schema has them; None: it has none."""

    stride: int
    padding: int
    dilation: int
    groups: int
    output_padding: int | None = None
    transposed: int | None = None


_PLAIN: Final = _Arguments(3, 4, 5, 6)
_LIBRARY: Final = _Arguments(stride=4, padding=3, dilation=5, groups=6)
_ANY: Final = _Arguments(3, 4, 5, 8, output_padding=7, transposed=6)
_ARGUMENTS: Final = {
    "conv": _PLAIN,
    "conv_transpose": _Arguments(3, 4, dilation=7, groups=6, output_padding=5),
    "convolution": _ANY,
    "_convolution": _ANY,
    "convolution_overrideable": _ANY,
    "cudnn_convolution": _Arguments(stride=3, padding=2, dilation=4, groups=5),
    "cudnn_convolution_relu": _PLAIN,
    "cudnn_convolution_transpose": _Arguments(stride=4, padding=2, dilation=5, groups=6, output_padding=3),
    "miopen_convolution": _LIBRARY,
    "mkldnn_convolution": _LIBRARY,
    "convolution_backward": _Arguments(4, 5, 6, 9, output_padding=8, transposed=7),
}
"""Places of arguments in the schemas of native_functions.yaml, the same in PyTorch 2.11 and 2.13."""
_MASK_AT: Final = 10
"""Where `convolution_backward` has which of its three gradients are made."""
_NAME: Final = re.compile(r"aten::(\w*conv\w*?)(?:[123]d)?")

Shape = tuple[int, ...]


class Convolved(NamedTuple):
    """Shapes of what a call made, empty where the trace does not tell, and whether the convolution is a transposed one."""

    out_shapes: tuple[Shape, ...] = ()
    is_transposed: bool = False


def convolved(name: str, shapes: Sequence[Shape], values: Sequence[str]) -> Convolved:
    """What one call of an operator made, nothing where it is no convolution.

    `shapes` are those of its tensors, `values` all arguments that are numbers, as the profiler writes them ("Concrete Inputs").
    Sizes are those of torch.nn.Conv2d and torch.nn.ConvTranspose2d (their documentation, "Shape").
    """
    found = _NAME.fullmatch(name)
    arguments = _ARGUMENTS.get(found[1]) if found is not None else None
    if found is None or arguments is None:
        return Convolved()
    short = found[1]
    at = arguments.transposed
    is_transposed = short.endswith("_transpose") if at is None else _decoded(values, at) is True
    if short == "convolution_backward":
        return Convolved(_gradients(shapes, values), is_transposed)
    if len(shapes) < 2 or len(shapes[1]) < 3 or len(shapes[0]) not in (len(shapes[1]), len(shapes[1]) - 1):
        return Convolved()
    x, weight = shapes[:2]
    num = len(weight) - 2
    stride, padding, dilation = (_numbers(values, at, num) for at in arguments[:3])
    groups = _decoded(values, arguments.groups)
    beyond = [0] * num if arguments.output_padding is None else _numbers(values, arguments.output_padding, num)
    if not stride or not all(stride) or not padding or not dilation or not beyond or not isinstance(groups, int):
        return Convolved()
    sizes = zip(x[-num:], weight[2:], stride, padding, dilation, beyond, strict=True)
    if is_transposed:
        spatial = tuple((n - 1) * s - 2 * p + d * (k - 1) + more + 1 for n, k, s, p, d, more in sizes)
    else:
        spatial = tuple((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d, _ in sizes)
    channels = weight[1] * groups if is_transposed else weight[0]
    return Convolved(((*x[: -num - 1], channels, *spatial),), is_transposed) if min(spatial) > 0 else Convolved()


def _gradients(shapes: Sequence[Shape], values: Sequence[str]) -> tuple[Shape, ...]:
    """Gradients of input, weight and bias, those that are made."""
    mask = _decoded(values, _MASK_AT)
    if not isinstance(mask, list) or len(mask) != 3 or len(shapes) < 3:
        return ()
    each = (shapes[1], shapes[2], shapes[0][1:2])
    return tuple(shape for shape, is_wanted in zip(each, mask, strict=True) if is_wanted)


def _numbers(values: Sequence[str], at: int, num: int) -> list[int]:
    """The numbers of an argument, one for each spatial dimension; none where they were not recorded, as of padding="same"."""
    found = _decoded(values, at)
    if not isinstance(found, list) or len(found) not in (1, num) or not all(isinstance(n, int) for n in found):
        return []
    return found * num if len(found) == 1 else found


def _decoded(values: Sequence[str], at: int) -> Any:
    """The number, truth or list of them at this place; None where there is none."""
    try:
        return msgspec.json.decode(values[at].lower()) if len(values) > at else None
    except msgspec.DecodeError:
        return None
