"""Why a Verdict does not let a lever into a plan, in words for the user."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from flatout.core.records.verdict import Verdict

_PLAIN_WORDS: Final[Mapping[str, str]] = {
    "non-empty donated buffers": "the script goes backward through one graph twice, or takes gradients of gradients, which "
    "compiled code does not bear",
    "does not currently support double backward": "the script takes gradients of gradients, which compiled code does not have",
    "overwritten by a subsequent run": "the script holds on to what a call returned, which the next replay of its CUDA graph "
    "overwrites",
}
"""What errors of torch mean for the script, by words that they have in torch 2.11 to 2.13."""


def why_not_proved(verdict: Verdict) -> str:
    """Why a Verdict does not let a lever in."""
    if verdict.outcome == "different":
        plain = next((words for found, words in _PLAIN_WORDS.items() if found in verdict.because), "")
        if plain:
            return plain
        first = verdict.equality.first
        if first is None or verdict.equality.because:
            return verdict.because
        error = f"is off by {first.error:.2g} of its norm" if first.error is not None else first.because
        allowed = f", {first.allowed:.2g} allowed" if first.allowed is not None else ""
        return f"not equal: in step {first.step} {first.place} {error or 'is another'}{allowed}"
    if verdict.speed is None:
        return verdict.because
    speed = verdict.speed
    return f"{verdict.because}: {speed.ratio:.2f}x ({speed.low:.2f} - {speed.high:.2f})"
