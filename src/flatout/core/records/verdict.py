"""What a proof found: equal or not, faster or not, smaller or not, and on what."""

from __future__ import annotations

import math
from typing import Final, Literal, get_args

import msgspec

from flatout.core.exit_codes import DONE, NEGATIVE, UNDECIDED
from flatout.core.records.record import Record

Guarantee = Literal["exact", "bounded", "distribution", "quality"]
"""What a change promises: the same bits; rounding errors no worse than a stated factor of those before it; that too, but with
other random numbers of the same distribution (bounded once both draw alike); or only that the user's own metric holds."""

GUARANTEES: Final[tuple[Guarantee, ...]] = get_args(Guarantee)
"""All of them, the strongest first."""

FEWEST_PAIRS = 6
"""The whole range of so many pairs encloses the median ratio with 97 %; of fewer with less than 95 %."""

What = Literal["loss", "gradient", "parameter", "output", "step"]
Reference = Literal["before", "finer", "float64", "noise", "none"]
Outcome = Literal["proved", "different", "slower", "unknown"]

EXIT_CODES: dict[Outcome, int] = {
    "proved": DONE,
    "different": NEGATIVE,
    "slower": NEGATIVE,
    "unknown": UNDECIDED,
}


PRECISIONS: Final = ("float64", "float32", "tf32", "float16", "bfloat16")
"""From fine to coarse."""


class Difference(Record, frozen=True, kw_only=True):
    """The first thing that differed: in which step (counted from 1), which tensor, by how much, and what was allowed.

    `error` and `allowed` are relative to the reference's norm; None where something is missing or of another shape.
    """

    step: int
    what: What
    tensor: str
    error: float | None = None
    allowed: float | None = None
    because: str = ""

    @property
    def place(self) -> str:
        """Kind and name of the tensor; the names of losses say the kind themselves."""
        return self.tensor if self.tensor.partition(" ")[0] == self.what else f"{self.what} {self.tensor}".rstrip()


class Equality(Record, frozen=True, kw_only=True):
    """Whether two runs of `num_steps` steps computed the same under a guarantee; None: it could not be told, see `because`.

    Under QUALITY `num_steps` are the whole runs whose metric was compared, or the losses of each run where they are compared.
    `reference` says what errors were measured against: 'before' bit for bit, the same steps in a finer precision, or 'noise':
    the rounding error before the change is how far its steps end from themselves under rounding noise. `worst` is the largest
    error over what was allowed for it (1 is the limit); `before_error` and `after_error` are the errors of all gradients together
    (of the outputs, in inference) in the last step that was compared.
    """

    guarantee: Guarantee
    holds: bool | None
    num_steps: int = 0
    num_tensors: int = 0
    reference: Reference = "none"
    at: str = ""
    """The precision whose rounding was allowed; '' is the script's own."""
    factor: float = 0.0
    """A bounded change may have so many times the error that the steps before it had."""
    worst: float = 0.0
    before_error: float | None = None
    after_error: float | None = None
    first: Difference | None = None
    because: str = ""


class Speed(Record, frozen=True, kw_only=True):
    """How much faster: the median ratio of paired stretches of steps, `low`..`high` its 95 % interval.

    `before_s` are the median seconds of a step, `after_s` what the ratio makes of them. `num_pairs` stretches of the same steps
    were run in turn.
    """

    ratio: float
    low: float
    high: float
    num_pairs: int
    before_s: float
    after_s: float
    num_first: int = 0
    """So many steps were taken first, compiling and the like included; 0 where their time is not known."""
    first_before_s: float = 0.0
    first_after_s: float = 0.0
    """Seconds from the script's first line to the end of these steps."""
    num_run: int = 0
    """Steps of a whole run, where the script came to its end; 0 where that is not known."""

    @property
    def later_s(self) -> float:
        """Seconds by which the later side ends its first steps later; below 0 where it is sooner."""
        return self.first_after_s - self.first_before_s

    @property
    def break_even_steps(self) -> int | None:
        """Steps after which the later side has made up for a longer start; 0 if it starts no later, None if it never does."""
        return self.pays_from(0.0)

    def pays_from(self, start_s: float) -> int | None:
        """`break_even_steps` where the later side begins `start_s` later besides."""
        later_s, saved_s = self.later_s + start_s, self.before_s - self.after_s
        if later_s <= 0:
            return 0
        return self.num_first + math.ceil(later_s / saved_s) if saved_s > 0 else None

    @property
    def at_least(self) -> Speed:
        """The speed at the low end of the interval."""
        return msgspec.structs.replace(self, ratio=self.low, after_s=self.before_s / self.low if self.low else math.inf)

    def gain_of_run(self, num_steps: int, start_s: float = 0.0) -> float:
        """How much sooner a run of so many steps (at least the first ones) ends, start and compiling included."""
        rest = max(0, num_steps - self.num_first)
        return (self.first_before_s + rest * self.before_s) / (start_s + self.first_after_s + rest * self.after_s)

    @property
    def is_faster(self) -> bool:
        """Whether the interval excludes 1 from below, and is one of 95 %."""
        return self.low > 1 and self.num_pairs >= FEWEST_PAIRS

    @property
    def is_slower(self) -> bool:
        """Whether the interval excludes 1 from above, and is one of 95 %."""
        return self.high < 1 and self.num_pairs >= FEWEST_PAIRS


class Footprint(Record, frozen=True, kw_only=True):
    """Peak bytes of the two processes in the steps that raced: resident on a CPU, allocated on a device.

    The medians over the pairs of processes that raced; `fraction` is the range of what the later side had of the earlier's.
    """

    device: str
    before_bytes: int
    after_bytes: int
    fraction: tuple[float, float] = (1.0, 1.0)


class Verdict(Record, frozen=True, kw_only=True):
    """What was proved about `after`, compared with `before`, and where."""

    before: str
    after: str
    equality: Equality
    speed: Speed | None
    footprints: tuple[Footprint, ...] = ()
    outcome: Outcome
    because: str
    device: str
    torch: str
    python: str
    seeds: tuple[int, ...] = ()
    seconds: float = 0.0
    """What the proof took."""
    judging_s: float = 0.0
    """Runs of the untouched script took so much of `seconds` that others are judged by, each made once for a seed."""
    racing_s: float = 0.0
    """The race took so much of `seconds`, without the starts of what raced."""
    missed: tuple[str, ...] = ()
    """Levers of the changed side that had met nothing to change by the end of the race; empty where nothing was raced."""

    @property
    def exit_code(self) -> int:
        """0 where it is proved, 1 where it is slower or different, 3 where that cannot be told."""
        return EXIT_CODES[self.outcome]
