"""One family of errors. Each message gives the value, the rule that it broke, and what to do."""

from __future__ import annotations

from typing import Final

EXTRA_OF: Final[dict[str, str]] = {
    "jinja2": "html",
    "libcst": "edit",
    "markupsafe": "html",
    "matplotlib": "html",
    "optuna": "search",
    "prometheus_client": "fleet",
    "pyarrow": "fleet",
    "pygments": "html",
    "torchao": "quantise",
    "waitress": "fleet",
}
"""Top-level modules, and the extra of flatout that brings each (pyproject.toml)."""


class FlatoutError(Exception):
    """Something a user can cause and can mend; the command line prints it without a traceback."""


class RecordError(FlatoutError):
    """A file does not hold the record it should: wrong kind, wrong version, or damaged."""


class HardwareError(FlatoutError):
    """A device is unknown, or a figure about it is missing or contradictory."""


class ScriptError(FlatoutError):
    """The script to observe cannot be found or started."""


class CaptureError(FlatoutError):
    """Nothing could be observed; the message says what was looked for."""


class UsageError(FlatoutError):
    """An argument has a value that its documentation rules out."""


class VerificationError(FlatoutError):
    """A proof could not be carried out; the message says which side failed and how."""


class PlanError(FlatoutError):
    """A plan cannot be read, or does not fit the script, the machine or the versions at hand."""


class EditError(FlatoutError):
    """A text cannot be changed with certainty; the message says what stands in the way."""


class LeverRefused(FlatoutError):
    """A lever does not apply to a run; the message is the reason."""


class CheckpointError(FlatoutError):
    """A checkpoint could not be written or read; the message says which, on which rank, and what is there instead."""


class NotFused(FlatoutError):
    """A call cannot be run fused as its documentation requires; the message has the reason and what would allow it."""


class ExpectationFailed(FlatoutError):
    """A region did more than `flatout.expect` allows; the message has the limit, the operator and the line."""


class NotFiniteError(FlatoutError):
    """A number that is watched became NaN or infinite; `step` says when, counted from 0."""

    def __init__(self, message: str, *, step: int) -> None:
        super().__init__(message)
        self.step = step


class NativeError(FlatoutError):
    """A model cannot become native code: an operator, a shape or a state that is not supported, or no compiler."""


def explained(error: ModuleNotFoundError) -> UsageError | ModuleNotFoundError:
    """The error that names the extra to install; `error` itself where the module belongs to none.

    >>> print(explained(ModuleNotFoundError("No module named 'libcst'", name="libcst")))
    libcst is not installed; it comes with: pip install 'flatout[edit]'
    """
    module = (error.name or "").partition(".")[0]
    if module not in EXTRA_OF:
        return error
    return UsageError(f"{module} is not installed; it comes with: pip install 'flatout[{EXTRA_OF[module]}]'")
