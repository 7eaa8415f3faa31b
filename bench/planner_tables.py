"""Published steps that nobody here measured, as rows with a model, a layout, devices, software and seconds; for bench/planner.py.

Tables are in bench/planner. `in_sight` marks rows with which shares or presets were set: they are no test of these.
"""

from __future__ import annotations

import csv
import sys
import tomllib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from msgspec import convert, structs

from flatout.core.errors import FlatoutError
from flatout.core.records.scale import Cluster, Layout, ModelShape, Software
from flatout.scale.inputs import cluster_of
from flatout.scale.intervals import model_kind
from flatout.scale.presets import NO_GRAPHS, PRESETS, WHOLE_GRAPHS
from flatout.scale.pricing import price

FOLDER: Final = Path(__file__).parent / "planner"
MODELS: Final[dict[str, Any]] = tomllib.loads((FOLDER / "models.toml").read_text(encoding="utf-8"))


class Row(NamedTuple):
    """A published step; `seconds` None: it ran out of memory. `in_sight`: shares or presets were set with it in sight.
    `is_mended`: none was, but what the planner counts was mended after its error had been seen."""

    name: str
    model: ModelShape
    layout: Layout
    cluster: Cluster
    software: Software
    preset: str
    seconds: float | None
    memory_gib: float | None = None
    in_sight: bool = False
    is_mended: bool = False
    is_balanced: bool = False
    """Routers were made to spread tokens evenly."""


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


BRIDGE_MODELS: Final = {
    "LLAMA3_8B": "llama3-8b",
    "LLAMA3_70B": "llama3-70b",
    "LLAMA3.1_405B": "llama3.1-405b",
    "Qwen3_30B_a3B": "qwen3-30b-a3b",
    "Qwen3_235B_a22B": "qwen3-235b-a22b",
    "DeepSeekV3": "deepseek-v3",
    "Kimi_K2": "kimi-k2",
    "GPT OSS 120B": "gpt-oss-120b",
    "DeepSeekV4 Flash": "deepseek-v4-flash",
    "Nemotron_3_Nano": "nemotron-3-nano",
    "Nemotron_3_5_Lightning": "nemotron-3.5-lightning",
    "Nemotron_3_Super": "nemotron-3-super",
    "Nemotron_3_Ultra": "nemotron-3-ultra",
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


def _trained(task: str, adapted: str = "queries") -> dict[str, Any]:
    """What LoRA changes of the software: Megatron-Bridge's recipes have adapters beside queries, keys and values alone, and
    NeMo's before them are taken to have the same."""
    return {"trained_share": _LORA_SHARE, "adapter_rank": 16, "adapted": adapted} if task == "lora" else {}


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


_RECOMPUTED: Final = {
    "mla_up_proj": "latent",
    "mlp": "feed-forward",
    "layernorm": "norms",
    "moe_act": "gates",
    "moe": "experts",
    "core_attn": "attention",
}
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


_HIDES_TENSOR: Final = {
    name for name in BRIDGE_MODELS if name.startswith(("LLAMA3", "Qwen3", "GPT OSS", "Nemotron_3_Nano"))
}
"""Models whose recipes set tp_comm_overlap (src/megatron/bridge/perf_recipes at v0.6.0); those of others do not."""


def bridge(*, system: str, kind: str, chosen: Chosen = CHOSEN) -> Iterator[Row]:
    """Megatron-Bridge's performance summary, NVIDIA, 2025 and 2026."""
    recipes = _recipes()
    for line in lines_of("bridge.csv"):
        base = line["model"].partition(" (")[0]
        if line["system"] != system or base not in BRIDGE_MODELS:
            continue
        sizes: dict[str, object] = {"seq": int(line["seq"])}
        if base == "DeepSeekV3" and "w/o MTP" in line["model"]:
            sizes["extra_tokens"] = 0
        shape = model(BRIDGE_MODELS[base], **sizes)
        if model_kind(shape) != kind:
            continue

        def number(name: str, line: dict[str, str] = line) -> int:
            return int(line[name]) if line[name].isdecimal() else 1

        devices, tensor, pipeline, context = (number(n) for n in ("devices", "tensor", "pipeline", "context"))
        data = devices // (tensor * pipeline * context)
        chunks = number("chunks") if pipeline > 1 else 1
        micro = int(line["micro_batch"])
        recipe = recipes.get((line["release"], line["model"], system, line["devices"], line["precision"]), {})
        shard_ranks = int(recipe.get("shard_ranks") or 0)
        is_sharded = (line["fsdp"].isdecimal() and int(line["fsdp"]) > 1) or shard_ranks > 0
        name = _preset(line["release"])
        software = structs.replace(
            PRESETS[name].software,
            dtype=_BRIDGE_DTYPES[line["precision"]],
            context_exchange="ring",
            context_pieces="balanced",
            **_trained(line["task"]),
        )
        software = _by_recipe(software, recipe, chosen)
        if base not in _HIDES_TENSOR:
            software = structs.replace(software, tensor_hidden=0.0)
        is_new = kind == "hybrid" or base == "DeepSeekV4 Flash"  # they could not be described when numbers were set
        if (
            base == "Nemotron_3_Super" and software.dtype == "nvfp4"
        ):  # te_quant.cfg of its recipes, and their last layers
            software = structs.replace(software, half_parts=("attention", "latent-experts"), half_layers=14)
        device = _BRIDGE_DEVICES[system.removeprefix("DGX-")]
        key = BRIDGE_MODELS[base], system.removeprefix("DGX-")
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
                shard_ranks=shard_ranks,
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
            in_sight=line["task"] == "pre-training" and not is_new,
            is_mended=is_new,
            is_balanced=True,
        )


