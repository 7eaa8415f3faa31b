"""Low-rank pairs in the two files that PEFT keeps an adapter in: adapter_config.json and adapter_model.safetensors.

PEFT 0.21 names a tensor `base_model.model.<path>.lora_A.weight` (lora_B.weight, lora_magnitude_vector), and takes a list of
targets by the ends of their paths, one text as a regular expression of whole paths.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import torch
from safetensors.torch import save
from torch import Tensor, nn

from flatout.core.errors import CheckpointError, RecordError, UsageError
from flatout.core.files import read_regular_file
from flatout.core.records.adapt import Lora, Trained
from flatout.core.records.record import decode_json
from flatout.shrink.adapt.attachment import plain_modules
from flatout.shrink.adapt.files import read_tensors
from flatout.shrink.adapt.low_rank import PLAIN, LowRank, pair_of
from flatout.shrink.checkpoint_file import write_checkpoint_file

_PREFIX: Final = "base_model.model."
_CONFIG: Final = "adapter_config.json"
_TENSORS: Final = "adapter_model.safetensors"
_SUPPORTED: Final = (nn.Linear, nn.Conv1d, nn.Conv2d)
_UNREAD: Final = (
    "fan_in_fan_out", "modules_to_save", "layer_replication", "alora_invocation_tokens", "use_qalora", "lora_bias",
    "target_parameters", "use_bdlora", "arrow_config", "kasa_config", "velora_config", "monteclora_config",
    "trainable_token_indices", "layers_to_transform", "layers_pattern",
)  # fmt: skip
"""Settings of PEFT that change what is computed and have no counterpart here."""
_ENDLESS: Final = re.compile(r"[*+?}]\)*[*+{]|\(.*\|.*\)[*+{]")
"""Repeats what repeats: looking for such a pattern may take for ever."""
_LONGEST_PATTERN: Final = 500


class PairSettings(msgspec.Struct, frozen=True):
    """What adapter_config.json says of the pairs, by PEFT's names; all else in it is of no matter here, or refused."""

    r: Annotated[int, msgspec.Meta(ge=1)]
    lora_alpha: float
    lora_dropout: Annotated[float, msgspec.Meta(ge=0, lt=1)] | None = None
    use_dora: bool | None = None
    use_rslora: bool | None = None
    alpha_pattern: dict[str, float] | None = None


def write_peft(model: nn.Module, trained: Trained, state: Iterable[str], folder: Path) -> None:
    """Both files, the configuration last.

    Raises UsageError for what PEFT cannot hold, with the reason.
    """
    if not isinstance(trained.method, Lora):
        raise UsageError(
            f"PEFT's file of a plain module holds LoRA and DoRA, not {type(trained.method).__name__}; use save"
        )
    added = {f"{host.partition('/')[0]}.low_rank.".lstrip(".") for host in trained.hosts}
    changed = [path for path in state if not path.startswith(tuple(added))]
    if changed:
        raise UsageError(
            f"training changed '{changed[0]}', which PEFT's file does not hold; use save, or keep that layer in eval mode"
        )
    pairs = {}
    for host in trained.hosts:
        _check_supported(model, host)
        pairs[host.partition("/")[0]] = pair(model, host)
    tensors: dict[str, Tensor] = {}
    for path, one in pairs.items():
        tensors[f"{_PREFIX}{path}.lora_A.weight"], tensors[f"{_PREFIX}{path}.lora_B.weight"] = one.a, one.b
        if one.length is not None:
            shape = one.length.shape if one.b.dim() == 2 else (1, -1, *(1,) * (one.b.dim() - 2))
            tensors[f"{_PREFIX}{path}.lora_magnitude_vector"] = one.length.view(shape)
    folder.mkdir(parents=True, exist_ok=True)
    data = save({name: t.detach().cpu().contiguous() for name, t in tensors.items()}, {"format": "pt"})
    write_checkpoint_file(folder / _TENSORS, data)
    config = _config(model, pairs, trained.method)
    write_checkpoint_file(folder / _CONFIG, json.dumps(config, indent=2, sort_keys=True).encode())


def read_peft(model: nn.Module, folder: Path) -> tuple[Trained, dict[str, float], dict[str, Tensor]]:
    """The adapter as it is to be placed in the model, the factor of each pair, and the tensors by flatout's names.

    Raises CheckpointError for a folder that is no adapter of PEFT, UsageError for settings that are not carried out here.
    """
    settings = _read_config(folder)
    _, found = read_tensors(folder / _TENSORS)
    strange = next((n for n, t in found.items() if not n.startswith(_PREFIX) or not t.numel() or not t.dim()), None)
    if strange is not None:
        raise CheckpointError(f"'{folder / _TENSORS}' holds '{strange[:80]}', which PEFT does not write; it is damaged")
    paths = [name[len(_PREFIX) : -len(".lora_A.weight")] for name in found if name.endswith(".lora_A.weight")]
    modules = dict(plain_modules(model))
    for path in paths:
        if path not in modules:
            raise CheckpointError(f"'{folder}' adapts '{path}', which this model does not have")
        _check_supported(model, f"{path}/weight")
    ranks = {path: found[f"{_PREFIX}{path}.lora_A.weight"].shape[0] for path in paths}
    if len(set(ranks.values())) > 1:
        raise UsageError(f"'{folder}' has pairs of ranks {sorted(set(ranks.values()))}; an adapter here has one rank")
    method = Lora(
        rank=settings.r,
        targets=tuple(paths),
        alpha=settings.lora_alpha,
        is_dora=bool(settings.use_dora),
        dropout=settings.lora_dropout or 0.0,
    )
    tensors = {}
    for name, tensor in found.items():
        path, _, kind = name[len(_PREFIX) :].rpartition(".lora_")
        ours = {"A.weight": "a", "B.weight": "b", "magnitude_vector": "length"}.get(kind)
        if ours is None or path not in ranks:
            raise UsageError(f"'{folder}' holds '{name}', which is no part of a pair of a layer")
        tensors[f"{path}.low_rank.weight.{ours}"] = tensor.flatten() if ours == "length" else tensor
    hosts = tuple(f"{path}/weight" for path in paths)
    scales = {host: _scale(settings, host.partition("/")[0], ranks) for host in hosts}
    rank = next(iter(ranks.values()), settings.r)
    return Trained(method=method, parameters=0, of_parameters=0, hosts=hosts, rank=rank), scales, tensors


