"""What of flatout works on this machine: each ability, and what is missing where one does not."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Final, NamedTuple

from flatout.core.errors import EXTRA_OF, FlatoutError
from flatout.core.runtime.c_compiler import find_compiler
from flatout.core.runtime.cache_folder import create_code_folder, default_cache_folder
from flatout.core.runtime.cores import usable_cores
from flatout.machine.measure.processor_load import cpu_quota

_LEAST_PYTHON: Final = (3, 11)
_LEAST_TORCH: Final = (2, 11)
"""As pyproject.toml has them."""
_SMALL_SHARED_MEMORY: Final = 1 << 30
"""Docker's default of 64 MiB ends loader workers with 'bus error'; batches of images in flight take up to a gigabyte."""
_FOR: Final = {
    "html": "pages (--html)",
    "edit": "tune, run and edit",
    "loops": "loops compiled by numba",
    "quantise": "float8 and fewer bits",
    "search": "searching architectures",
    "fleet": "the fleet's shared store, page and metrics",
}


class Ability(NamedTuple):
    """Something that flatout can do, and whether it works here."""

    name: str
    works: bool
    text: str
    """What was found; where it does not work, what to do."""
    is_needed: bool = False
    """Whether nothing works without it."""


def abilities() -> Iterator[Ability]:
    """What works on this machine, the needed first."""
    yield _python()
    yield _torch()
    yield _device()
    yield _scripts()
    yield from _compilers()
    yield _cache()
    yield _shared_memory()
    yield _cores()
    yield from _extras()


def _python() -> Ability:
    found = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info[:2] < _LEAST_PYTHON:
        return Ability("Python", False, f"{found}; 3.11 or newer is needed", is_needed=True)
    return Ability("Python", True, found, is_needed=True)


def _torch() -> Ability:
    try:
        found = version("torch")
    except PackageNotFoundError:
        return Ability("torch", False, "not installed; install it as https://pytorch.org says", is_needed=True)
    numbers = tuple(int(n) for n in re.findall(r"\d+", found)[:2])
    if numbers < _LEAST_TORCH:
        return Ability("torch", False, f"{found}; 2.11 or newer is needed", is_needed=True)
    return Ability("torch", True, found, is_needed=True)


def _device() -> Ability:
    if find_spec("torch") is None:
        return Ability("GPU", False, "torch is not installed")
    import torch

    if not torch.backends.cuda.is_built():
        return Ability("GPU", False, "this torch is built for CPUs; everything runs there")
    if not torch.cuda.is_available():
        return Ability("GPU", False, "torch finds none; if there is one, look at `nvidia-smi` and CUDA_VISIBLE_DEVICES")
    memory = torch.cuda.get_device_properties(0).total_memory / 2**30
    return Ability("GPU", True, f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}, {memory:.0f} GiB each")


def _compilers() -> Iterator[Ability]:
    """The C compiler of native engines, and the C++ compiler that Inductor calls for CPUs."""
    try:
        yield Ability("C compiler", True, f"{find_compiler()}, for `flatout build`")
    except FlatoutError as e:
        yield Ability("C compiler", False, f"{e}; `flatout build` needs it")
    found = next(filter(None, map(shutil.which, ("g++", "clang++"))), None)
    if found is None:
        yield Ability("C++ compiler", False, "none; torch.compile on a CPU needs one: install g++")
    else:
        yield Ability("C++ compiler", True, f"{found}, for torch.compile on a CPU")


def _cache() -> Ability:
    folder = default_cache_folder()
    try:
        create_code_folder(folder)
    except FlatoutError as e:
        return Ability("cache folder", False, f"{e}; or set XDG_CACHE_HOME")
    return Ability("cache folder", True, str(folder))


def _scripts() -> Ability:
    if not hasattr(os, "fork"):
        return Ability(
            "running scripts", False, "check, tune, verify and watch need Linux or macOS; call them in WSL 2"
        )
    unseen = "" if Path("/proc/self").exists() else "; the load of other processes is not seen on this system"
    return Ability("running scripts", True, f"check, tune, verify and watch{unseen}")


def _shared_memory() -> Ability:
    folder = Path("/dev/shm")
    if sys.platform != "linux":
        return Ability("shared memory", True, "the system's own")
    if not folder.is_dir():
        return Ability("shared memory", False, "there is no /dev/shm: loader workers and `flatout survive` need it")
    size = shutil.disk_usage(folder).total
    text = f"{size / 2**30:.1f} GiB in /dev/shm"
    if size < _SMALL_SHARED_MEMORY:
        return Ability("shared memory", False, f"{text}; loader workers may fail: `docker run --shm-size=8g`")
    return Ability("shared memory", True, text)


def _cores() -> Ability:
    usable, there = usable_cores(), os.cpu_count() or 1
    text = f"{usable} of {there} may be used" if usable < there else f"{usable}"
    quota = cpu_quota()
    if quota is None or quota >= usable:
        return Ability("cores", True, text)
    advice = (
        f"a quota allows {quota:.1f} of them, and threads beyond that wait: set OMP_NUM_THREADS={max(1, int(quota))}"
    )
    return Ability("cores", False, f"{text}; {advice}")


def _extras() -> Iterator[Ability]:
    """What the optional parts need; one row for each extra."""
    for extra, use in _FOR.items():
        modules = [module for module, of in EXTRA_OF.items() if of == extra] or ["numba"]
        missing = [module for module in modules if find_spec(module) is None]
        if missing:
            yield Ability(use, False, f"{', '.join(missing)} missing: pip install 'flatout[{extra}]'")
        else:
            yield Ability(use, True, ", ".join(modules))