def staged_layout(shape: ModelShape, line: dict[str, str], **changes: Any) -> Layout:
    """The layout that a line's degrees say; what they leave of the devices are data ranks, which share the optimizer's state."""
    devices, tensor, pipeline, context, chunks = (
        int(line[name]) for name in ("devices", "tensor", "pipeline", "context", "chunks")
    )
    data = devices // (tensor * pipeline * context)
    layout = Layout(
        tensor=tensor,
        context=context,
        pipeline=pipeline,
        data=data,
        expert=int(line["expert"]),
        expert_tensor=1 if shape.num_experts > 1 else 0,
        micro_batch=int(line["micro_batch"]),
        global_batch=int(line["global_batch"]),
        schedule="interleaved" if chunks > 1 else "1f1b",
        chunks=chunks,
        shard=1 if data > 1 else 0,
        is_sequence_parallel=tensor > 1,
        counts_ends=shape.layers % (pipeline * chunks) != 0,
    )
    return structs.replace(layout, **changes)


def nemo(*, system: str, experts: bool) -> Iterator[Row]:
    """NeMo's performance summaries of 24.12, 25.02 and 25.04 in 8 bits (NVIDIA, 2024 and 2025)."""
    for line in lines_of("nemo.csv"):
        shape = model(line["model"], seq=int(line["seq"]))
        if line["system"] != system or (shape.num_experts > 1) != experts:
            continue
        devices, name = int(line["devices"]), "megatron-core-2025"
        yield Row(
            f"{line['release']} {line['model']} {line['task']} on {devices} {system}",
            shape,
            staged_layout(shape, line, **({"shard": 3} if line["fsdp"] == "1" else {})),
            cluster_of(f"{devices}x{_BRIDGE_DEVICES[system.removeprefix('DGX-')]}"),
            structs.replace(
                PRESETS[name].software,
                dtype="float8",
                context_exchange="ring",
                context_pieces="balanced",
                **_trained(line["task"]),
            ),
            name,
            int(line["global_batch"]) * shape.seq / (float(line["tokens_per_s"]) * devices),
            is_mended=True,
            is_balanced=True,
        )


_FMS_TRAFFIC: Final = 1.5
"""Over torchtitan's layer, what fms's of February 2024 takes without products and attention in eager mode: its rotary positions
make four numbers of each, and norms and positions are in single precision (bench/llama_layers_device.py on an H200: 1.47 to
1.52)."""


