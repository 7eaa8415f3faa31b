"""The part of docs/against-the-best.md that says where steps go: the peer's and the plan's side by side, against the floor.

Accounts are those of bench/best/account.py (`account_ROW_SIDE.json`), steps' times those of the races beside them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

_NONE: Final = "-"
_OF_LIBRARIES: Final = ("matrix products", "convolutions", "attention")
"""Kinds of kernels that are mostly those of libraries, in the plan as in the peer."""
_MOST_FAMILIES: Final = 9
_MOST_KERNELS: Final = 6
_LEAST_US: Final = 50.0
_MOST_NAME: Final = 70
HEAD: Final = """\
## Where the steps go

A step in microseconds, by kind of kernel, beside its floor. The floor is the longer of a kernel's FLOP at the rate of a large
matrix product (of float8 where it is one) and its bytes at the rate of a large copy. Rates are measured after the script, on
random numbers. Arrays count once, and twice where a compiled kernel changes them in place. Kernels whose bytes are not known
count with their own time. "No kernel runs" is what is left of a step in the race, where nothing was profiled.

Most of a step are products, convolutions and attention of libraries, which the plan has in common with its peer. Below each
table stands how far the plan would get with these kernels as they are and all else at its floor.
"""


class _Side(NamedTuple):
    """One account with the time of its step."""

    label: str
    account: dict[str, Any]
    step_us: float
    is_raced: bool

    @property
    def idle_us(self) -> float:
        return max(0.0, self.step_us - 1e6 * self.account["busy_s"])

    def us(self, family: str) -> tuple[float, float]:
        """Microseconds of kernels of this kind, and their floor."""
        sums = self.account["families"].get(family, {"s": 0.0, "floor_s": 0.0})
        return 1e6 * sums["s"], 1e6 * sums["floor_s"]


def newest_results(folder: Path, pattern: str) -> dict[str, Path]:
    """The newest results with these file names, by name."""
    return {path.name: path for path in sorted(folder.glob(f"*/{pattern}"))}


def accounts_part(folder: Path, rows: Mapping[str, Any]) -> Iterator[str]:
    """Lines for each row of which there is an account; `rows` are those of bench/best_device.py."""
    found: dict[str, list[_Side]] = {}
    for path in newest_results(folder, "account_*.json").values():
        name, _, side = path.stem.removeprefix("account_").rpartition("_")
        found.setdefault(name, []).append(_side(path, rows.get(name), name, side))
    if found:
        yield from ("", *HEAD.splitlines())
    for name in sorted(found, key=lambda name: list(rows).index(name) if name in rows else len(rows)):
        sides = found[name]
        yield from ("", f"### {rows[name].title if name in rows else name}", "")
        sides = sorted(sides, key=lambda side: side.label != "peer")
        yield from _sides(sides)
        if len(sides) > 1 and name in rows:
            yield from ("", _within_reach(sides[0], sides[1], [peer.goal for peer in rows[name].peers.values()]))
        for side in sides:
            yield from _furthest(side)


def _side(path: Path, row: Any, name: str, side: str) -> _Side:
    account = json.loads(path.read_text(encoding="utf-8"))
    race = _race_of(account, path, name)
    raced_us = None if account.get("is_stretch", False) or row is None else _raced_us(race, row, side)
    is_by_hand = side == "plan" and (race.get("planned_by") == "hand" if race else "levers" in account)
    label = f"{side} by hand" if is_by_hand else side
    return _Side(label, account, raced_us or 1e6 * account["step_s"], raced_us is not None)


def _race_of(account: dict[str, Any], path: Path, name: str) -> dict[str, Any]:
    """The results of the race beside which this account was made: the one whose plan it is, where it is a plan's."""
    races = [
        json.loads(race.read_text(encoding="utf-8"))
        for stem in ("best", "by_hand")
        if (race := path.with_name(f"{stem}_{name}.json")).exists()
    ]
    return next((race for race in races if account.get("levers") in (None, race["plan"])), {})


def _raced_us(race: dict[str, Any], row: Any, side: str) -> float | None:
    """Microseconds of a step in the race, where nothing was profiled."""
    rates = race.get("a_second", {})
    samples = {"flatout": row.samples} if side == "plan" else {}
    for peer, one in row.peers.items() if side == "peer" else ():
        samples |= {f"{peer}: {label}": number for label, (_, number) in one.settings.items()}
    raced = {label: rates[label] / number for label, number in samples.items() if label in rates}
    return 1e6 / max(raced.values()) if raced else None


