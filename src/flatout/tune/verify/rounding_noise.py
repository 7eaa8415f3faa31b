"""Rounding noise: a script runs as it is, but the results of its operators are off by up to one spacing of their numbers.

How far such a run ends from the untouched one is what rounding alone does to this script, whatever its dtypes, random numbers and
control flow are (Monte Carlo arithmetic: D. S. Parker, UCLA CSD-970002, 1997; random rounding of every result).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_FLOATS: Final = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_TF32_EPS: Final = 2.0**-10
"""TF32 has ten bits after the point (NVIDIA A100 white paper, 2020)."""
_PRODUCTS: Final = re.compile(r"mm|bmm|addmm|baddbmm|.*convolution.*|_cudnn_rnn.*|linear")
"""Operators that may round their operands to TF32 on a GPU."""
_EXACT: Final = re.compile(
    r"_?to_copy|_?copy.*|clone|detach.*|alias.*|contiguous|lift.*|set_.*|resize.*|"
    r"zero.*|one.*|full.*|empty.*|new_.*|fill.*|arange|eye|scalar_tensor|_local_scalar_dense|item|"
    r"rand.*|normal.*|uniform.*|bernoulli.*|multinomial|exponential.*|random.*|geometric.*|cauchy.*|log_normal.*|poisson|"
    r"cat|stack|.*gather|.*index.*|_?embedding|masked_.*|where|take.*|roll|flip|repeat.*|tile|constant_pad_nd|"
    r".*_pad\dd|tril.*|triu.*|diag.*|split.*|unbind.*|chunk.*|slice_backward|select_backward|.*scatter_?|"
    r"sort|topk|max|min|amax|amin|argmax|argmin|maximum|minimum|clamp.*|max_pool.*|relu_?|threshold.*|hardtanh.*|"
    r"abs_?|neg_?|sign.*|floor.*|ceil_?|round.*|trunc.*|fmod.*|remainder.*|frac_?|isnan|nan_to_num.*|"
    r"_foreach_(copy|zero|neg|abs|sign|max|clamp).*|_amp_.*|unique.*|bincount|histc|one_hot"
)
"""Operators whose results are numbers that were there before, whole numbers, or drawn: nothing is rounded."""
_WHOLE_BELOW: Final = 2.0**20
"""Whole numbers up to here stay: they are counts, labels and masks, or become indices."""


class RoundingNoise(TorchDispatchMode):
    """Each result of an operator that rounds is multiplied by 1 + e inside it, with e random within one spacing of its dtype.

    Random numbers of the script stay as they are: the noise has generators of its own. Whole numbers stay too. Code that
    torch.compile would make runs eagerly inside. An operator costs some 0.1 ms more.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        name, is_view, written = _traits(func)
        if is_view or _EXACT.fullmatch(name):
            return output
        eps = _TF32_EPS if _PRODUCTS.fullmatch(name) else 0.0
        changed = [*_tensors((output,)), *_tensors(args[i] for i in written if i < len(args))]
        for tensor in {id(t): t for t in changed}.values():
            self._disturb(tensor, eps)
        return output

    def _disturb(self, tensor: Tensor, tf32_eps: float) -> None:
        """Multiply by 1 + e in place, where the numbers are not whole."""
        if tensor.dtype not in _FLOATS or tensor.layout != torch.strided or not tensor.numel() or _overlaps(tensor):
            return
        eps = torch.finfo(tensor.dtype).eps
        if tensor.dtype == torch.float32 and tensor.device.type == "cuda" and tf32_eps and _allows_tf32():
            eps = tf32_eps
        wide = torch.float64 if tensor.dtype == torch.float64 else torch.float32
        noise = torch.rand(tensor.shape, dtype=wide, device=tensor.device, generator=self._generator(tensor.device))
        noise.sub_(0.5).mul_(2 * eps).mul_(tensor)
        noise.masked_fill_((tensor == tensor.round()) & (tensor.abs() < _WHOLE_BELOW), 0.0)
        tensor.add_(noise.nan_to_num_(0.0, 0.0, 0.0))

    def _generator(self, device: torch.device) -> torch.Generator:
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self._seed)
        return self._generators[device]


@cache
def _traits(func: Any) -> tuple[str, bool, tuple[int, ...]]:
    """An operator's name, whether it returns a view of what it was passed, and the places of the arguments that it writes to."""
    schema = func._schema
    is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
    written = tuple(
        place for place, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write
    )
    return schema.name.partition("::")[2], is_view, written


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """The plain tensors among some values, and in lists and tuples of them."""
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _tensors(value)
        elif type(value) in (Tensor, torch.nn.Parameter):
            yield value


def _overlaps(tensor: Tensor) -> bool:
    """Whether several numbers lie in one place, as after `expand`: they cannot be written one by one."""
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def _allows_tf32() -> bool:
    return torch.backends.cuda.matmul.allow_tf32 or torch.backends.cudnn.allow_tf32
