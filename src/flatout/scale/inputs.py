"""A model's sizes, a cluster and a batch from what a person writes: 'llama-70b.toml', '1024xh100-sxm', '4M-tokens'."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import msgspec

from flatout.core.errors import HardwareError, PlanError, RecordError
from flatout.core.records.hardware import HardwareSpec
from flatout.core.records.record import R, decode_json, parse_toml
from flatout.core.records.scale import Cluster, Host, Layout, MeasuredStep, ModelShape, Tier
from flatout.machine.specs.catalog import all_specs, load_spec
from flatout.scale.calibration import TimedLayout

_NEAR_LATENCY_S: Final = 4e-6
"""Latency of one message between GPUs of a node, NCCL over NVLink: 3 to 6 us (nccl-tests, small messages over their steps)."""
_FAR_LATENCY_S: Final = 1e-5
"""The same over InfiniBand or RoCE, switches included."""
_DISK_BYTES_PER_S: Final = 4e9
"""Bandwidth of one data-centre NVMe disk a device, writing, which is its slower direction (Samsung PM9A3 data sheet, 3.84
TB: 6.9 GB/s read, 4.1 GB/s written; a DGX H100 has eight of that size for eight devices)."""
_NODE: Final = 8
"""Devices of a node, where nobody says otherwise."""
_NEAREST: Final = ("nvlink", "infinity-fabric", "pcie")
_UNITS: Final = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def read_model(path: Path) -> ModelShape:
    """The sizes in a TOML file whose keys are ModelShape's.

    Raises PlanError when it cannot be read or a key is missing, unknown or wrong.
    """
    return _read(path, ModelShape, "a model")


def read_layout(path: Path) -> Layout:
    """The layout in a TOML file whose keys are Layout's, as `write_layout` writes it.

    Raises PlanError when it cannot be read or a key is unknown or wrong.
    """
    return _read(path, Layout, "a layout")


def read_cluster(path: Path) -> Cluster:
    """The cluster in a TOML file whose keys are Cluster's: a device, how many there are, and [[tiers]] that join them, the
    nearest first.

    Raises PlanError when it cannot be read, a key is unknown or wrong, or tiers do not reach all devices.
    """
    cluster = _read(path, Cluster, "a cluster")
    load_spec(cluster.device)
    reaches = [tier.reach for tier in cluster.tiers]
    if not reaches or reaches != sorted(set(reaches)) or reaches[-1] < cluster.num_devices:
        raise PlanError(
            f"'{path}': tiers reach {reaches or 'nothing'}; give them the nearest first, the last to all "
            f"{cluster.num_devices} devices"
        )
    return cluster


def read_runs(path: Path) -> list[TimedLayout]:
    """Measured steps in a JSON file: a list of {"model": {...}, "layout": {...}, "seconds": ...}.

    `flatout calibrate` writes such a file. Steps without seconds, which could not be run, are left out.

    Raises PlanError when it cannot be read or does not fit.
    """
    try:
        runs = decode_json(path.read_bytes(), list[MeasuredStep])
    except OSError as e:
        raise PlanError(f"cannot read '{path}': {e.strerror or e}") from e
    except RecordError as e:
        raise PlanError(f"'{path}' is no list of measured steps: {e}") from e
    for run in runs:
        if run.seconds is not None and not run.seconds > 0:
            raise PlanError(f"'{path}' has a step of {run.seconds} s; give positive seconds")
    return [
        TimedLayout(run.model, run.layout, run.seconds, run.host_layer_s) for run in runs if run.seconds is not None
    ]


def layout_toml(layout: Layout, *, comment: str) -> bytes:
    """The layout as TOML that a person reads, with a comment of one line above it."""
    lines = [f"# {comment}", *(f"{name} = {_toml(getattr(layout, name))}" for name in layout.__struct_fields__)]
    return ("\n".join(lines) + "\n").encode()


def _toml(value: object) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return f'"{value}"' if isinstance(value, str) else str(value).lower()


def _read(path: Path, kind: type[R], what: str) -> R:
    try:
        raw = parse_toml(path.read_bytes())
    except OSError as e:
        raise PlanError(f"cannot read '{path}': {e.strerror or e}") from e
    except RecordError as e:
        raise PlanError(f"'{path}' is no TOML: {e}") from e
    known = set(kind.__struct_fields__)
    if unknown := sorted(set(raw) - known):
        raise PlanError(f"'{path}' has '{unknown[0]}'; {what} has {', '.join(sorted(known))}")
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as e:
        raise PlanError(f"'{path}': {e}") from e


def cluster_of(
    text: str,
    *,
    node: int | None = None,
    fabric_bytes_per_s: float = 5e10,
    disk_bytes_per_s: float = _DISK_BYTES_PER_S,
    host_bytes: float | None = None,
    device: Path | None = None,
) -> Cluster:
    """The cluster of '1024xh100-sxm': so many devices, by the id of their data sheet, with or without the vendor; or of '1024'
    and the file of a data sheet, `device`.

    `node` of them (by default as many as the data sheet's links join, or 8) are joined by their own links, nodes by a fabric of
    `fabric_bytes_per_s` a device, one direction (by default 400 Gbit/s). To the host's memory each has the data sheet's PCIe;
    `host_bytes` of it, where that is known, and a disk.

    >>> cluster_of("16xh100-sxm").tiers[1].reach
    16
    """
    if device is not None and text.isdecimal() and int(text):
        num, spec, name = int(text), load_spec(str(device)), str(device)
    else:
        found = re.fullmatch(r"(\d+)x([\w-]+)", text)
        if found is None or not int(found[1]) or device is not None:
            how = (
                "NUMBERxDEVICE, as 1024xh100-sxm"
                if device is None
                else "the number alone, as 1024, where --device has a file"
            )
            raise PlanError(f"'{text}' is no cluster; give {how}")
        num, spec = int(found[1]), _spec(found[2])
        name = spec.id
    links = {link.name: link.bytes_per_s.value for link in spec.links}
    near = next((link for name in _NEAREST for link in spec.links if link.name == name), None)
    if near is None:
        raise HardwareError(
            f"the data sheet of '{spec.id}' names no link between devices; add [[links]] with nvlink or pcie"
        )
    node = node or max(near.reach, _NODE)
    joined = min(near.reach or node, node)
    tiers = [Tier(name="node", reach=min(joined, num), bytes_per_s=near.bytes_per_s.value, latency_s=_NEAR_LATENCY_S)]
    if joined < min(node, num) and "pcie" in links:  # pairs have a bridge, and a node its PCIe
        tiers.append(Tier(name="pcie", reach=min(node, num), bytes_per_s=links["pcie"], latency_s=_NEAR_LATENCY_S))
    if num > node:
        tiers.append(Tier(name="fabric", reach=num, bytes_per_s=fabric_bytes_per_s, latency_s=_FAR_LATENCY_S))
    host = None
    if "pcie" in links:
        host = Host(bytes_per_s=links["pcie"], disk_bytes_per_s=disk_bytes_per_s, memory_bytes=host_bytes)
    return Cluster(device=name, num_devices=num, tiers=tuple(tiers), host=host)


def node_size(cluster: Cluster) -> int:
    """Devices of a node: what the last tier before the network reaches."""
    inner = [tier.reach for tier in cluster.tiers if tier.name != "fabric"]
    return inner[-1] if inner else cluster.num_devices


def samples_of(text: str, model: ModelShape) -> int:
    """Samples of a batch: '1024', or '4M-tokens', rounded to a power of two of samples where tokens are given in k, M or G.

    >>> samples_of("4M-tokens", ModelShape(hidden=64, layers=1, heads=1, vocab=9, seq=4096))
    1024
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kMG]?)(-tokens)?", text)
    if found is None:
        raise PlanError(f"'{text}' is no batch; give samples, as 1024, or tokens, as 4M-tokens")
    number = float(found[1]) * _UNITS[found[2]]
    if found[3] is None:
        return int(number)
    samples = number / model.seq
    if samples < 1:
        raise PlanError(f"{text} are less than one sample of {model.seq} tokens")
    whole = 1 << round(samples).bit_length() - 1
    return whole if samples / whole < 1.5 else 2 * whole


def tokens_of(text: str) -> float:
    """How many tokens '300G', '15T' or '4096' are.

    >>> tokens_of("1.5T")
    1500000000000.0
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kMGT]?)", text)
    if found is None or not float(found[1]):
        raise PlanError(f"'{text}' is no number of tokens; give it as 300G or 15T")
    return float(found[1]) * _UNITS[found[2]]


def _spec(name: str) -> HardwareSpec:
    ids = [spec.id for spec in all_specs()]
    return load_spec(next((i for i in ids if name == i or i.partition("-")[2] == name), name))
