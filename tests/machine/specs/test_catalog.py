"""Every spec file is whole, consistent and findable; adding a device needs no new test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from flatout.core.errors import HardwareError
from flatout.core.records.hardware import Figure, HardwareSpec, Machine
from flatout.machine.specs import catalog

SPECS = catalog.all_specs()
UNITS = {"memory_bytes": "B", "memory_bytes_per_s": "B/s", "cache_bytes": "B", "num_units": "1", "power_w": "W"}


def figures(spec: HardwareSpec) -> Iterator[tuple[str, str, Figure]]:
    """Name, the unit it must have, and the figure."""
    for name, unit in UNITS.items():
        figure: Figure | None = getattr(spec, name)
        if figure is not None:
            yield name, unit, figure
    for rate in spec.rates:
        yield f"{rate.dtype}/{rate.engine}", "OP/s" if rate.dtype.startswith("int") else "FLOP/s", rate.flop_per_s
    for link in spec.links:
        yield link.name, "B/s", link.bytes_per_s


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.id)
def test_every_figure_has_unit_condition_and_source(spec: HardwareSpec) -> None:
    for name, unit, figure in figures(spec):
        assert figure.unit == unit, name
        assert figure.value > 0, name
        assert len(figure.condition) > 3 and len(figure.source) > 10, name


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.id)
def test_every_missing_figure_has_a_reason(spec: HardwareSpec) -> None:
    missing = {name for name in (*UNITS, "rates", "links") if not getattr(spec, name)}
    assert missing == set(spec.unknown)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.id)
def test_rates_are_dense_and_unique_and_narrower_is_not_slower(spec: HardwareSpec) -> None:
    rates = {(rate.dtype, rate.engine): rate.flop_per_s for rate in spec.rates}
    assert len(rates) == len(spec.rates)
    matrix = {dtype: figure.value for (dtype, engine), figure in rates.items() if engine == "matrix"}
    for (dtype, engine), figure in rates.items():
        if engine == "matrix":
            assert figure.condition.startswith("dense, "), dtype
            assert "accumulate" in figure.condition, dtype
    times = 3 if "b300" in spec.id else 2  # Blackwell Ultra's products of 4 bits
    for narrow, wide, factor in (("float4", "float8", times), ("float8", "bfloat16", 2), ("bfloat16", "tf32", 2)):
        if narrow in matrix and wide in matrix:
            # 3 %: data sheets round (B200), and one mixes two clocks (L40S).
            assert matrix[narrow] == pytest.approx(factor * matrix[wide], rel=0.03)


def test_ids_and_device_names_are_unique() -> None:
    names = [name for spec in SPECS for name in spec.device_names]
    assert len(names) == len(set(names))
    assert len({spec.id for spec in SPECS}) == len(SPECS) >= 10


@pytest.mark.parametrize(
    ("device_name", "spec_id"),
    [
        ("NVIDIA H200", "nvidia-h200"),
        ("NVIDIA H100 80GB HBM3", "nvidia-h100-sxm"),
        ("NVIDIA H100 PCIe", "nvidia-h100-pcie"),
        ("NVIDIA A100-SXM4-80GB", "nvidia-a100-80gb"),
        ("NVIDIA A100-SXM4-40GB", "nvidia-a100-40gb"),
        ("NVIDIA B200", "nvidia-b200"),
        ("NVIDIA L40S", "nvidia-l40s"),
        ("NVIDIA GeForce RTX 4090", "nvidia-rtx-4090"),
        ("AMD Instinct MI300X", "amd-mi300x"),
    ],
)
def test_known_device_names_match(device_name: str, spec_id: str) -> None:
    spec = catalog.match(device_name)
    assert spec is not None
    assert spec.id == spec_id


@pytest.mark.parametrize(
    "device_name",
    ["", "NVIDIA H200 NVL", "NVIDIA H100 NVL", "NVIDIA A100-SXM4-80GB MIG 1g.10gb", "NVIDIA GeForce RTX 4090 D", "cpu"],
)
def test_a_similar_name_is_no_match(device_name: str) -> None:
    assert catalog.match(device_name) is None


@pytest.mark.parametrize(
    ("spec_id", "dtype", "tera"),
    [
        ("nvidia-h100-sxm", "bfloat16", 989.4),
        ("nvidia-h100-pcie", "bfloat16", 756.4),
        ("nvidia-a100-80gb", "bfloat16", 312.0),
        ("nvidia-l40s", "bfloat16", 362.05),
        ("nvidia-rtx-4090", "bfloat16", 165.2),
        ("amd-mi300x", "bfloat16", 1307.4),
        ("nvidia-b200", "bfloat16", 2250.0),
    ],
)
def test_the_dense_figure_is_given_where_the_sparse_one_is_often_quoted(spec_id: str, dtype: str, tera: float) -> None:
    (figure,) = (r.flop_per_s for r in catalog.load_spec(spec_id).rates if (r.dtype, r.engine) == (dtype, "matrix"))
    assert figure.value == pytest.approx(tera * 1e12)


def test_an_unknown_id_is_refused_with_the_known_ones() -> None:
    with pytest.raises(HardwareError, match=r"no data sheet 'nvidia-x'; did you mean .* There are amd-mi300x, "):
        catalog.load_spec("nvidia-x")


def machine(device_name: str) -> Machine:
    return Machine(
        device_kind="cuda",
        device_name=device_name,
        cpu_model="cpu",
        num_cores=2,
        num_threads=2,
        torch_version="2.13.0",
        measured_at="2026-11-21T00:00:00+00:00",
        effort="quick",
        matmul_flop_per_s={},
        copy_bytes_per_s=1e12,
        dispatch_s=1e-6,
        dispatch_grad_s=2e-6,
        seconds=1.0,
    )


def test_a_machine_is_identified_or_the_reason_is_kept() -> None:
    known = catalog.identified(machine("NVIDIA H200"))
    unknown = catalog.identified(machine("NVIDIA H999"))
    assert (known.spec_id, known.unknown) == ("nvidia-h200", {})
    assert unknown.spec_id is None
    assert "NVIDIA H999" in unknown.unknown["spec_id"]
