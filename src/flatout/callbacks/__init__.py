"""Reports from inside other libraries' trainers, in the forms that those libraries have for it.

`TrainerReport` is a callback of transformers' Trainer, `LightningReport` one of Lightning's, `AccelerateReport` a tracker of
Accelerate's. Each name imports its own library when it is first used, and no other.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from flatout.callbacks.accelerate import AccelerateReport as AccelerateReport
    from flatout.callbacks.lightning import LightningReport as LightningReport
    from flatout.callbacks.transformers import TrainerReport as TrainerReport

_HOMES: Final = {"AccelerateReport": "accelerate", "LightningReport": "lightning", "TrainerReport": "transformers"}
"""Public name -> the module here that holds it, named after the library that it needs."""

__all__ = ["AccelerateReport", "LightningReport", "TrainerReport"]


def __getattr__(name: str) -> object:
    """The class called `name`, with its library, imported when it is first used."""
    library = _HOMES.get(name)
    if library is None:
        raise AttributeError(f"module 'flatout.callbacks' has no attribute '{name}'; it offers {', '.join(__all__)}")
    try:
        value: object = getattr(import_module(f"flatout.callbacks.{library}"), name)
    except ModuleNotFoundError as e:
        if not (e.name or "").partition(".")[0].endswith(library):  # pytorch_lightning, too
            raise
        raise ImportError(f"{name} needs {library}, which is not installed: pip install {library}", name=library) from e
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