def fms_fsdp() -> Iterator[Row]:
    """Llama 2 with FSDP on A100 and H100 (IBM's fms-fsdp, 2024); the recomputed share follows from its HFU over MFU."""
    fabrics = {"a100-80gb": 6.25e9, "h100-sxm": 1.25e10}  # 400 and 800 Gbit/s a node of 8
    for line in lines_of("fms.csv"):
        shape, devices = model(line["model"], seq=int(line["seq"])), int(line["devices"])
        share = 1 / 3 if line["recomputed_share"] == "?" else float(line["recomputed_share"])
        layers, micro = round(share * shape.layers), int(line["micro_batch"])
        name = "fsdp2-compiled" if line["compiled"] == "1" else "fsdp1"
        plain = (
            {} if line["compiled"] == "1" else {"gated_traffic": _FMS_TRAFFIC * PRESETS[name].software.gated_traffic}
        )
        # gradients are reduced in bfloat16 (policies/mixed_precision.py), attention is torch's of then, the loss is plain
        software = structs.replace(
            PRESETS[name].software, gradient_bytes=2, kernels="flash-2", loss_bytes=8, stops_early=True, **plain
        )
        yield Row(
            f"{line['date']} {line['model']} on {devices} {line['device']}{', compiled' * int(line['compiled'])}",
            shape,
            Layout(
                data=devices,
                micro_batch=micro,
                global_batch=devices * micro,
                shard=3,
                shard_ranks=8 if line["sharding"] == "hsdp" else 0,
                recompute="full" if layers else "none",
                recompute_layers=layers if layers < shape.layers else 0,
            ),
            cluster_of(f"{devices}x{line['device']}", fabric_bytes_per_s=fabrics[line["device"]]),
            software,
            name,
            micro * shape.seq / float(line["tokens_per_s"]),
            is_mended=True,
        )


def kempner() -> Iterator[Row]:
    """Llama 3 with FSDP2 and tensor parallelism on H200, four a node (KempnerForge, 2026)."""
    models = {"7b": "llama3-8b", "13b": "kempner-13b", "70b": "llama3-70b"}
    for line in lines_of("kempner.csv"):
        devices, tensor, data, micro = (int(line[name]) for name in ("devices", "tensor", "data", "micro_batch"))
        name = "fsdp2-compiled" if line["compiled"] == "1" else "fsdp2"
        yield Row(
            f"{line['model']} on {devices}, tensor {tensor}",
            model(models[line["model"]], seq=4096),
            Layout(
                tensor=tensor,
                data=data,
                micro_batch=micro,
                global_batch=data * micro * int(line["accumulated"]),
                shard=3 if data > 1 else 0,
                is_sequence_parallel=tensor > 1,
                recompute="full",
            ),
            cluster_of(f"{devices}xh200", node=4),
            structs.replace(PRESETS[name].software, state_bytes=4),  # weights and moments in bfloat16
            name,
            float(line["step_s"]),
            memory_gib=float(line["memory_gb"]),
            is_mended=True,
        )


def automodel(*, experts: bool) -> Iterator[Row]:
    """PyTorch models with FSDP2 on H100 (NVIDIA's NeMo AutoModel, April 2026); each local batch is a pipeline's own run."""
    for line in lines_of("automodel.csv"):
        shape = model(line["model"], seq=int(line["seq"]))
        if (shape.num_experts > 1) != experts:
            continue
        devices, layout = int(line["devices"]), staged_layout(shape, line)
        runs = layout.global_batch // (layout.data * int(line["local_batch"])) if layout.pipeline > 1 else 1
        yield Row(
            f"{line['model']} {line['task']} on {devices}",
            shape,
            structs.replace(
                layout,
                global_batch=layout.global_batch // runs,
                shard=3 if layout.data * layout.context > 1 else 0,
                recompute="full" if line["recomputed"] == "1" else "none",
            ),
            cluster_of(f"{devices}xh100-sxm"),
            structs.replace(
                PRESETS["fsdp2-compiled" if line["compiled"] == "1" else "fsdp2"].software,
                sends_once=True,
                gated_traffic=1.4,
                state_bytes=4,  # weights and moments in bfloat16
                **_trained(line["task"], "all"),  # target_modules: "*_proj"
            ),
            "fsdp2",
            float(line["step_s"]) / runs,
            is_mended=True,
            is_balanced=experts,
        )


