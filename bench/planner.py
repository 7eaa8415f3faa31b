"""How far the planner is off on published steps that nobody here measured, table by table.

    python bench/planner.py [--table NAME ...] [--rows] [--left-out] [--out FILE] [--write-errors]

Tables are in bench/planner; each row is a step that someone published, with its model, layout, devices and seconds. Rows with
which shares or presets were set are marked: they are no test of these.

Per table: the mean of the predictions' distance from the measured seconds, over all rows and over those not in sight, the mean
with its sign, how many rows an interval holds that is made without the row itself, and how many that ran are said not to fit the
memory. `--left-out` chooses the three numbers of layers with experts anew without the model, the system or the releases that they
are then tried on. `--write-errors` writes src/flatout/scale/errors.toml, from which `flatout scale` has its intervals.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
import tomllib
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any, Final, NamedTuple

from msgspec import convert, structs

from flatout.core.errors import FlatoutError
from flatout.core.records.scale import Cluster, Layout, ModelShape, Price, Software
from flatout.scale.inputs import cluster_of
from flatout.scale.presets import NO_GRAPHS, PRESETS, WHOLE_GRAPHS
from flatout.scale.pricing import price
from flatout.scale.usual import usual_constants

FOLDER: Final = Path(__file__).parent / "planner"
ERRORS: Final = Path(__file__).parents[1] / "src" / "flatout" / "scale" / "errors.toml"
MODELS: Final[dict[str, Any]] = tomllib.loads((FOLDER / "models.toml").read_text(encoding="utf-8"))


class Row(NamedTuple):
    """A published step. `in_sight`: shares or presets were set with it in sight."""

    name: str
    model: ModelShape
    layout: Layout
    cluster: Cluster
    software: Software
    preset: str
    seconds: float
    memory_gib: float | None = None
    in_sight: bool = False
    is_balanced: bool = False
    """Routers were made to spread tokens evenly."""


class Priced(NamedTuple):
    """A row, and what was predicted for it; or why nothing was."""

    row: Row
    price: Price | None
    why: str = ""

    @property
    def error(self) -> float:
        """Of the predicted seconds, over the measured ones."""
        assert self.price is not None
        return self.price.step.total_s / self.row.seconds - 1

    @property
    def key(self) -> tuple[str, str, str]:
        """Device, software and kind of model: what an interval is made for."""
        kind = "experts" if self.row.model.num_experts > 1 else "dense"
        return Path(self.row.cluster.device).stem, self.row.preset, kind


def interval(errors: list[float]) -> tuple[float, float]:
    """How far predictions are too fast and too slow, for nine of ten steps or more: the 95th percentile either way, wider where
    few were compared, and 5 % at least.
    """
    few = 1 + 1.5 / len(errors) ** 0.5
    low, high = (
        max(0.05, few * sorted(max(0.0, sign * e) for e in errors)[min(len(errors) - 1, int(0.95 * len(errors)))])
        for sign in (-1, 1)
    )
    return min(0.9, low), high


def model(name: str, **changes: object) -> ModelShape:
    return convert({**MODELS[name], **changes}, ModelShape)


def lines_of(name: str) -> Iterator[dict[str, str]]:
    with (FOLDER / name).open(newline="", encoding="utf-8") as opened:
        yield from csv.DictReader(opened)


# -- tables ----------------------------------------------------------------------------------------------------------------------


def mpt_fsdp() -> Iterator[Row]:
    """MPT models with FSDP on A100 and H100 (MosaicML's llm-foundry, 2023)."""
    devices = {"h100_80gb": ("h100-sxm", 5e10), "a100_80gb": ("a100-80gb", 2.5e10), "a100_40gb": ("a100-40gb", 2.5e10)}
    software = structs.replace(PRESETS["fsdp1"].software, kernels="triton-2022")
    for line in lines_of("mpt_fsdp.csv"):
        device, fabric = devices[line["device"]]
        number = {
            name: int(line[name])
            for name in ("num_devices", "micro_batch", "global_batch", "seq_len", "hidden", "layers")
        }
        yield Row(
            f"{line['model']} {number['seq_len']} on {number['num_devices']} {device}, {line['precision']}",
            ModelShape(
                hidden=number["hidden"],
                layers=number["layers"],
                heads=int(line["heads"]),
                vocab=int(line["vocab"]),
                seq=number["seq_len"],
            ),
            Layout(
                data=number["num_devices"],
                micro_batch=number["micro_batch"],
                global_batch=number["global_batch"],
                shard=3 if line["sharding"] == "FULL_SHARD" else 2,
                recompute="full" if line["recompute"] == "True" else "none",
            ),
            cluster_of(f"{number['num_devices']}x{device}", fabric_bytes_per_s=fabric),
            structs.replace(software, dtype="float8") if line["precision"] == "amp_fp8" else software,
            "fsdp1",
            int(line["global_batch_tokens"]) / float(line["tokens_per_s"]),
            in_sight=True,
        )


def torchtitan() -> Iterator[Row]:
    """Llama 3 with FSDP2 on H100 of 500 W (torchtitan's benchmarks, 2024 and 2025)."""
    for line in lines_of("torchtitan.csv"):
        devices, tensor, context, pipeline = (int(line[n]) for n in ("devices", "tensor", "context", "pipeline"))
        name = "fsdp2-compiled" if line["compiled"] == "1" else "fsdp2"
        software = structs.replace(
            PRESETS[name].software,
            dtype="float8" if line["float8"] == "1" else "bfloat16",
            tensor_hidden=0.45 if line["async_tensor"] == "1" else 0.0,
            context_exchange="ring",
            context_pieces="balanced",
        )
        data = devices // (tensor * context * pipeline)
        device = FOLDER / "devices" / "h100-500w.toml"
        cluster = (
            cluster_of(f"{devices}", device=device) if "H200" not in line["report"] else cluster_of(f"{devices}xh200")
        )
        yield Row(
            f"{line['report']}: {line['model']} {line['seq']} on {devices}",
            model(line["model"], seq=int(line["seq"])),
            Layout(
                tensor=tensor,
                context=context,
                pipeline=pipeline,
                data=data,
                micro_batch=int(line["micro_batch"]),
                global_batch=int(line["global_batch"]),
                schedule="1f1b" if line["chunks"] == "1" else "interleaved",
                chunks=int(line["chunks"]),
                recompute=line["recompute"],  # type: ignore[arg-type]
                shard=3 if data * context > 1 else 0,
                is_sequence_parallel=tensor > 1,
            ),
            cluster,
            software,
            name,
            int(line["global_batch"]) * int(line["seq"]) / (float(line["tokens_per_s"]) * devices),
            memory_gib=float(line["memory_gib"]) if line["memory_gib"] else None,
            in_sight=True,
        )


def narayanan() -> Iterator[Row]:
    """GPT on up to 3072 A100 (Narayanan et al., 2021, table 1); micro-batches are not published: the fastest there is."""
    table = (
        (24, 2304, 24, 1, 1, 32, 512, 137), (32, 3072, 30, 2, 1, 64, 512, 138), (32, 4096, 36, 4, 1, 128, 512, 142),
        (48, 6144, 40, 8, 1, 256, 1024, 135), (64, 8192, 48, 8, 2, 512, 1536, 138), (80, 10240, 60, 8, 4, 1024, 1792, 140),
        (96, 12288, 80, 8, 8, 1536, 2304, 148), (128, 16384, 96, 8, 16, 1920, 2160, 155),
        (128, 20480, 105, 8, 35, 2520, 2520, 163), (160, 25600, 128, 8, 64, 3072, 3072, 163),
    )  # fmt: skip
    for heads, hidden, layers, tensor, pipeline, devices, batch, rate in table:
        shape = ModelShape(hidden=hidden, layers=layers, heads=heads, vocab=51200, seq=2048)
        flop = 96 * batch * 2048 * layers * hidden**2 * (1 + 2048 / (6 * hidden) + 51200 / (16 * layers * hidden))
        data = devices // (tensor * pipeline)
        cluster = cluster_of(f"{devices}xa100-80gb", fabric_bytes_per_s=2.5e10)
        software = PRESETS["megatron-2021"].software
        found = []
        for micro in (1, 2, 4, 8):
            if batch % (data * micro) == 0:
                layout = Layout(
                    tensor=tensor, pipeline=pipeline, data=data, micro_batch=micro, global_batch=batch, recompute="full"
                )
                row = Row(
                    f"{hidden} x {layers} on {devices}", shape, layout, cluster, software, "megatron-2021",
                    flop / (devices * rate * 1e12),
                )  # fmt: skip
                found.append((price(shape, layout, cluster, software).step.total_s, row))
        yield min(found, key=lambda pair: pair[0])[1]


def korthikanti() -> Iterator[Row]:
    """GPT of 22 to 1000 billion parameters on A100 with and without recomputing (Korthikanti et al., 2022, table 5)."""
    table = (
        (6144, 64, 48, 8, 1, 8, 4, 4, 1, 1.42, 1.10), (12288, 96, 96, 8, 8, 64, 64, 1, 3, 18.13, 13.75),
        (20480, 128, 105, 8, 35, 280, 280, 1, 3, 49.05, 37.83), (25600, 160, 128, 8, 64, 512, 512, 1, 1, 94.42, 71.49),
    )  # fmt: skip
    for hidden, heads, layers, tensor, pipeline, devices, batch, micro, chunks, full_s, present_s in table:
        shape = ModelShape(hidden=hidden, layers=layers, heads=heads, vocab=51200, seq=2048)
        cluster = cluster_of(f"{devices}xa100-80gb", fabric_bytes_per_s=2.5e10)
        for recompute, seconds in (("full", full_s), ("selective", present_s)):
            layout = Layout(
                tensor=tensor, pipeline=pipeline, data=1, micro_batch=micro, global_batch=batch,
                schedule="interleaved" if chunks > 1 else "1f1b", chunks=chunks, recompute=recompute,  # type: ignore[arg-type]
                is_sequence_parallel=recompute == "selective",
            )  # fmt: skip
            yield Row(
                f"{hidden} x {layers} on {devices}, {recompute}", shape, layout, cluster, PRESETS["megatron-2021"].software,
                "megatron-2021", seconds,
            )  # fmt: skip


_BRIDGE_MODELS: Final = {
    "LLAMA3_8B": "llama3-8b",
    "LLAMA3_70B": "llama3-70b",
    "LLAMA3.1_405B": "llama3.1-405b",
    "Qwen3_30B_a3B": "qwen3-30b-a3b",
    "Qwen3_235B_a22B": "qwen3-235b-a22b",
    "DeepSeekV3": "deepseek-v3",
    "Kimi_K2": "kimi-k2",
    "GPT OSS 120B": "gpt-oss-120b",
}
_BRIDGE_RECOMPUTED: Final[dict[tuple[str, str], tuple[str, ...]]] = {
    ("deepseek-v3", "H100"): ("latent", "feed-forward"),
    ("deepseek-v3", "B200"): ("latent",),
    ("deepseek-v3", "B300"): ("latent",),
    ("deepseek-v3", "GB200"): ("latent",),
    ("deepseek-v3", "GB300"): ("latent",),
    ("kimi-k2", "GB200"): ("latent",),
    ("kimi-k2", "GB300"): ("latent",),
    ("gpt-oss-120b", "H100"): ("norms", "gates"),
}
"""What the recipes recompute (src/megatron/bridge/perf_recipes, of August 2026; earlier releases differ in places)."""
_BRIDGE_LAYERS: Final = {("llama3-8b", "H100"): 5}
"""Of layers that are recomputed whole, by the same recipes."""
_LORA_SHARE: Final = 0.006
"""Of Llama 3 70B's parameters, in adapters of rank 16 of all its products."""
_BRIDGE_DEVICES: Final = {"H100": "h100-sxm", "B200": "b200", "GB200": "gb200", "B300": "b300", "GB300": "gb300"}
_BRIDGE_DTYPES: Final = {
    "BF16": "bfloat16",
    "FP8": "float8",
    "FP8-CS": "float8",
    "FP8-SC": "mxfp8",
    "FP8-MX": "mxfp8",
    "MXFP8": "mxfp8",
    "NVFP4": "nvfp4",
}


_RECOMPUTED: Final = {"mla_up_proj": "latent", "mlp": "feed-forward", "layernorm": "norms", "moe_act": "gates"}
"""Megatron's names of what is computed again, and ours."""


def _recipes() -> dict[tuple[str, ...], dict[str, str]]:
    """What the recipe of a release sets, by what a row of the summary is known by."""
    keys = ("release", "model", "system", "devices", "precision")
    return {tuple(line[key] for key in keys): line for line in lines_of("bridge_recipes.csv")}


class Chosen(NamedTuple):
    """The three numbers of layers with experts that were chosen on Megatron-Bridge's rows."""

    traffic: float
    """Of operators around experts that are not fused."""
    scale: float
    """Of what the host starts where nothing is captured, over the presets' usual."""
    each: int
    """Operators of each expert that is started by itself."""


_USUAL: Final = PRESETS["megatron-core"].software
CHOSEN: Final = Chosen(
    _USUAL.expert_traffic,
    NO_GRAPHS["forward_operators"] / _USUAL.forward_operators,
    PRESETS["megatron-core-2025"].software.expert_operators,
)
GRID: Final = tuple(Chosen(*one) for one in product((1.0, 1.5, 2.0, 2.5), (1.0, 2.0, 3.0, 4.5), (3, 7, 10)))


def _by_recipe(software: Software, recipe: dict[str, str], chosen: Chosen) -> Software:
    """The software with what the recipe says of experts' exchange, of what the host starts, and of fused operators."""
    changes: dict[str, Any] = {}
    if recipe.get("overlap", "?") != "?":
        changes["hides_experts"] = recipe["overlap"] == "1"
    if recipe.get("dispatcher", "?") != "?":
        changes["sends_once"] = recipe["dispatcher"] != "alltoall"
    alone = chosen.each if software.expert_operators else 0
    none = {name: round(chosen.scale * getattr(_USUAL, name)) for name in NO_GRAPHS} | {"expert_operators": alone}
    of_graphs = {"none": none, "full": dict(WHOLE_GRAPHS)}
    if recipe.get("graphs", "?") != "?":
        parts = {name: getattr(_USUAL, name) for name in NO_GRAPHS} | {"expert_operators": alone}
        changes |= of_graphs.get(recipe["graphs"], parts)
    elif alone:
        changes |= none
    if recipe:
        changes["expert_traffic"] = 1.0 if recipe["op_fuser"] == "1" else chosen.traffic
    return structs.replace(software, **changes)


def _preset(release: str) -> str:
    """Releases of 2026 started experts together from 26.02.01 on, and overlapped their exchanges from 26.06 on."""
    if release < "26.02.01":
        return "megatron-core-2025"
    return "megatron-core-overlapped" if release >= "26.06" else "megatron-core"


def bridge(*, system: str, experts: bool, chosen: Chosen = CHOSEN) -> Iterator[Row]:
    """Megatron-Bridge's performance summary, NVIDIA, 2025 and 2026."""
    recipes = _recipes()
    for line in lines_of("bridge.csv"):
        base = line["model"].partition(" (")[0]
        if line["system"] != system or base not in _BRIDGE_MODELS:
            continue
        sizes: dict[str, object] = {"seq": int(line["seq"])}
        if base == "DeepSeekV3" and "w/o MTP" in line["model"]:
            sizes["extra_tokens"] = 0
        shape = model(_BRIDGE_MODELS[base], **sizes)
        if (shape.num_experts > 1) != experts:
            continue

        def number(name: str, line: dict[str, str] = line) -> int:
            return int(line[name]) if line[name].isdecimal() else 1

        devices, tensor, pipeline, context = (number(n) for n in ("devices", "tensor", "pipeline", "context"))
        data = devices // (tensor * pipeline * context)
        chunks = number("chunks") if pipeline > 1 else 1
        micro = int(line["micro_batch"])
        is_sharded = line["fsdp"].isdecimal() and int(line["fsdp"]) > 1
        name = _preset(line["release"])
        software = structs.replace(
            PRESETS[name].software,
            dtype=_BRIDGE_DTYPES[line["precision"]],
            context_exchange="ring",
            context_pieces="balanced",
            trained_share=_LORA_SHARE if line["task"] == "lora" else 1.0,
        )
        recipe = recipes.get((line["release"], line["model"], system, line["devices"], line["precision"]), {})
        software = _by_recipe(software, recipe, chosen)
        device = _BRIDGE_DEVICES[system.removeprefix("DGX-")]
        key = _BRIDGE_MODELS[base], system.removeprefix("DGX-")
        parts, whole = _BRIDGE_RECOMPUTED.get(key, ()), _BRIDGE_LAYERS.get(key, 0)
        if recipe.get("recompute", "?") != "?":
            parts = tuple(_RECOMPUTED[name] for name in recipe["recompute"].split("+") if name in _RECOMPUTED)
        try:
            layout = Layout(
                tensor=tensor,
                context=context,
                pipeline=pipeline,
                data=data,
                expert=number("expert"),
                expert_tensor=1 if shape.num_experts > 1 else 0,
                micro_batch=micro,
                global_batch=int(line["global_batch"]),
                schedule="interleaved" if chunks > 1 else "1f1b",
                chunks=chunks,
                shard=3 if is_sharded else 1 if data > 1 else 0,
                is_sequence_parallel=tensor > 1,
                counts_ends=shape.layers % (pipeline * chunks) != 0,
                recompute="parts" if parts else "full" if whole else "none",
                recomputed=parts,  # type: ignore[arg-type]
                recompute_layers=whole,
                offload_layers=40 if is_sharded and base == "LLAMA3_70B" else 0,
            )
            cluster = cluster_of(f"{devices}x{device}")
        except FlatoutError as e:
            print(f"left out: {line['release']} {line['model']} {system}: {e}", file=sys.stderr)
            continue
        yield Row(
            f"{line['release']} {line['model']} {line['precision']} {line['task']} on {devices} {system}",
            shape,
            layout,
            cluster,
            software,
            name,
            int(line["global_batch"]) * shape.seq / (float(line["tokens_per_s"]) * devices),
            in_sight=line["task"] == "pre-training",
            is_balanced=True,
        )


TABLES: Final[dict[str, Callable[[], Iterator[Row]]]] = {
    "korthikanti": korthikanti,
    "narayanan": narayanan,
    "mpt-fsdp": mpt_fsdp,
    "torchtitan": torchtitan,
    **{
        f"bridge-{system.lower()}-{'experts' if experts else 'dense'}": lambda s=system, e=experts: bridge(  # type: ignore[misc]
            system=f"DGX-{s}", experts=e
        )
        for system in ("H100", "B200", "GB200", "B300", "GB300")
        for experts in (False, True)
    },
}


# -- figures ---------------------------------------------------------------------------------------------------------------------


def priced(row: Row) -> Priced:
    try:
        constants = usual_constants(row.model, row.cluster, row.software).constants
        if row.is_balanced:
            constants = structs.replace(constants, routing_imbalance=1.0)
        return Priced(row, price(row.model, row.layout, row.cluster, row.software, constants, preset=row.preset))
    except FlatoutError as e:
        return Priced(row, None, str(e))


def share_inside(rows: list[Priced], every: list[Priced]) -> float | None:
    """Share of the rows that lie in an interval made of the errors of all others of the same device, software and kind."""
    inside = []
    for one in rows:
        others = [o.error for o in every if o is not one and o.key == one.key]
        if others:
            low, high = interval(others)
            inside.append(-low <= one.error <= high)
    return mean(inside) if inside else None


def summary(rows: list[Priced], every: list[Priced]) -> dict[str, Any]:
    known = [one for one in rows if one.price is not None]
    errors = [one.error for one in known]
    unseen = [one.error for one in known if not one.row.in_sight]
    memory = [
        one.price.fullest.total_bytes / 2**30 / one.row.memory_gib - 1
        for one in known
        if one.row.memory_gib is not None and one.price is not None
    ]
    return {
        "rows": len(rows),
        "in sight": len(known) - len(unseen),
        "not priced": len(rows) - len(known),
        "error": mean(map(abs, errors)) if errors else None,
        "bias": mean(errors) if errors else None,
        "worst": max(errors, key=abs) if errors else None,
        "error of unseen rows": mean(map(abs, unseen)) if unseen else None,
        "inside": share_inside(known, [one for one in every if one.price is not None]),
        "said not to fit": sum(one.price.is_too_large for one in known if one.price is not None),
        "memory error": mean(map(abs, memory)) if memory else None,
    }


def _model_of(row: Row) -> str:
    """The model's name, as the summary has it."""
    return next(name for name in _BRIDGE_MODELS if row.name.split(" ", 1)[1].startswith(name))


def left_out() -> dict[str, Any]:
    """Errors of layers with experts where the three numbers were chosen on other rows alone: without the model, without the
    system, and on releases before 26.04 for those from then on.
    """
    systems = [f"DGX-{system}" for system in ("H100", "B200", "GB200", "B300", "GB300")]
    names: list[tuple[str, str, str]] = []
    errors: list[list[float]] = []
    for number, chosen in enumerate(GRID):
        rows = [
            (system, priced(row)) for system in systems for row in bridge(system=system, experts=True, chosen=chosen)
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
        "--left-out", action="store_true", help="choose the numbers of experts without what they are tried on"
    )
    options = parser.parse_args()
    result: dict[str, Any] = {}
    tables = {name: [priced(row) for row in TABLES[name]()] for name in options.table}
    every = [one for rows in tables.values() for one in rows]
    for name, rows in tables.items():
        found = summary(rows, every)
        about = (TABLES[name].__doc__ or bridge.__doc__ or "").strip()
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
    """The errors of all rows, by device, software and kind, for the intervals that are printed."""
    by_key: dict[tuple[str, str, str], list[float]] = {}
    for one in rows:
        if one.price is not None:
            by_key.setdefault(one.key, []).append(one.error)
    lines = ["# Written by `python bench/planner.py --write-errors`: how far predictions were off on published steps."]
    for (device, software, kind), errors in sorted(by_key.items()):
        low, high = interval(errors)
        lines += ["", "[[errors]]", f'device = "{device}"', f'software = "{software}"', f'kind = "{kind}"']
        lines += [f"rows = {len(errors)}", f"low = {low:.3f}", f"high = {high:.3f}"]
    ERRORS.write_text("\n".join(lines) + "\n", encoding="utf-8")


def row_record(one: Priced) -> dict[str, Any]:
    """A row as it is stored."""
    base = {"name": one.row.name, "seconds": one.row.seconds, "in_sight": one.row.in_sight}
    if one.price is None:
        return {**base, "why": one.why}
    return {**base, "predicted_s": one.price.step.total_s, "low_s": one.price.low_s, "high_s": one.price.high_s,
            "memory_gib": one.row.memory_gib, "predicted_gib": one.price.fullest.total_bytes / 2**30}  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main())
