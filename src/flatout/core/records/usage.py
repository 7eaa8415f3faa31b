"""Calls worth knowing about that are no operators: saving files, copying a model's state, converting to NumPy, logging."""

from __future__ import annotations

from flatout.core.records.record import Record


class CallUse(Record, frozen=True, kw_only=True):
    """All calls of one watched function from one line, in the steps that were watched for them.

    `name` is the public name ('torch.save', 'Tensor.numpy', 'copy.deepcopy', 'Optimizer.zero_grad'); `calls` and `seconds` are
    per step; `bytes` what one call touched (0 when unknown); `detail` arguments that matter ('set_to_none=False').
    """

    name: str
    source: int
    calls: float
    seconds: float
    bytes: int = 0
    detail: str = ""
    phase: str = "other"


class ModuleFact(Record, frozen=True, kw_only=True):
    """A true statement about one module of an observed model that a rule may need.

    `name` is the kind of fact ('train-in-eval', 'batchnorm-batch', 'frozen', ...); `value` its figure; `text` details.
    """

    name: str
    module: str
    kind: str
    """Class of the module."""
    value: float = 0.0
    text: str = ""
    source: int = -1


class RoundTrip(Record, frozen=True, kw_only=True):
    """Values that leave for NumPy and come back to torch in one function of the user's.

    Lines of `file`: `away` call `Tensor.numpy`, `back` make tensors of what came of it, and `spans` are the first and last lines
    of the statements and helper functions that work on it.
    """

    file: str
    away: tuple[int, ...]
    back: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]
