"""Software that people train with, as the planner knows it: by name, or from a file that changes some of a named one."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
from msgspec import structs

from flatout.core.errors import PlanError, RecordError
from flatout.core.records.record import parse_toml
from flatout.core.records.scale import Software
from flatout.scale.executor import EXECUTOR


class Preset(NamedTuple):
    """How a program works, and where that is known from."""

    software: Software
    source: str


_EAGER_TRAFFIC: Final = 1.4
"""Norms, activations and residuals as single operators of PyTorch: chosen on all rows of MosaicML's table."""

_PLAIN_TRAFFIC: Final = 2.9
"""The same of Llama's layers, whose norms, rotary positions and gates are several operators each: at this, torchtitan's eager
steps on 8 and 128 devices are right in the mean (benchmarks, December 2024, tables 1 and 3)."""

_EXPERT_TRAFFIC: Final = 2.5
"""Around experts, before Megatron-Core's operators there were fused (permutation, scaling, activation, casts one by one). Chosen
on all rows of Megatron-Bridge's summary; `bench/planner.py --left-out` says how far off it is where it was chosen on others."""

_CORE: Final = Software(
    program="megatron-core",
    gradient_bytes=2,
    optimizer_bytes=28,
    has_dropout=False,
    loss_bytes=4,
    state_bytes=12,
    tensor_hidden=0.8,
    expert_traffic=_EXPERT_TRAFFIC,
    gathers_ahead=True,
    gathers_eight=True,
    context_exchange="ring",
    context_pieces="balanced",
    casts_weights_once=True,
)

_MEGATRON: Final = Software(
    program="megatron", dtype="float16", attention="megatron", gradient_bytes=2, has_overlap=False
)

_TORCHTITAN: Final = structs.replace(
    EXECUTOR,
    program="torch",
    kernels="flash-2",
    cast_passes=1.5,
    context_pieces="balanced",
    autocast_alone=False,
)

NO_GRAPHS: Final = {"forward_operators": 40, "backward_operators": 60, "routing_operators": 40}
"""What the host starts of a Megatron-Core layer with experts where nothing is captured: chosen on the same rows."""

WHOLE_GRAPHS: Final = {"forward_operators": 0, "backward_operators": 0, "routing_operators": 0, "expert_operators": 0}
"""The same where whole steps are captured."""

PRESETS: Final[Mapping[str, Preset]] = {
    "megatron-2021": Preset(
        _MEGATRON,
        "Megatron-LM of 2021 (Narayanan et al.): scores written, fused softmax, gradients reduced after the backward",
    ),
    "megatron-core": Preset(
        _CORE,
        "Megatron-Core of early 2026: fused attention, norms, gates and loss, a sharded optimizer, reduction in bfloat16, "
        "graphs of parts, experts started together, all-to-all",
    ),
    "megatron-core-overlapped": Preset(
        structs.replace(_CORE, sends_once=True, hides_experts=True, expert_traffic=1.0, **WHOLE_GRAPHS),
        "the same of mid-2026: whole steps captured, operators around experts fused, tokens cross to a node once (HybridEP), "
        "beside another micro-batch",
    ),
    "megatron-core-2025": Preset(
        structs.replace(_CORE, expert_operators=7, **NO_GRAPHS),
        "the same of 2025 without graphs, where each expert's products are started by themselves",
    ),
    "deepspeed": Preset(
        _MEGATRON,
        "Megatron-DeepSpeed of 2022: Megatron's layers, ZeRO's stage 1",
    ),
    "fsdp1": Preset(
        Software(
            program="torch",
            gradient_bytes=2,
            optimizer_bytes=28,
            pads_vocabulary=False,
            has_dropout=False,
            fuses_gate=False,
            loss_bytes=2,
            traffic=_EAGER_TRAFFIC,
            gated_traffic=_PLAIN_TRAFFIC,
        ),
        "torch.distributed.fsdp.FullyShardedDataParallel in eager mode, a buffer a layer, fused attention and loss",
    ),
    "fsdp2": Preset(
        structs.replace(_TORCHTITAN, traffic=_EAGER_TRAFFIC, gated_traffic=_PLAIN_TRAFFIC),
        "fully_shard and DTensor in eager mode (torchtitan without torch.compile), float32 gradients, plain loss",
    ),
    "fsdp2-compiled": Preset(
        structs.replace(_TORCHTITAN, fuses_gate=True, loss_bytes=8),
        "the same with torch.compile of each block",
    ),
    "flatout": Preset(EXECUTOR, "this project's own executor"),
}


def named_software(name: str) -> tuple[Software, str]:
    """The software of a name or of a TOML file, and in words what it is.

    A file has keys of Software, and `base`, the name of what it changes.

    Raises PlanError when there is no such name or file, or a key is unknown or wrong.
    """
    if name in PRESETS:
        preset = PRESETS[name]
        return preset.software, f"{name}: {preset.source}"
    if not name.endswith(".toml"):
        near = get_close_matches(name, PRESETS, n=1)
        hint = f"did you mean '{near[0]}'?" if near else f"there are {', '.join(PRESETS)}, or give a TOML file"
        raise PlanError(f"no software '{name}' is known; {hint}")
    try:
        raw = parse_toml(Path(name).read_bytes())
    except OSError as e:
        raise PlanError(f"cannot read '{name}': {e.strerror or e}") from e
    except RecordError as e:
        raise PlanError(f"'{name}' is no TOML: {e}") from e
    base = str(raw.pop("base", "fsdp2"))
    if base not in PRESETS:
        raise PlanError(f"'{name}' has base = {base!r}; there are {', '.join(PRESETS)}")
    known = Software.__struct_fields__
    if unknown := sorted(set(raw) - set(known)):
        raise PlanError(f"'{name}' has '{unknown[0]}'; software has base, {', '.join(sorted(known))}")
    try:
        changed = msgspec.convert(raw, Software)
    except msgspec.ValidationError as e:
        raise PlanError(f"'{name}': {e}") from e
    software = structs.replace(PRESETS[base].software, **{key: getattr(changed, key) for key in raw})
    return (
        software,
        f"{name}: {base} with {', '.join(f'{key} = {getattr(changed, key)}' for key in raw) or 'no change'}",
    )
