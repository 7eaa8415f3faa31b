"""Reads the spec files: `specs/<vendor>-<model>.toml`, one product a file."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib import resources

import msgspec

from flatout.core.errors import HardwareError
from flatout.core.records.hardware import HardwareSpec, Machine


def load_spec(spec_id: str) -> HardwareSpec:
    """The spec with this id.

    Raises HardwareError when there is none.
    """
    specs = _specs()
    if spec_id not in specs:
        raise HardwareError(f"no spec '{spec_id}'; known: {', '.join(specs)}; add hardware/specs/{spec_id}.toml")
    return specs[spec_id]


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