def _sides(sides: list[_Side]) -> Iterator[str]:
    for side in sides:
        account, what = side.account, "stretch" if side.account.get("is_stretch", False) else "step"
        where = "in the race" if side.is_raced else "while it is profiled"
        yield (
            f"- {side.label}: a {what} takes {side.step_us:,.0f} us {where}; "
            f"{account['device']}, torch {account['torch']}, {account['flop_per_s'] / 1e12:.0f} TFLOP/s and "
            f"{account['bytes_per_s'] / 1e9:,.0f} GB/s."
        )
        yield from (f"  {line}" for line in _too_low(account))
    columns = " | ".join(f"{side.label}, us | its floor" for side in sides)
    yield from ("", f"| kernels | {columns} |", "|---|" + "---|---|" * len(sides))
    families = sorted({name for side in sides for name in side.account["families"]})
    families.sort(key=lambda name: -max(side.us(name)[0] for side in sides))
    shown = [family for family in families if max(side.us(family)[0] for side in sides) >= 1.0][:_MOST_FAMILIES]
    for family in shown:
        yield _row(family, [side.us(family) for side in sides])
    if others := families[len(shown) :]:
        sums = [[side.us(name) for name in others] for side in sides]
        yield _row("other kernels", [(sum(us for us, _ in each), sum(floor for _, floor in each)) for each in sums])
    yield _row(
        "busy without an operator", [(1e6 * (s.account["busy_s"] - s.account["in_rows_s"]), None) for s in sides]
    )
    yield _row("no kernel runs", [(side.idle_us, 0.0) for side in sides])
    yield _row("all", [(side.step_us, sum(side.us(name)[1] for name in families)) for side in sides])


def _within_reach(peer: _Side, plan: _Side, goals: Sequence[float]) -> str:
    """How much faster than the peer the plan could be with the libraries' kernels as they are."""
    least_us = sum(plan.us(family)[0 if family in _OF_LIBRARIES else 1] for family in plan.account["families"])
    wanted = " and ".join(f"{goal:.2f}x" for goal in dict.fromkeys(goals))
    return (
        f"With all but products, convolutions and attention at its floor, and no pause between kernels, the plan would take "
        f"{least_us:,.0f} us: {peer.step_us / least_us:.2f}x of the peer. The goal is {wanted}."
    )


def _row(name: str, each: list[tuple[float, float | None]]) -> str:
    cells = [f"{us:,.0f} | {_NONE if floor is None else f'{floor:,.0f}'}" for us, floor in each]
    return f"| {name} | {' | '.join(cells)} |"


def _too_low(account: dict[str, Any]) -> Iterator[str]:
    """What an older account left out of its floors."""
    if "counts_in_place_twice" not in account:
        products = "FLOP of convolutions and " if "convolutions" in account["families"] else ""
        if any(one["op"] == "aten._scaled_mm" for one in account.get("rows", ())):
            products = "FLOP of products in float8 and "
        yield f"Floors are too low: {products}arrays that are changed in place were not counted in full then."
    if "causal" not in account and any("scaled_dot_product" in one["op"] for one in account.get("rows", ())):
        yield "Of attention all pairs count here: where a causal mask hides half of them, its floor is half as long."


def _furthest(side: _Side) -> Iterator[str]:
    """The kernels that lose most against their floor."""
    over = [(1e6 * (one["s"] - one["floor_s"]), one) for one in side.account.get("rows", ())]
    over = [(us, one) for us, one in over if us >= _LEAST_US][:_MOST_KERNELS]
    if not over:
        return
    yield from ("", f"Furthest above their floor, {side.label}:", "")
    for us, one in over:
        inputs = ", ".join("x".join(map(str, shape)) or "number" for shape in one["inputs"][:2])
        name = one["op"].removeprefix("inductor.")
        short = name if len(name) <= _MOST_NAME else f"{name[:_MOST_NAME]}..."
        yield f"- {us:,.0f} us over {1e6 * one['floor_s']:,.0f}: `{short}`, {one['calls']} calls ({inputs})"
