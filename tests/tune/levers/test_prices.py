"""Every lever that costs accuracy has its price on its page: a figure, the machine it was measured on, and where that is kept."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from flatout.core.records.lever import Lever
from flatout.core.records.reduction import Reduction
from flatout.core.registry import levers, reductions

ROOT = Path(__file__).parents[3]
UNPRICED = {
    "parallelism.batch-size": "it changes a script's own training, and no bench measures what another one loses",
}
"""Levers whose price is not known yet, and why; those of `flatout shrink` are never among them."""
PRICED = [one for one in (*levers(), *reductions()) if one.guarantee == "quality" and one.id not in UNPRICED]
HARDWARE = re.compile(r"\b(Xeon|EPYC|H200|H100|A100)\b")
SOURCE = re.compile(r"`(bench/[\w/.-]+\.(?:py|json|txt))`")
FIGURE = re.compile(r"\d")
every_price = pytest.mark.parametrize("lever", PRICED, ids=lambda lever: lever.id)


def price_of(docstring: str) -> str:
    """The paragraph `Price` without its name: its line, and those below that are set in."""
    found = re.search(r"^Price +(.*(?:\n +.*)*)", docstring, re.MULTILINE)
    return found.group(1) if found is not None else ""


def missing_in(price: str) -> list[str]:
    """What a price lacks, of a figure, the hardware and the bench."""
    prose = SOURCE.sub("", HARDWARE.sub("", price))
    wanted = {"a figure": FIGURE.search(prose), "the hardware": HARDWARE.search(price), "a bench": SOURCE.search(price)}
    return [what for what, there in wanted.items() if there is None]


@every_price
def test_a_lever_that_costs_accuracy_tells_its_price_with_figure_hardware_and_bench(lever: Lever | Reduction) -> None:
    price = price_of(importlib.import_module(lever.module).__doc__ or "")
    assert not missing_in(price), f"the paragraph Price of {lever.id} lacks {', '.join(missing_in(price))}: {price!r}"


@every_price
def test_the_benches_that_a_price_names_are_there(lever: Lever | Reduction) -> None:
    price = price_of(importlib.import_module(lever.module).__doc__ or "")
    assert [name for name in SOURCE.findall(price) if not (ROOT / name).is_file()] == []


@every_price
def test_a_price_is_read_in_a_minute(lever: Lever | Reduction) -> None:
    assert len(price_of(importlib.import_module(lever.module).__doc__ or "").split()) <= 150


def test_what_makes_a_model_cheaper_is_never_without_a_price() -> None:
    reducing = {reduction.id for reduction in reductions() if reduction.guarantee == "quality"}
    assert len(reducing) >= 9
    assert reducing.isdisjoint(UNPRICED)


def test_prices_that_tell_nothing_are_seen() -> None:
    assert missing_in(price_of("What   x\nRefuses  y on a Xeon, 3 of `bench/a.py`\n")) == [
        "a figure",
        "the hardware",
        "a bench",
    ]
    assert missing_in(price_of("Price  See docs/how-to/adapt-a-model.md.\nRefuses  y\n")) == [
        "a figure",
        "the hardware",
        "a bench",
    ]
    assert missing_in(price_of("Price  On an H200, by\n       `bench/a2.py`.\n")) == ["a figure"]
    assert missing_in(price_of("Price  On a Xeon 3 points,\n       by `bench/a.py`.\n")) == []
