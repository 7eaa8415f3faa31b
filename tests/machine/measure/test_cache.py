from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from flatout.core.errors import RecordError
from flatout.core.records.hardware import Identity, Machine
from flatout.machine.measure import cache

MACHINE = Machine(
    device_kind="cpu",
    device_name="Test CPU @ 2.0GHz",
    cpu_model="Test CPU @ 2.0GHz",
    num_cores=2,
    num_threads=2,
    torch_version="2.13.0",
    measured_at="2026-11-21T00:00:00+00:00",
    effort="full",
    matmul_flop_per_s={"float32": 1e11},
    copy_bytes_per_s=1e10,
    dispatch_s=1e-6,
    dispatch_grad_s=3e-6,
    seconds=10.0,
    unknown={"launch_s": "no GPU is measured here"},
)


def never() -> Machine:
    raise AssertionError("measured although a record was kept")


def test_a_machine_is_measured_once_and_then_read(tmp_path: Path) -> None:
    folder = tmp_path / "not" / "there" / "yet"
    first = cache.read_or_measure(folder, MACHINE, lambda: MACHINE)
    second = cache.read_or_measure(folder, MACHINE, never)
    assert first.machine == second.machine == MACHINE
    assert first.measured_because is not None and "no measurement is stored" in first.measured_because
    assert second.measured_because is None
    assert [path.name for path in folder.iterdir()] == [first.path.name]  # nothing half-written is left


@pytest.mark.parametrize(
    "change",
    [{"device_name": "other"}, {"cpu_model": "other"}, {"num_cores": 4}, {"num_threads": 1}, {"torch_version": "2.14"}],
    ids=lambda change: next(iter(change)),
)
def test_another_machine_is_measured_anew(tmp_path: Path, change: dict[str, str | int]) -> None:
    other = msgspec.structs.replace(MACHINE, **change)
    cache.write_machine(tmp_path, MACHINE)
    assert cache.machine_path(tmp_path, other) != cache.machine_path(tmp_path, MACHINE)
    assert cache.read_or_measure(tmp_path, other, lambda: other).measured_because is not None


@pytest.mark.parametrize("damage", [b"", b"{", b"\xff\xfe", b"[]", b'{"device_kind": "cpu"}'], ids=repr)
def test_a_damaged_or_old_file_is_measured_again_and_said(tmp_path: Path, damage: bytes) -> None:
    path = cache.write_machine(tmp_path, MACHINE)
    path.write_bytes(damage)
    cached = cache.read_or_measure(tmp_path, MACHINE, lambda: MACHINE)
    assert cached.measured_because is not None
    assert "damaged or from another version" in cached.measured_because
    assert cache.read_machine(tmp_path, MACHINE) == MACHINE


def test_a_file_of_another_machine_under_this_name_is_refused(tmp_path: Path) -> None:
    other = msgspec.structs.replace(MACHINE, num_threads=1)
    cache.write_machine(tmp_path, other).rename(cache.machine_path(tmp_path, MACHINE))
    with pytest.raises(RecordError, match="holds the machine"):
        cache.read_machine(tmp_path, MACHINE)


def test_a_folder_that_cannot_be_made_is_an_error_with_advice(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RecordError, match="give another one"):
        cache.write_machine(tmp_path / "file" / "folder", MACHINE)


def test_the_file_name_is_plain_and_holds_no_host_name() -> None:
    identity = Identity(
        device_kind="cuda",
        device_name="NVIDIA H200",
        cpu_model="c/p u",
        num_cores=1,
        num_threads=1,
        torch_version="2.13.0+cu130",
    )
    name = cache.machine_path(Path("folder"), identity).name
    assert name.startswith("machine-nvidia-h200-")
    assert name.removesuffix(".json").replace("-", "").isalnum()


@pytest.mark.parametrize(
    ("change", "is_disturbed"),
    [
        ({}, False),
        ({"processor_share": 0.95, "spread": {"matmul_flop_per_s.float32": 0.1, "dispatch_s": 2.0}}, False),
        ({"processor_share": 0.85}, True),
        ({"processor_share": 0.95, "spread": {"matmul_flop_per_s.float32": 1.96}}, True),
        ({"spread": {"copy_bytes_per_s": 2.36}}, True),
    ],
)
def test_a_probe_that_others_disturbed_shows_by_its_share_or_its_samples(
    change: dict[str, object], is_disturbed: bool
) -> None:
    assert cache.is_disturbed(msgspec.structs.replace(MACHINE, **change)) == is_disturbed


def test_of_two_disturbed_measurements_each_figure_counts_as_it_came_out_faster() -> None:
    first = msgspec.structs.replace(
        MACHINE,
        matmul_flop_per_s={"float32": 2e11, "bfloat16": 3e10},
        spread={"matmul_flop_per_s.float32": 0.1, "matmul_flop_per_s.bfloat16": 0.9},
        conditions={"matmul_flop_per_s.bfloat16": "n = 512"},
        processor_share=0.7,
    )
    second = msgspec.structs.replace(
        first,
        matmul_flop_per_s={"float32": 1e11, "bfloat16": 7e11},
        spread={"matmul_flop_per_s.float32": 0.6},
        conditions={"matmul_flop_per_s.bfloat16": "n = 1024"},
        dispatch_s=5e-7,
        copy_bytes_per_s=5e9,
        processor_share=0.8,
    )
    found = cache.faster_of(first, second)
    assert found.matmul_flop_per_s == {"float32": 2e11, "bfloat16": 7e11}
    assert (found.dispatch_s, found.dispatch_grad_s, found.copy_bytes_per_s) == (5e-7, 3e-6, 1e10)
    assert found.spread == {"matmul_flop_per_s.float32": 0.1}
    assert found.conditions == {"matmul_flop_per_s.bfloat16": "n = 1024"}
    assert found.processor_share == 0.8