def dgxc(*, system: str, experts: bool) -> Iterator[Row]:
    """NVIDIA's DGX Cloud benchmarks of NeMo 24.12 and 25.05 in 16 and 8 bits, on 8 to 2304 devices (2025)."""
    for line in lines_of("dgxc.csv"):
        layers = {"layers": int(line["layers"])} if line["layers"] != "0" else {}
        shape = model(line["model"], seq=int(line["seq"]), **layers)
        if line["system"] != system or (shape.num_experts > 1) != experts:
            continue
        devices, name = int(line["devices"]), "megatron-core-2025"
        yield Row(
            f"{line['release']} {line['model']} {line['dtype']} on {devices}, batch {line['global_batch']}",
            shape,
            staged_layout(shape, line, **({"expert_tensor": int(line["expert_tensor"])} if experts else {})),
            cluster_of(f"{devices}x{system}"),
            structs.replace(
                PRESETS[name].software, dtype=line["dtype"], context_exchange="ring", context_pieces="balanced"
            ),
            name,
            float(line["step_s"]),
            in_sight=system == "gb200" and line["dtype"] == "bfloat16",
            is_mended=system == "h100-sxm" and line["dtype"] == "float8",
            is_balanced=True,
        )


def torchtitan_2024() -> Iterator[Row]:
    """Llama 2 and 3 with FSDP2 in eager mode on 64 A100 (torchtitan, April and August 2024)."""
    for line in lines_of("torchtitan_2024.csv"):
        shape, devices, micro = (
            model(line["model"], seq=int(line["seq"])),
            int(line["devices"]),
            int(line["micro_batch"]),
        )
        share = float(line["recomputed_share"])
        yield Row(
            f"{line['date']} {line['model']} on {devices}, batch {micro}, {line['recompute']} {share:g}",
            shape,
            Layout(
                data=devices,
                micro_batch=micro,
                global_batch=devices * micro,
                shard=3,
                recompute=line["recompute"],  # type: ignore[arg-type]
                recompute_layers=round(share * shape.layers) if 0 < share < 1 else 0,
            ),
            cluster_of(f"{devices}xa100-80gb", fabric_bytes_per_s=2.5e10),
            PRESETS["fsdp2"].software,
            "fsdp2",
            micro * shape.seq / float(line["tokens_per_s"]) if line["tokens_per_s"] != "OOM" else None,
        )


TABLES: Final[dict[str, Callable[[], Iterator[Row]]]] = {
    "korthikanti": korthikanti,
    "narayanan": narayanan,
    "mpt-fsdp": mpt_fsdp,
    "torchtitan": torchtitan,
    **{
        f"bridge-{system.lower()}-{kind}": partial(bridge, system=f"DGX-{system}", kind=kind)
        for system in ("H100", "B200", "GB200", "B300", "GB300")
        for kind in ("dense", "experts", "hybrid")
    },
    **{
        f"nemo-{system.lower()}-{'experts' if experts else 'dense'}": partial(
            nemo, system=f"DGX-{system}", experts=experts
        )
        for system, experts in (*(("H100", False), ("B200", False), ("B200", True), ("GB200", False), ("GB200", True)),)
    },
    "fms-fsdp": fms_fsdp,
    "kempner": kempner,
    "automodel-dense": partial(automodel, experts=False),
    "torchtitan-2024": torchtitan_2024,
    **{
        f"dgxc-{name}-{'experts' if experts else 'dense'}": partial(dgxc, system=system, experts=experts)
        for name, system in (("h100", "h100-sxm"), ("gb200", "gb200"))
        for experts in (False, True)
    },
    "automodel-experts": partial(automodel, experts=True),
}
