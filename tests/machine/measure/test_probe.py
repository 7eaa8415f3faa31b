"""One quick probe of this CPU: is the record plausible, and is everything left as it was? No assertion on speed."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

import pytest
import torch

from flatout.core.errors import UsageError
from flatout.core.records.hardware import Machine
from flatout.core.records.record import from_json, to_json
from flatout.machine.measure import loads, probe

CPU = torch.device("cpu")


class Flags:
    """What a probe must leave as it was."""

    def __init__(self) -> None:
        self.values = (
            torch.get_num_threads(),
            torch.backends.cuda.matmul.fp32_precision,
            torch.backends.mkldnn.matmul.fp32_precision,
            torch.get_float32_matmul_precision(),
            torch.get_default_dtype(),
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled("cpu"),
            random.getstate(),
        )
        self.rng_state = torch.get_rng_state()

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Flags)
            and self.values == other.values
            and bool(torch.equal(self.rng_state, other.rng_state))
        )

    __hash__ = None  # type: ignore[assignment]


@pytest.fixture(scope="module")
def machine() -> Machine:
    return probe.quick_probe(device="cpu")


@pytest.fixture
def medium_precision() -> Iterator[None]:
    torch.set_float32_matmul_precision("medium")
    yield
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.fp32_precision = "none"
    torch.backends.mkldnn.matmul.fp32_precision = "none"


@pytest.mark.slow
def test_every_figure_is_positive_and_finite(machine: Machine) -> None:
    seconds = (machine.dispatch_s, machine.dispatch_grad_s, machine.seconds)
    for value in (*seconds, machine.copy_bytes_per_s, *machine.matmul_flop_per_s.values()):
        assert math.isfinite(value)
        assert value > 0
    assert {"float32", "float64", "bfloat16"} <= set(machine.matmul_flop_per_s)


@pytest.mark.slow
def test_what_is_missing_has_a_reason(machine: Machine) -> None:
    optional = ("launch_s", "sync_s", "h2d_pageable_bytes_per_s", "h2d_pinned_bytes_per_s", "cache_bytes_per_s")
    for figure in optional:
        assert (getattr(machine, figure) is None) == (figure in machine.unknown), figure
    for dtype in loads.MATMUL_DTYPES:
        assert (dtype in machine.matmul_flop_per_s) != (f"matmul_flop_per_s.{dtype}" in machine.unknown), dtype


def test_spread_and_conditions_name_measured_figures(machine: Machine) -> None:
    for figure in machine.conditions:
        name, _, dtype = figure.partition(".")
        assert getattr(machine, name) is not None or figure in machine.unknown
        assert not dtype or dtype in machine.matmul_flop_per_s
    assert set(machine.spread) <= set(machine.conditions)
    assert all(value >= 0 for value in machine.spread.values())


def test_the_record_goes_to_json_and_back(machine: Machine) -> None:
    assert from_json(to_json(machine), Machine) == machine


def test_the_machine_has_the_identity_it_was_asked_for(machine: Machine) -> None:
    identity = probe.identify("cpu")
    assert machine.id == identity.id
    assert machine.num_threads == torch.get_num_threads()
    assert machine.effort == "quick"


@pytest.mark.slow
def test_a_probe_leaves_random_state_and_flags_alone(medium_precision: None, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    original = loads.matmul_load

    def spy(name: str, *, device: torch.device, limit_s: float, free_bytes: int) -> loads.Load:
        seen.append((name, torch.backends.mkldnn.matmul.fp32_precision, torch.is_autocast_enabled("cpu")))
        return original(name, device=device, limit_s=limit_s, free_bytes=free_bytes)

    monkeypatch.setattr(loads, "matmul_load", spy)
    with torch.inference_mode(), torch.autocast("cpu"):
        before = Flags()
        probe.measure_machine(device="cpu", budget_s=0.1)
        after = Flags()
    assert before == after
    # Inside, float32 meant float32: neither the program's bfloat16 products nor its autocast reached the loads.
    assert ("float32", "ieee", False) in seen


@pytest.mark.slow
def test_a_dtype_that_fails_is_unknown_and_not_fatal(monkeypatch: pytest.MonkeyPatch) -> None:
    original = loads.matmul_load

    def broken(name: str, *, device: torch.device, limit_s: float, free_bytes: int) -> loads.Load:
        if name == "int8":
            raise RuntimeError("no int8 here\nwith a long traceback")
        return original(name, device=device, limit_s=limit_s, free_bytes=free_bytes)

    monkeypatch.setattr(loads, "matmul_load", broken)
    machine = probe.measure_machine(device="cpu", budget_s=0.1)
    assert "int8" not in machine.matmul_flop_per_s
    assert machine.unknown["matmul_flop_per_s.int8"] == "no int8 here"


def test_loads_hold_random_data() -> None:
    tensor = loads.random_bytes(3 * loads.MIB + 5, device=CPU)
    assert tensor.numel() == 3 * loads.MIB + 5
    assert tensor.unique().numel() == 256


def test_a_product_stays_within_memory() -> None:
    load = loads.matmul_load("float32", device=CPU, limit_s=10.0, free_bytes=4 * 3 * 4 * 256**2)
    assert load.work == 2 * 256**3


def test_impossible_requests_are_refused() -> None:
    with pytest.raises(UsageError, match="cannot probe device 'meta'"):
        probe.identify("meta")
    with pytest.raises(UsageError, match="not positive"):
        probe.measure_machine(device="cpu", budget_s=0)
