"""flatout: makes PyTorch models run flat out, and proves it.

Importing this package imports nothing else; each public name is fetched from its home when it is first used (PEP 562).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flatout.errors import CaptureError as CaptureError
    from flatout.errors import FlatoutError as FlatoutError
    from flatout.errors import HardwareError as HardwareError
    from flatout.errors import RecordError as RecordError
    from flatout.errors import ScriptError as ScriptError
    from flatout.errors import UsageError as UsageError
    from flatout.measure.probe import measure_machine as measure_machine
    from flatout.records.evidence import Evidence as Evidence
    from flatout.records.finding import Diagnosis as Diagnosis
    from flatout.records.finding import Finding as Finding
    from flatout.session import check as check

__version__ = "0.1.0"

# Public name -> "module:attribute". The imports above say the same to type checkers; a test holds the two together.
_HOMES = {
    "CaptureError": "flatout.errors:CaptureError",
    "Diagnosis": "flatout.records.finding:Diagnosis",
    "Evidence": "flatout.records.evidence:Evidence",
    "Finding": "flatout.records.finding:Finding",
    "FlatoutError": "flatout.errors:FlatoutError",
    "HardwareError": "flatout.errors:HardwareError",
    "RecordError": "flatout.errors:RecordError",
    "ScriptError": "flatout.errors:ScriptError",
    "UsageError": "flatout.errors:UsageError",
    "check": "flatout.session:check",
    "measure_machine": "flatout.measure.probe:measure_machine",
}

__all__ = tuple(_HOMES)


def __getattr__(name: str) -> object:
    """The public object called `name`, imported on first use and kept."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'flatout' has no attribute '{name}'; it offers {', '.join(_HOMES)}")
    module, attribute = home.split(":")
    value: object = getattr(import_module(module), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
