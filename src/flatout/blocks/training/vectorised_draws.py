"""Dropout's random numbers on a CPU, drawn by vector instructions: the same numbers, an order of magnitude sooner.

PyTorch fills a mask with `bernoulli_`, which takes two words of its Mersenne Twister for each element, one element after the
other. (Where PyTorch finds MKL and a CPU by Intel it draws from another generator, which is fast: nothing is changed there.)
"""

from __future__ import annotations

import ctypes
import functools
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from threading import Lock
from typing import Any, Final

import torch
from torch import Generator, Tensor

from flatout.core.errors import NativeError
from flatout.core.runtime.c_compiler import STRICT_FLAGS, native_flags
from flatout.core.runtime.compiled_source import load_source

SOURCE: Final = Path(__file__).with_name("draws.c")
_OPERATOR: Final = "bernoulli_.float"
_NUM_WORDS: Final = 624
"""Words of the generator's state."""
_LEFT, _NEXT, _WORDS = slice(8, 12), slice(16, 24), slice(24, 24 + 8 * _NUM_WORDS)
"""Where CPUGeneratorImplStateLegacy (ATen/CPUGeneratorImpl.cpp) has the words left in the block plus 1, the next one's place,
and the words."""
_BITS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_FEWEST: Final = 2000
"""Elements below which a call from Python costs more than the loop gains (some 20 us against 15 ns an element)."""
_COMPARED: Final = ((2_001, 0.3, torch.float32), (3_120, 0.5, torch.float64), (2_500, 0.9, torch.bool))
"""Sizes (odd, whole blocks), chances and types that are drawn both ways before anything is replaced."""
_lock = Lock()
_registered: list[torch.library.Library] = []


def vectorise_draws() -> Callable[[], None]:
    """Draw `bernoulli_` on the CPU, and with it the masks of all dropout, by vector instructions from here on.

    The numbers, and the generator's state after them, are PyTorch's own bit for bit. Tensors that are small or not contiguous
    are drawn as before.

    Returns:
        A function that puts back what was there before.

    Raises:
        NativeError: This PyTorch draws in another way (compared before anything is replaced), or there is no C compiler.
    """
    _check_equal()
    plain = torch.library.get_kernel(f"aten::{_OPERATOR}", "CPU")
    registered = torch.library.Library("aten", "IMPL")
    _registered.append(registered)  # what is registered goes with the Library

    def draw(keys: Any, tensor: Tensor, p: float = 0.5, *, generator: Generator | None = None) -> Tensor:
        if tensor.numel() < _FEWEST or not tensor.is_contiguous() or not 0 <= p <= 1:
            plain.call_boxed(keys, tensor, p, generator=generator)
            return tensor
        return draw_bernoulli(tensor, p, generator)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
        registered.impl(_OPERATOR, draw, "CPU", with_keyset=True)

    def undo() -> None:
        if registered in _registered:
            _registered.remove(registered)
            registered._destroy()

    return undo


def draws_refusal() -> str:
    """Why `vectorise_draws` would raise here; empty where it would not."""
    try:
        _check_equal()
    except NativeError as e:
        return str(e)
    return ""


def draw_bernoulli(tensor: Tensor, p: float, generator: Generator | None = None) -> Tensor:
    """Fill a contiguous tensor with 1 with chance `p` and 0 elsewhere, as `tensor.bernoulli_(p)` on a CPU without MKL does.

    Raises NativeError where there is no C compiler.
    """
    function = _library().flatout_bernoulli
    source = torch.default_generator if generator is None else generator
    bits = _BITS[tensor.element_size()]
    one = int(torch.ones((), dtype=tensor.dtype).view(bits))
    with _lock:
        state = source.get_state()
        left, place = state[_LEFT].view(torch.int32), state[_NEXT].view(torch.int64)
        first = _NUM_WORDS if int(left) == 1 else int(place)
        words = state[_WORDS].data_ptr()
        end = function(words, first, math.ceil(p * 2**53), tensor.numel(), bits.itemsize, one, tensor.data_ptr())
        place.fill_(end)
        left.fill_(_NUM_WORDS + 1 - end)
        source.set_state(state)
    return tensor


@functools.cache
def _check_equal() -> None:
    """Compare with PyTorch's own draws. Raises NativeError where they differ."""
    own, other = Generator().manual_seed(1), Generator().manual_seed(1)
    for num, p, dtype in _COMPARED:
        drawn = draw_bernoulli(torch.empty(num, dtype=dtype), p, own)
        if not torch.equal(drawn, torch.empty(num, dtype=dtype).bernoulli_(p, generator=other)):
            raise NativeError(
                "this PyTorch draws the masks of dropout in another way (MKL on a CPU by Intel), fast already"
            )
    if not torch.equal(torch.rand(3, generator=own), torch.rand(3, generator=other)):
        raise NativeError("this PyTorch's generator has another state: its draws are left as they are")


@functools.cache
def _library() -> ctypes.CDLL:
    """The functions of draws.c, compiled for this machine."""
    found = load_source(SOURCE, flags=(*STRICT_FLAGS, *native_flags()), link_flags=())
    found.flatout_bernoulli.argtypes = [
        *(ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_int64),
        *(ctypes.c_int, ctypes.c_uint64, ctypes.c_void_p),
    ]
    return found
