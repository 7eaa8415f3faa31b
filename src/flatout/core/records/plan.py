"""A plan: levers in order, the measured effect of each, and what it was measured on; TOML that a person reads and writes.

And what came of tuning: the plan, what each of its levers was proved to do, the proof of them all, and what was left out.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Sequence
from pathlib import PurePath
from statistics import fmean, stdev
from typing import Final, Literal

import msgspec

from flatout.core.errors import PlanError, RecordError
from flatout.core.records.lever import PlannedLever
from flatout.core.records.record import Record, parse_toml
from flatout.core.records.verdict import Verdict
from flatout.core.secrets import redacted_arguments

VERSION: Final = 1
T_95: Final = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}
"""Student's t by the number of runs: 97.5 % of the distribution with one degree of freedom less lie below."""
_LEAST_ROOM: Final = 0.02
_LOCATING: Final = frozenset({"file", "files", "function", "code", "model", "also", "places"})
"""Settings of levers that say where in the text something is: they are looked for, and never written."""
_PLAIN: Final = re.compile(r"(?:[\w.,:/+*@<> -]|\[-?\d+\]| \(\d+\))*")
"""Any other text in a setting: a mode, a device, a path of modules. It calls nothing, ends no string and no line."""
AttemptKind = Literal["add", "swap", "drop", "again", "together", "final", "final-again"]

_HEAD: Final = """\
# A plan of flatout: what makes the script below faster, lever by lever, in the order in which they are pulled.
# Run it:    flatout run --plan THIS_FILE SCRIPT      Prove it again:    flatout verify THIS_FILE SCRIPT
# A lever can be taken out by deleting its table.
"""


class Circumstances(Record, frozen=True, kw_only=True):
    """Hardware, versions and sizes of models that a plan was proved on; empty and 0 are not compared.

    `models` are the numbers of parameters of the root modules that were called.
    """

    device: str = ""
    num_cores: int = 0
    torch: str = ""
    python: str = ""
    num_parameters: int = 0
    models: tuple[int, ...] = ()
    world_size: int = 1


class LossSpread(Record, frozen=True, kw_only=True):
    """What the untouched script learns on several seeds: the mean of the last fifth of the first `num_losses`, for each."""

    num_losses: int
    means: tuple[float, ...]
    run: str = ""
    """Changes with the script's text and its arguments (see `digest_of_run`)."""

    @property
    def limits(self) -> tuple[float, float]:
        """Where the mean of one more run lies with 95 %, by Student's t distribution, and 2 % of the mean at least."""
        middle, num = fmean(self.means), len(self.means)
        room = T_95[num] * stdev(self.means) * math.sqrt(1 + 1 / num)
        room = max(room, _LEAST_ROOM * abs(middle))
        return middle - room, middle + room

    def holds(self, mean: float) -> bool:
        """Whether a run with this mean may be one of the same script; not for NaN."""
        low, high = self.limits
        return low <= mean <= high


class Plan(Record, frozen=True, kw_only=True):
    """Levers for a script; `measured` is the speed-up of all together over the untouched script: (median, low, high)."""

    version: int = VERSION
    script: str = ""
    script_digest: str = ""
    """What the script's text was (see `digest_of_text`); '' is not compared."""
    arguments: tuple[str, ...] = ()
    """Those that it was proved with; values of credentials are left out (see `flatout.core.secrets`). They are not compared."""
    module: str = ""
    """The module's name where it was made for `python -m`; `script` is its file, relative to the folder that it is run from."""
    measured: tuple[float, float, float] | None = None
    guarantee: str = "exact"
    because: str = ""
    run_start_s: float | None = None
    """Seconds that `flatout run` takes to begin with this plan, more than python with torch; None where it was not measured."""
    pays_from: int | None = None
    """The step from which on a whole run by `flatout run` is ahead, its start and compiling included; None: not known."""
    proved_on: Circumstances = Circumstances()
    losses: LossSpread | None = None
    """What the untouched script learns, once `flatout run --check-after` has asked."""
    lever: tuple[PlannedLever, ...] = ()


class Attempt(Record, frozen=True, kw_only=True):
    """One comparison: the levers before and after, what for, and the Verdict."""

    kind: AttemptKind
    before: tuple[PlannedLever, ...]
    after: tuple[PlannedLever, ...]
    lever: str
    verdict: Verdict


class LeftOut(Record, frozen=True, kw_only=True):
    """A lever that is not in the plan, and why; `is_for_script`: it was proposed for it, and not refused by itself."""

    lever: str
    because: str
    is_for_script: bool = True
    gain: float = 1.0
    """How many times as fast it made a step, or was predicted to at most: what is at stake comes first in reports."""


class PlanStep(Record, frozen=True, kw_only=True):
    """A lever of the plan with the Verdict that let it in, on top of the levers of that moment; None if that is not known."""

    planned: PlannedLever
    verdict: Verdict | None = None


class Tuned(Record, frozen=True, kw_only=True):
    """The plan (maybe empty) with a step for each of its levers, and its proof against the untouched script."""

    plan: Plan
    steps: tuple[PlanStep, ...] = ()
    proof: Verdict | None = None
    left_out: tuple[LeftOut, ...] = ()
    attempts: tuple[Attempt, ...] = ()
    """Everything that was compared, in order."""
    is_complete: bool = True
    """Whether everything was tried before the time was up."""
    observing_s: float = 0.0
    """Seconds until the first comparison: the untouched script was run and measured."""


