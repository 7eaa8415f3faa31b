"""A plan: levers in order, with what each was proved to do, and what they were proved on. TOML that a person reads and writes."""

from __future__ import annotations

import tomllib
from typing import Final

import msgspec

from flatout.errors import PlanError
from flatout.records.lever import PlannedLever
from flatout.records.record import Record

VERSION: Final = 1

_HEAD: Final = """\
# A plan of flatout: what makes the script below faster, lever by lever, in the order in which they are pulled.
# Run it:    flatout run --plan THIS_FILE SCRIPT      Prove it again:    flatout verify THIS_FILE SCRIPT
# A lever can be taken out by deleting its table.
"""


class Circumstances(Record, frozen=True, kw_only=True):
    """What a plan was proved on; empty and 0 are not compared. `models` are the parameters of root modules that were called."""

    device: str = ""
    num_cores: int = 0
    torch: str = ""
    python: str = ""
    num_parameters: int = 0
    models: tuple[int, ...] = ()
    world_size: int = 1


class Plan(Record, frozen=True, kw_only=True):
    """Levers for a script. `measured` is the speed-up of all together over the untouched script: (median, low, high)."""

    version: int = VERSION
    script: str = ""
    arguments: tuple[str, ...] = ()
    measured: tuple[float, float, float] | None = None
    guarantee: str = "exact"
    because: str = ""
    proved_on: Circumstances = Circumstances()
    lever: tuple[PlannedLever, ...] = ()


def to_toml(plan: Plan) -> bytes:
    """The plan as TOML, with a word on how to use it."""
    body = msgspec.to_builtins(plan)
    empty = {"measured", "predicted"}
    for part in (body, *body["lever"]):
        for name in empty & part.keys():
            if part[name] is None:
                del part[name]
    return _HEAD.encode() + b"\n" + msgspec.toml.encode(body)


def from_toml(data: bytes, *, name: str = "the plan") -> Plan:
    """The plan in `data`.

    Raises PlanError when the text is cut off, no TOML, or no plan.
    """
    try:
        plan = msgspec.convert(tomllib.loads(data.decode("utf-8")), Plan, strict=True)
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as e:
        raise PlanError(f"{name} is no TOML: {e}; was the file cut off? Write it again with `flatout tune`") from e
    except msgspec.ValidationError as e:
        raise PlanError(f"{name} is no plan: {e}; docs/how-to/verify-a-change.md shows one") from e
    if plan.version > VERSION:
        raise PlanError(f"{name} has version {plan.version}, this flatout reads up to {VERSION}; install a newer one")
    return plan


def mismatches(plan: Plan, here: Circumstances) -> tuple[str, ...]:
    """What is different here from where the plan was proved, and matters, in words."""
    there = plan.proved_on
    found = []
    for label, one, two in (
        ("device", there.device, here.device),
        ("cores", there.num_cores, here.num_cores),
        ("torch", _minor(there.torch), _minor(here.torch)),
        ("parameters of the models", there.num_parameters, here.num_parameters),
        ("ranks", there.world_size, here.world_size),
    ):
        if one and two and one != two:
            found.append(f"{label}: {one} there, {two} here")
    return tuple(found)


def other_model(plan: Plan, num_parameters: int) -> str:
    """In words, how a model of so many parameters differs from those that the plan was proved on; '' where it is one of them."""
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