def pair(model: nn.Module, host: str) -> LowRank:
    path, _, weight = host.partition("/")
    found = pair_of(model.get_submodule(path), weight)
    if found is None:
        raise UsageError(f"the pair of '{path}' is not in use; unmerge first")
    return found


def _check_supported(model: nn.Module, host: str) -> None:
    path = host.partition("/")[0]
    module = model.get_submodule(path)
    kind = PLAIN.get(type(module), type(module))
    owner = model.get_submodule(path.rpartition(".")[0])
    if not path:
        raise UsageError(
            "PEFT adapts layers inside a model, and this model is one layer; put it in nn.Sequential, or use save"
        )
    if kind not in _SUPPORTED or isinstance(owner, nn.MultiheadAttention):
        raise UsageError(f"PEFT holds pairs of Linear, Conv1d and Conv2d, and '{path}' is {kind.__name__}; use save")
    if isinstance(module, (nn.Conv1d, nn.Conv2d)) and (
        set(module.dilation) != {1} or module.padding_mode != "zeros" or module.groups != 1
    ):
        raise UsageError(
            f"PEFT leaves out dilation, groups and padding mode of '{path}' when it computes its pair; use save"
        )


def _config(model: nn.Module, pairs: Mapping[str, LowRank], method: Lora) -> dict[str, Any]:
    rank = Counter(p.a.shape[0] for p in pairs.values()).most_common(1)[0][0]
    alpha = Counter(p.scale * p.a.shape[0] for p in pairs.values()).most_common(1)[0][0]
    alphas = {path: p.scale * p.a.shape[0] for path, p in pairs.items() if p.scale * p.a.shape[0] != alpha}
    return {
        "peft_type": "LORA",
        "task_type": None,
        "auto_mapping": None,
        "base_model_name_or_path": None,
        "revision": None,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": method.dropout,
        "target_modules": _targets(model, list(pairs)),
        "rank_pattern": {},
        "alpha_pattern": {f"^{re.escape(path)}": value for path, value in alphas.items()},
        "use_dora": method.is_dora,
        "use_rslora": False,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "modules_to_save": None,
    }


def _targets(model: nn.Module, paths: list[str]) -> list[str] | str:
    """A list where PEFT would find exactly these by it, else a regular expression of whole paths."""
    ends = tuple(f".{path}" for path in paths)
    if any(path.endswith(ends) for path, _ in plain_modules(model)):
        return "|".join(re.escape(path) for path in paths)
    return paths


def _read_config(folder: Path) -> PairSettings:
    path = folder / _CONFIG
    try:
        config: Any = decode_json(read_regular_file(path), object)
    except OSError as e:
        raise CheckpointError(f"cannot read '{path}': {e.strerror or e}; give a folder that PEFT saved") from e
    except RecordError as e:
        raise CheckpointError(f"'{path}' is no JSON: {e}") from e
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise UsageError(
            f"'{path}' is of the type {config.get('peft_type') if isinstance(config, dict) else None}; LORA is read"
        )
    used = [name for name in _UNREAD if config.get(name)]
    if config.get("bias", "none") != "none":
        used.append("bias")
    if used:
        raise UsageError(f"'{path}' sets {', '.join(used)}, which is not carried out here")
    try:
        settings = msgspec.convert(config, PairSettings)
    except msgspec.ValidationError as e:
        raise CheckpointError(f"'{path}' is no configuration of PEFT: {e}") from e
    for pattern in settings.alpha_pattern or {}:
        if not _is_quick(pattern):
            raise UsageError(f"'{path}' has the alpha_pattern '{pattern[:60]}'; name the layers plainly")
    return settings


def _is_quick(pattern: str) -> bool:
    """Whether it is a regular expression that is looked for in little time."""
    try:
        re.compile(f"({pattern})$")
    except (re.error, OverflowError, RecursionError):
        return False
    return len(pattern) <= _LONGEST_PATTERN and not _ENDLESS.search(pattern)


def _scale(settings: PairSettings, path: str, ranks: Mapping[str, int]) -> float:
    patterns = settings.alpha_pattern or {}
    found = next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", path)), None)
    alpha = settings.lora_alpha if found is None else found
    rank = ranks[path]
    return float(alpha / torch.tensor(rank).sqrt().item() if settings.use_rslora else alpha / rank)