def to_toml(plan: Plan) -> bytes:
    """The plan as TOML, below a comment on how to use it."""
    body = msgspec.to_builtins(plan)
    for part in (body, *body["lever"]):
        for name in ("measured", "predicted", "run_start_s", "pays_from", "losses"):
            if part.get(name, ()) is None:
                del part[name]
    return _HEAD.encode() + b"\n" + msgspec.toml.encode(body)


def from_toml(data: bytes, *, name: str = "the plan") -> Plan:
    """The plan that TOML holds; `name` is what error messages call it.

    Raises PlanError when the text is cut off, no TOML, or no plan.
    """
    try:
        plan = msgspec.convert(parse_toml(data), Plan, strict=True)
    except RecordError as e:
        raise PlanError(f"{name} is no TOML: {e}; was the file cut off? Write it again with `flatout tune`") from e
    except msgspec.ValidationError as e:
        raise PlanError(f"{name} is no plan: {e}; docs/how-to/verify-a-change.md shows one") from e
    if plan.losses is not None and (
        len(plan.losses.means) not in T_95 or not all(map(math.isfinite, plan.losses.means))
    ):
        raise PlanError(
            f"{name} has the means of losses {plan.losses.means} and needs {min(T_95)} to {max(T_95)} finite ones"
        )
    for planned in plan.lever:
        _check_parameters(planned, name)
    if plan.version > VERSION:
        raise PlanError(f"{name} has version {plan.version}, this flatout reads up to {VERSION}; install a newer one")
    return plan


def _check_parameters(planned: PlannedLever, name: str) -> None:
    """Raises PlanError for a setting that could become code: levers write some of them into the text that is run."""
    for key, value in planned.parameters.items():
        for text in (value,) if isinstance(value, str) else value if isinstance(value, tuple) else ():
            if key not in _LOCATING and not _PLAIN.fullmatch(text):
                raise PlanError(
                    f"{name} gives '{planned.id}' the {key} {text[:60]!r}; a setting has letters, digits, '.', '_' and the like, "
                    "and no code; write the plan again with `flatout tune`"
                )


def mismatches(plan: Plan, here: Circumstances) -> tuple[str, ...]:
    """Differences that matter between here and where the plan was proved, as messages."""
    there = plan.proved_on
    compared: tuple[tuple[str, str | int, str | int], ...] = (
        ("device", there.device, here.device),
        ("cores", there.num_cores, here.num_cores),
        ("torch", _minor(there.torch), _minor(here.torch)),
        ("parameters of the models", there.num_parameters, here.num_parameters),
        ("ranks", there.world_size, here.world_size),
    )
    return tuple(f"{label}: {one} there, {two} here" for label, one, two in compared if one and two and one != two)


def digest_of_text(text: bytes) -> str:
    """Sixteen hexadecimal digits that change with the text."""
    return hashlib.sha256(text).hexdigest()[:16]


def digest_of_run(text: bytes, arguments: Sequence[str]) -> str:
    """Sixteen hexadecimal digits that change with a script's text and its arguments, credentials among them left out."""
    return digest_of_text(text + repr(redacted_arguments(arguments)).encode())


def text_root(plan: Plan, file: PurePath) -> PurePath:
    """The folder that the plan's changes of text are relative to, for a script in this file: the script's own, or that which a
    module is run from.

    >>> text_root(Plan(script="pkg/train.py", module="pkg.train"), PurePath("/home/me/pkg/train.py")).as_posix()
    '/home/me'
    """
    written = PurePath(plan.script)
    depth = len(written.parts) - 1 if plan.module and not written.is_absolute() else 0
    return file.parents[min(depth, len(file.parents) - 1)]


def other_script(plan: Plan, name: str, text: bytes) -> str:
    """A message on why a script of this file name and text is not the one that the plan was made for; '' where it may be.

    A script that was edited since is still its own: see `is_edited`.
    """
    wanted = PurePath(plan.script).name
    if not wanted or not plan.script_digest or wanted == PurePath(name).name or not is_edited(plan, text):
        return ""
    return f"script: {wanted} there, {PurePath(name).name} here, with another text"


def is_edited(plan: Plan, text: bytes) -> bool:
    """Whether the script's text is another than that which the plan was proved with."""
    return bool(plan.script_digest) and plan.script_digest != digest_of_text(text)


def other_model(plan: Plan, num_parameters: int) -> str:
    """A message on how a model of this size differs from those that the plan was proved on; '' where it is one of them."""
    known = plan.proved_on.models
    if not known or num_parameters in known:
        return ""
    return f"parameters of the model: {' or '.join(f'{n:,}' for n in known)} there, {num_parameters:,} here"


def _minor(version: str) -> str:
    """'2.13' of '2.13.0+cpu': patch releases change no kernels on purpose.

    >>> _minor("2.13.0+cpu")
    '2.13'
    """
    return ".".join(version.split("+", maxsplit=1)[0].split(".")[:2])
