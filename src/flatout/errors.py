"""One family of errors. Each message gives the value, the rule that it broke, and what to do."""

from __future__ import annotations


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


class CheckpointError(FlatoutError):
    """A checkpoint could not be written or read; the message says which, on which rank, and what is there instead."""


class NotFused(FlatoutError):
    """A call cannot be run as it promises to be; the message says which promise, why, and what would keep it."""


class PromiseBroken(FlatoutError):
    """A region did what `flatout.guarantee` rules out; the message says which promise, by which operator, at which line."""


class NotFiniteError(FlatoutError):
    """A number that is watched became NaN or infinite; `step` says when, counted from 0."""

    def __init__(self, message: str, *, step: int) -> None:
        super().__init__(message)
        self.step = step


class NativeError(FlatoutError):
    """A model cannot become native code: an operator, a shape or a state that is not supported, or no compiler."""
