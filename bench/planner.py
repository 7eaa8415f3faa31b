"""How far the planner is off on published steps that nobody here measured, table by table.

    python bench/planner.py [--table NAME ...] [--rows] [--left-out] [--out FILE] [--write-errors]

Tables are in bench/planner; each row is a step that someone published, with its model, layout, devices and seconds. Rows with
which shares or presets were set are marked: they are no test of these.

Per table: the mean of the predictions' distance from the measured seconds, over all rows and over those not in sight, the mean
with its sign, how many rows an interval holds that is made without the row itself, and how many that ran are said not to fit the
memory. `--left-out` chooses the three numbers of layers with experts anew without the model, the system or the releases that they
are then tried on. `--shares` fits the shares of products in 8 and 4 bits that data sheets have. `--write-errors` writes
src/flatout/scale/errors.toml, from which `flatout scale` has its intervals."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable
from itertools import product
from pathlib import Path
from statistics import mean, median
from typing import Any, Final, NamedTuple

from msgspec import structs
from planner_tables import BRIDGE_MODELS, TABLES, Chosen, Row, bridge

from flatout.core.errors import FlatoutError
from flatout.core.records.scale import Price
from flatout.scale.intervals import model_kind
from flatout.scale.pricing import price
from flatout.scale.usual import usual_constants

FEW: Final = 10
"""Steps of the same device, software and kind of model, below which those of other software count, too."""
ERRORS: Final = Path(__file__).parents[1] / "src" / "flatout" / "scale" / "errors.toml"


GRID: Final = tuple(Chosen(*one) for one in product((1.0, 1.5, 2.0, 2.5), (1.0, 2.0, 3.0, 4.5), (3, 7, 10)))
"""What is tried where the numbers of layers with experts are chosen anew."""


class Priced(NamedTuple):
    """A row, and what was predicted for it; or why nothing was."""

    row: Row
    price: Price | None
    why: str = ""

    @property
    def error(self) -> float:
        """Of the predicted seconds, over the measured ones."""
        assert self.price is not None
        assert self.row.seconds is not None
        return self.price.step.total_s / self.row.seconds - 1

    @property
    def key(self) -> tuple[str, str, str]:
        """Device, software and kind of model: what an interval is made for."""
        kind = model_kind(self.row.model)
        return Path(self.row.cluster.device).stem, self.row.preset, kind


def interval(errors: list[float]) -> tuple[float, float]:
    """How far predictions are too fast and too slow, for nine of ten steps or more: the 98th percentile either way, wider where
    few were compared; 5 % at least, and half as far as the other way.
    """
    few = 1 + 2 / len(errors) ** 0.5
    low, high = (
        max(0.05, few * sorted(max(0.0, sign * e) for e in errors)[min(len(errors) - 1, int(0.98 * len(errors)))])
        for sign in (-1, 1)
    )
    low, high = max(low, high / 2), max(high, low / 2)
    return min(0.9, low), high


# -- figures ---------------------------------------------------------------------------------------------------------------------


def priced(row: Row) -> Priced:
    try:
        constants = usual_constants(row.model, row.cluster, row.software).constants
        if row.is_balanced:
            constants = structs.replace(constants, routing_imbalance=1.0)
        return Priced(row, price(row.model, row.layout, row.cluster, row.software, constants, preset=row.preset))
    except FlatoutError as e:
        return Priced(row, None, str(e))


def has_error(one: Priced) -> bool:
    """Whether there are measured and predicted seconds."""
    return one.price is not None and one.row.seconds is not None


def errors_for(key: tuple[str, str, str], rows: list[Priced]) -> list[float]:
    """Errors of the same device, software and kind of model; where these are few, of any software, too."""
    device, _, kind = key
    same = [one.error for one in rows if one.key == key]
    if len(same) < FEW:
        same += [one.error for one in rows if one.key != key and (one.key[0], one.key[2]) == (device, kind)]
    return same


def share_inside(rows: list[Priced], every: list[Priced]) -> float | None:
    """Share of the rows that lie in an interval made of the errors of all others of the same device, software and kind."""
    inside = []
    keys = Counter(one.key for one in every)
    for one in rows:
        others = errors_for(one.key, [o for o in every if o is not one]) if keys[one.key] > 1 else []
        if others:
            low, high = interval(others)
            inside.append(-low <= one.error <= high)
    return mean(inside) if inside else None


def summary(rows: list[Priced], every: list[Priced]) -> dict[str, Any]:
    known = [one for one in rows if has_error(one)]
    errors = [one.error for one in known]
    unseen = [one.error for one in known if not (one.row.in_sight or one.row.is_mended)]
    memory = [
        one.price.fullest.total_bytes / 2**30 / one.row.memory_gib - 1
        for one in known
        if one.row.memory_gib is not None and one.price is not None
    ]
    return {
        "rows": len(rows),
        "in sight": sum(one.row.in_sight for one in known),
        "mended": sum(one.row.is_mended for one in known),
        "not priced": sum(one.price is None for one in rows),
        "error": mean(map(abs, errors)) if errors else None,
        "bias": mean(errors) if errors else None,
        "worst": max(errors, key=abs) if errors else None,
        "error of unseen rows": mean(map(abs, unseen)) if unseen else None,
        "bias of unseen rows": mean(unseen) if unseen else None,
        "inside": share_inside(known, [one for one in every if has_error(one)]),
        "said not to fit": sum(one.price.is_too_large for one in known if one.price is not None),
        "ran out of memory": sum(one.row.seconds is None for one in rows),
        "said to fit": sum(one.price.does_fit for one in rows if one.price is not None and one.row.seconds is None),
        "memory error": mean(map(abs, memory)) if memory else None,
    }


def _model_of(row: Row) -> str:
    """The model's name, as the summary has it."""
    return next(name for name in BRIDGE_MODELS if row.name.split(" ", 1)[1].startswith(name))


