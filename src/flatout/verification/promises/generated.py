"""Kernels that Inductor generated for the CPU: plain C functions without an event of their own, so that each call gets a mark."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import BuiltinFunctionType
from typing import Any

from flatout.profiling.patching import Patches
from flatout.profiling.sites import Sites
from flatout.verification.promises.marks import KERNEL, mark


class GeneratedKernels:
    """Marks the calls of generated kernels while `patches` last. `look` finds those that were generated meanwhile."""

    def __init__(self, patches: Patches, sites: Sites) -> None:
        self._patches = patches
        self._sites = sites

    def look(self) -> None:
        """Mark the kernels of all modules that Inductor has loaded so far."""
        cache = getattr(sys.modules.get("torch._inductor.codecache"), "PyCodeCache", None)
        for module in list(getattr(cache, "modules", ())):
            for name, value in list(vars(module).items()):
                if name.startswith("cpp_") and isinstance(value, BuiltinFunctionType):
                    self._patches.set(module, name, self._marked(name, value))

    def _marked(self, name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            with mark(f"{KERNEL}{self._sites.of_frame(sys._getframe(1))}:{name}"):
                return kernel(*args)

        return run
