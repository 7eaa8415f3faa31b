"""Reads the spec files: `specs/<vendor>-<model>.toml`, one product a file."""

from __future__ import annotations

import tomllib
from difflib import get_close_matches
from functools import cache, lru_cache
from importlib import resources
from pathlib import Path
from typing import Any, Final

import msgspec

from flatout.core.errors import HardwareError
from flatout.core.records.hardware import HardwareSpec, Machine


def load_spec(spec_id: str) -> HardwareSpec:
    """The spec with this id, or in the file of this path, which ends with .toml.

    Raises HardwareError when there is none.
    """
    if spec_id.endswith(".toml"):
        return read_spec(Path(spec_id))
    specs = _specs()
    if spec_id not in specs:
        names = [*specs, *(known.partition("-")[2] for known in specs)]
        near = [name for name in names if name.startswith(spec_id)] or get_close_matches(
            spec_id, names, n=1, cutoff=0.5
        )
        hint = f"did you mean '{' or '.join(near)}'? There are" if near else "there are"
        raise HardwareError(
            f"no data sheet '{spec_id}'; {hint} {', '.join(specs)}; or give one of your own, a TOML file with "
            "base = and what differs"
        )
    return specs[spec_id]


@lru_cache(maxsize=64)
def read_spec(path: Path) -> HardwareSpec:
    """A data sheet of one's own: the fields of a HardwareSpec, or `base`, the id of a known one, and the fields that differ.

    Raises HardwareError when it cannot be read, has a wrong field, or lacks what steps are predicted with.
    """
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise HardwareError(f"cannot read the data sheet '{path}': {e.strerror or e}") from e
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise HardwareError(f"the data sheet '{path}' is no TOML: {e}") from e
    fields = set(HardwareSpec.__struct_fields__)
    if unknown := sorted(set(raw) - fields - {"base"}):
        raise HardwareError(f"the data sheet '{path}' has '{unknown[0]}'; it has base, {', '.join(sorted(fields))}")
    base = raw.pop("base", None)
    if base is not None:
        raw = {**_of_base(load_spec(str(base)), raw), "id": path.stem, "device_names": [], **raw}
    try:
        spec = msgspec.convert(raw, HardwareSpec)
    except msgspec.ValidationError as e:
        raise HardwareError(f"the data sheet '{path}': {e}; compare it with those in flatout/machine/specs") from e
    for name, what in _NEEDED.items():
        if getattr(spec, name) is None or getattr(spec, name) == ():
            raise HardwareError(f"the data sheet '{path}' lacks {name}: give {what}, or a base that has it")
    return spec


def _of_base(base: HardwareSpec, raw: dict[str, Any]) -> dict[str, Any]:
    """The base's fields. With another limit of power, what its products were measured to reach goes with the root of it: power is
    the clock times the square of a voltage that falls with it, down to a floor.
    """
    fields: dict[str, Any] = msgspec.to_builtins(base)
    power = raw.get("power_w", {}).get("value") if isinstance(raw.get("power_w"), dict) else None
    if power and base.power_w is not None:
        slower = min(1.0, (power / base.power_w.value) ** 0.5)
        for row in fields["reached"]:
            if row["what"] != "memory":
                row["share"]["value"] *= slower
                row["share"]["condition"] += f"; {slower:.2f} of that at {power:g} of {base.power_w.value:g} W"
    return fields


_NEEDED: Final = {
    "memory_bytes": "the size of the device's memory",
    "memory_bytes_per_s": "its bandwidth",
    "num_units": "the number of multiprocessors",
    "rates": "the rates of products by dtype",
    "links": "what joins devices",
}
"""What a prediction needs of a data sheet."""


def all_specs() -> tuple[HardwareSpec, ...]:
    """Every known data sheet, sorted by id."""
    return tuple(_specs().values())


def match(device_name: str) -> HardwareSpec | None:
    """The spec of the product that the driver calls `device_name`, or None; never a guess.

    Variants differ by up to 2x under similar names, so the whole name must be listed.

    >>> match("NVIDIA H200").id
    'nvidia-h200'
    >>> match("NVIDIA H200 NVL") is None
    True
    """
    return next((spec for spec in all_specs() if device_name in spec.device_names), None)


def identified(machine: Machine) -> Machine:
    """`machine` with its `spec_id` filled in from the device's name, or with the reason why it is unknown."""
    spec = match(machine.device_name)
    if spec is not None:
        unknown = {key: why for key, why in machine.unknown.items() if key != "spec_id"}
        return msgspec.structs.replace(machine, spec_id=spec.id, unknown=unknown)
    why = f"no spec file lists the device name '{machine.device_name}'"
    return msgspec.structs.replace(machine, spec_id=None, unknown={**machine.unknown, "spec_id": why})


@cache
def _specs() -> dict[str, HardwareSpec]:
    folder = resources.files("flatout.machine.specs")
    files = sorted((file for file in folder.iterdir() if file.name.endswith(".toml")), key=lambda file: file.name)
    return {file.name.removesuffix(".toml"): _parse(file.name, file.read_text(encoding="utf-8")) for file in files}


def _parse(name: str, text: str) -> HardwareSpec:
    try:
        spec = msgspec.convert(tomllib.loads(text), HardwareSpec)
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as e:
        raise HardwareError(
            f"spec file '{name}' does not hold a HardwareSpec: {e}; compare it with its neighbours"
        ) from e
    if spec.id != name.removesuffix(".toml"):
        raise HardwareError(f"spec file '{name}' has the id '{spec.id}'; the id is the file's name without '.toml'")
    return spec