def shares() -> dict[str, float]:
    """The share, for each device and type, of the data sheet's rate at which Megatron-Bridge's dense rows are right in the
    median."""
    rows: dict[tuple[str, str], list[Row]] = {}
    for name, table in TABLES.items():
        for row in table() if name.startswith("bridge") and name.endswith("dense") else ():
            rows.setdefault((row.cluster.device, row.software.dtype), []).append(row)

    def error(row: Row, share: float) -> float:
        constants = usual_constants(row.model, row.cluster, row.software).constants
        constants = structs.replace(constants, product_share=share)
        return (
            price(row.model, row.layout, row.cluster, row.software, constants).step.total_s / (row.seconds or 1.0) - 1
        )

    found = {}
    for (device, dtype), of_key in rows.items():
        low, high = 0.2, 1.0
        while high - low > 0.001:
            middle = (low + high) / 2
            is_slow = median(error(row, middle) for row in of_key) > 0
            low, high = (middle, high) if is_slow else (low, middle)
        found[f"{device}, {dtype}"] = round(low, 3)
    return found


def left_out() -> dict[str, Any]:
    """Errors of layers with experts where the three numbers were chosen on other rows alone: without the model, without the
    system, and on releases before 26.04 for those from then on.
    """
    systems = [f"DGX-{system}" for system in ("H100", "B200", "GB200", "B300", "GB300")]
    names: list[tuple[str, str, str]] = []
    errors: list[list[float]] = []
    for number, chosen in enumerate(GRID):
        rows = [
            (system, priced(row)) for system in systems for row in bridge(system=system, kind="experts", chosen=chosen)
        ]
        known = [(system, one) for system, one in rows if one.price is not None]
        errors.append([abs(one.error) for _, one in known])
        if not number:
            names = [(_model_of(one.row), system, one.row.name.split()[0]) for system, one in known]

    def folds(key: Callable[[tuple[str, str, str]], str]) -> dict[str, Any]:
        found = {}
        for value in dict.fromkeys(map(key, names)):
            if value == "before":
                continue
            other = [i for i, name in enumerate(names) if key(name) != value]
            own = [i for i, name in enumerate(names) if key(name) == value]
            best = min(range(len(GRID)), key=lambda g, other=other: mean(errors[g][i] for i in other))  # type: ignore[misc]
            found[value] = {
                "error": mean(errors[best][i] for i in own),
                "rows": len(own),
                "chosen": GRID[best]._asdict(),
            }
        return found

    return {
        "model": folds(lambda name: name[0]),
        "system": folds(lambda name: name[1]),
        "release": folds(lambda name: "before" if name[2] < "26.04" else "26.04 and later"),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", nargs="+", choices=TABLES, default=list(TABLES))
    parser.add_argument("--rows", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--write-errors", action="store_true")
    parser.add_argument(
        "--shares", action="store_true", help="print shares of rates at which the summary's rows are right"
    )
    parser.add_argument(
        "--left-out", action="store_true", help="choose the numbers of experts without what they are tried on"
    )
    options = parser.parse_args()
    if options.shares:
        for key, share in shares().items():
            print(f"{key}: {share}")
        return 0
    result: dict[str, Any] = {}
    tables = {name: [priced(row) for row in TABLES[name]()] for name in options.table}
    every = [one for rows in tables.values() for one in rows]
    for name, rows in tables.items():
        found = summary(rows, every)
        about = (getattr(TABLES[name], "func", TABLES[name]).__doc__ or "").strip()
        result[name] = {"about": about, **found, "rows of it": [row_record(one) for one in rows]}
        shown = {key: f"{value:+.3f}" if isinstance(value, float) else value for key, value in found.items()}
        print(f"{name:24}", "  ".join(f"{key} {value}" for key, value in shown.items() if value not in (None, 0)))
        for one in rows if options.rows else ():
            if one.price is None:
                print(f"   {one.row.name}: {one.why}")
                continue
            step = one.price.step
            parts = " ".join(
                f"{part} {getattr(step, part) / step.total_s:.0%}"
                for part in step.__struct_fields__
                if part != "total_s" and getattr(step, part) > 0.01 * step.total_s
            )
            memory = one.price.fullest.total_bytes / 2**30
            if one.row.seconds is None:
                print(f"   {one.row.name}: ran out of memory; {memory:.0f} GiB, said to fit: {one.price.does_fit}")
                continue
            print(
                f"   {one.error:+.3f} {one.row.name}{' (in sight)' if one.row.in_sight else ''}: {one.row.seconds:.2f} s, "
                f"{memory:.0f} GiB ({one.row.memory_gib or '-'}), {parts}"
            )
    if options.left_out:
        result["left out"] = folds = left_out()
        for kind, of_kind in folds.items():
            for name, one in of_kind.items():
                print(
                    f"without the {kind} {name}: error {one['error']:.3f} of {one['rows']} rows, chosen {one['chosen']}"
                )
    if options.write_errors:
        write_errors(every)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


def write_errors(rows: list[Priced]) -> None:
    """The errors of all rows, by device, software and kind, for the intervals that are printed; '' stands for any."""
    known = [one for one in rows if has_error(one)]
    keys = Counter(one.key for one in known)
    lines = ["# Written by `python bench/planner.py --write-errors`: how far predictions were off on published steps."]
    groups = {key: (num, errors_for(key, known)) for key, num in keys.items()}
    for device, software, kind in list(
        groups
    ):  # of a pair that was never compared: all of the device, or of the software
        for pooled in ((device, "", kind), ("", software, kind)):
            errors = [one.error for one in known if all(a in ("", b) for a, b in zip(pooled, one.key, strict=True))]
            groups[pooled] = len(errors), errors
    for (device, software, kind), (num, errors) in sorted(groups.items()):
        low, high = interval(errors)
        lines += ["", "[[errors]]", f'device = "{device}"', f'software = "{software}"', f'kind = "{kind}"']
        lines += [f"rows = {num}", f"low = {low:.3f}", f"high = {high:.3f}"]
    ERRORS.write_text("\n".join(lines) + "\n", encoding="utf-8")


def row_record(one: Priced) -> dict[str, Any]:
    """A row as it is stored."""
    base = {"name": one.row.name, "seconds": one.row.seconds, "in_sight": one.row.in_sight, "mended": one.row.is_mended}
    if one.price is None:
        return {**base, "why": one.why}
    return {**base, "predicted_s": one.price.step.total_s, "low_s": one.price.low_s, "high_s": one.price.high_s,
            "memory_gib": one.row.memory_gib, "predicted_gib": one.price.fullest.total_bytes / 2**30}  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main())
