"""Modules that are imported when something of them is first used: a run whose levers change no text does not wait for libcst."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType
from typing import Any


class DeferredModule(ModuleType):
    """Stands for a module until an attribute of it is asked for; then it holds what the module holds.

    Special attributes (`__file__` and the like) import nothing: libraries look at those of all modules.
    """

    def __init__(self, name: str, group: tuple[str, ...]) -> None:
        super().__init__(name)
        self._group = group

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module '{self.__name__}' is not imported yet and has no '{name}'")
        for one in self._group:
            if isinstance(sys.modules.get(one), DeferredModule):
                del sys.modules[one]
        module = importlib.import_module(self.__name__)
        self.__dict__.update(vars(module))
        return getattr(module, name)


def defer_imports(package: str, *submodules: str) -> None:
    """Have `import package` and `from package import submodule` import nothing yet; what was imported before stays.

    Names of the package that are asked for by `from package import name`, and other submodules, are imported at once, as ever.
    """
    names = (package, *(f"{package}.{one}" for one in submodules))
    found = importlib.util.find_spec(package) if all(name not in sys.modules for name in names) else None
    if found is None:
        return
    for name in names:
        sys.modules[name] = DeferredModule(name, names)
    sys.modules[package].__path__ = list(found.submodule_search_locations or ())
    for one in submodules:
        setattr(sys.modules[package], one, sys.modules[f"{package}.{one}"])
