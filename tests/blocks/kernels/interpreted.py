"""Triton's kernels on a CPU: a second copy of triton, imported to interpret, seen only inside `interpreted()`.

Whether triton compiles or interprets is settled when it is imported, by TRITON_INTERPRET. Other tests of the same process may
need (or have imported) the one that compiles, so both are kept and put in sys.modules in turn.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from types import ModuleType

import numpy
import pytest

HAS_TRITON = find_spec("triton") is not None
_INTERPRETED: dict[str, ModuleType] = {}


def _is_settled(name: str) -> bool:
    """Modules that exist in two copies: triton's, but for its compiled part, and ours with kernels in them."""
    return (
        (name == "triton" or name.startswith("triton.")) and not name.startswith("triton._C")
    ) or ".on_device" in name


@cache
def _can_count() -> bool:
    """Before 3.7 a bound of a loop is made a number from an array with one dimension, which NumPy 2.4 refuses."""
    if tuple(map(int, version("triton").split(".")[:2])) >= (3, 7):
        return True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            return int(numpy.zeros(1)) == 0
        except TypeError:
            return False


@contextmanager
def interpreted() -> Iterator[None]:
    """Skips where there is no triton."""
    if not HAS_TRITON:
        pytest.skip("triton is not installed")
    if not _can_count():
        pytest.skip("the interpreter of this triton cannot count loops with this NumPy (mended in triton 3.7)")
    others = {name: module for name, module in sys.modules.items() if _is_settled(name)}
    before = os.environ.get("TRITON_INTERPRET")
    for name in others:
        del sys.modules[name]
    sys.modules.update(_INTERPRETED)
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        with warnings.catch_warnings():
            # exp(100) is infinite in float32, and a sigmoid made with it 0, on a device without a word.
            warnings.filterwarnings("ignore", "overflow encountered in exp", RuntimeWarning)
            warnings.filterwarnings("ignore", "Conversion of an array with ndim > 0", DeprecationWarning)
            yield
    finally:
        if before is None:
            del os.environ["TRITON_INTERPRET"]
        else:
            os.environ["TRITON_INTERPRET"] = before
        _INTERPRETED.update({name: module for name, module in sys.modules.items() if _is_settled(name)})
        for name in _INTERPRETED:
            sys.modules.pop(name, None)
        sys.modules.update(others)
