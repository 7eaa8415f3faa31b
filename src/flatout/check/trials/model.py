"""One call of a captured root module on a deep copy of it, against a variant of the call."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any, Final

import msgspec
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from flatout.check.observe.calls import Captured, module_paths, without_replication
from flatout.check.trials.channels_last import in_channels_last, refuse_where_images_break
from flatout.check.trials.context import Refused, Scene, TrialEntry, require_time
from flatout.check.trials.global_flags import SWITCHES, Context, anomaly, deterministic, without_autocast
from flatout.check.trials.module_call import call_of, copied_module, module_and_inputs, usual_call_s
from flatout.check.trials.timing import timed_trial
from flatout.core.records.trial import TimeModel, TrialResult
from flatout.core.runtime.patches import replace_forward
from flatout.core.tensors.nests import map_tensors, tensors_in


def run(trial: TimeModel, scene: Scene) -> TrialResult:
    """Seconds of the call as it was and of its variant; a copy of the module runs, never the user's own."""
    root = scene.roots[trial.model]
    if trial.variant == "eager":
        return _without_compile(trial, scene)
    module, captured = module_and_inputs(root)
    module = without_replication(module)
    if module in scene.compiled:
        raise Refused("the module is under torch.compile, and trying it otherwise would compile it anew")
    if any(isinstance(m, nn.parallel.DistributedDataParallel) for m in module.modules()):
        raise Refused("a part of the module synchronises its gradients with other processes")
    require_time(scene, num_calls=_calls_at_least(trial), call_s=usual_call_s(root, backward=trial.backward))
    model = copied_module(module)
    now = _in_a_row(
        call_of(model, captured, captured.args, captured.kwargs, backward=trial.backward), trial.num_live_outputs
    )
    parts: dict[str, float] = {}
    if trial.lengths:
        contexts, cured, per = _NEITHER, *_at_lengths(trial, model, captured, parts, scene)
    else:
        contexts, cured, per = _variant(trial, model, captured, scene)
    runs = {"now": _in(contexts["now"], now), "cured": _in(contexts["cured"], cured)}
    if trial.variant == "threads" and (slow_s := _once_s(runs["cured"])) > _HOPELESS * _once_s(runs["now"]):
        raise Refused(f"a call with {trial.factor} threads took {slow_s:.1f} s: the cores are busy with something else")
    result = timed_trial(trial, runs["now"], runs["cured"], scene, parts=parts, min_s=_MIN_S, max_s=_MAX_S)
    return msgspec.structs.replace(result, cured_s=(result.cured_s or 0.0) / per)


def _without_compile(trial: TimeModel, scene: Scene) -> TrialResult:
    """A copy of the module by the code that the script has compiled already (`now`), and without it (`cured`)."""
    module, captured = module_and_inputs(scene.roots[trial.model])
    if module not in scene.compiled:
        raise Refused("the module is not under torch.compile")
    model = copied_module(getattr(module, "_orig_mod", module))
    compiled: nn.Module = torch.compile(model, **scene.compiled[module])  # type: ignore[assignment]
    # One compilation too many would take seconds, and counts towards the limit of the user's own code.
    with torch.compiler.set_stance("fail_on_recompile"):
        now = call_of(compiled, captured, captured.args, captured.kwargs, backward=trial.backward)
        eager = call_of(model, captured, captured.args, captured.kwargs, backward=trial.backward)
        return timed_trial(trial, now, eager, scene, min_s=_MIN_S, max_s=_MAX_S)


_CALLS: Final = 3
"""Of each variant at least: one to try it, one to warm up, one that is timed."""


def _calls_at_least(trial: TimeModel) -> float:
    num_cured = trial.factor if trial.variant == "batched" else max(1, len(trial.lengths))
    return _CALLS * trial.num_live_outputs * (1.0 + num_cured)


def autocast_to(dtype: torch.dtype, scene: Scene) -> dict[str, torch.dtype]:
    """Autocast of the scene's device to this dtype. Raises Refused where the device has no bfloat16."""
    if (
        scene.device == "cuda"
        and dtype is torch.bfloat16
        and not torch.cuda.is_bf16_supported(including_emulation=False)
    ):
        raise Refused("this device has no units for bfloat16")
    return {scene.device: dtype}


_NEITHER: Final[dict[str, Context]] = {"now": contextlib.nullcontext, "cured": contextlib.nullcontext}
_HALVES: Final = {"bf16-autocast": torch.bfloat16, "fp16-autocast": torch.float16}
_MIN_S: Final = 0.8
_MAX_S: Final = 5.0
_HOPELESS: Final = 4.0
"""Threads that wait for busy cores can be a thousand times slower; there is no need to repeat that."""


def _once_s(call: Callable[[], object]) -> float:
    began = perf_counter()
    call()
    return perf_counter() - began


def _variant(
    trial: TimeModel, model: nn.Module, captured: Captured, scene: Scene
) -> tuple[dict[str, Context], Callable[[], object], float]:
    """The contexts of both calls, the cured call, and how many calls of now it stands for."""
    plain: Context = contextlib.nullcontext
    contexts: dict[str, Context] = {"now": plain, "cured": plain}
    args, kwargs = captured.args, captured.kwargs
    per = 1.0
    backward = trial.backward
    if trial.variant == "without-graph":
        if backward and any(t.requires_grad for t in tensors_in((args, kwargs))):
            raise Refused("a gradient goes through the module to its inputs")
        contexts["cured"] = torch.no_grad
        backward = False
    elif trial.variant == "without-anomaly":
        contexts = {"now": lambda: anomaly(True), "cured": lambda: anomaly(False)}
    elif trial.variant == "deterministic-off":
        contexts = {"now": lambda: deterministic(True), "cured": lambda: deterministic(False)}
    elif trial.variant == "cropped":
        args, kwargs = _cropped(captured, trial, trial.cropped_length)
    elif trial.variant == "batched":
        size = next((t.shape[0] for t in tensors_in((args, kwargs)) if t.dim() > 0), 0)
        before = [t.shape for t in tensors_in((args, kwargs))]
        args, kwargs = (map_tensors(v, lambda t: _repeat(t, size, trial.factor)) for v in (args, kwargs))
        if [t.shape for t in tensors_in((args, kwargs))] == before:
            raise Refused("the batch lies in objects of a class of its own, which cannot be repeated")
        per = float(trial.factor)
    elif trial.variant == "unpacked":
        model = copied_module(model)
        _unpack(model)
    elif trial.variant == "frozen":
        model = copied_module(model)
        _freeze(model, scene.roots[trial.model].name, set(trial.modules or scene.unused_modules))
    elif trial.variant == "float32":
        model = copied_module(model).float()
        args, kwargs = (map_tensors(v, lambda t: t.float() if t.is_floating_point() else t) for v in (args, kwargs))
        contexts["cured"] = without_autocast
    elif trial.variant == "bf16-weights":
        model = copied_module(model).bfloat16()
        args, kwargs = (map_tensors(v, lambda t: t.bfloat16() if t.is_floating_point() else t) for v in (args, kwargs))
    elif trial.variant == "channels-last":
        model = copied_module(model)
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        args, kwargs = (map_tensors(v, in_channels_last) for v in (args, kwargs))
        refuse_where_images_break(scene.roots[trial.model], model, captured, args, kwargs, scene)
    elif trial.variant in SWITCHES:
        contexts["cured"] = SWITCHES[trial.variant](trial.factor)
    half = autocast_to(_HALVES[trial.variant], scene) if trial.variant in _HALVES else None
    with contexts["cured"]():
        call = call_of(model, captured, args, kwargs, backward=backward, autocast=half)
        cured = _in_a_row(call, trial.num_live_outputs)
    return contexts, cured, per


def _in_a_row(call: Callable[[], object], num: int) -> Callable[[], object]:
    return call if num == 1 else lambda: [call() for _ in range(num)]


def _in(context: Context, call: Callable[[], object]) -> Callable[[], object]:
    def inside() -> object:
        with context():
            return call()

    return inside


def _at_lengths(
    trial: TimeModel, model: nn.Module, captured: Captured, parts: dict[str, float], scene: Scene
) -> tuple[Callable[[], object], float]:
    """One call at each length, as batches of changing length follow one another, and how many calls that is.

    The first call of a length builds the kernels for its shapes, which goes to `parts`; a device would still be at work then.
    """
    calls, first_s = [], []
    for length in trial.lengths:
        args, kwargs = _cropped(captured, trial, length)
        began = perf_counter()
        calls.append(call_of(model, captured, args, kwargs, backward=trial.backward))
        first_s.append(perf_counter() - began)
    if scene.device == "cpu":
        parts["new_length"] = median(first_s)
    return lambda: [call() for call in calls], float(len(calls))


def _cropped(captured: Captured, trial: TimeModel, length: int) -> tuple[Any, Any]:
    """The captured arguments with every tensor of `trial.length` positions cropped to this length."""

    def crop(tensor: Tensor) -> Tensor:
        if tensor.dim() >= 2 and tensor.shape[1] == trial.length:
            return tensor[:, :length].contiguous()
        if tensor.dim() == 1 and not tensor.is_floating_point():
            return tensor.clamp(max=length)
        return tensor

    return map_tensors(captured.args, crop), map_tensors(captured.kwargs, crop)


def _repeat(tensor: Tensor, size: int, factor: int) -> Tensor:
    if tensor.dim() == 0 or tensor.shape[0] != size:
        return tensor
    return torch.cat([tensor] * factor)


def _unpack(module: nn.Module) -> None:
    """Let every recurrent layer inside run on the padded batch when it gets a packed one."""
    layers = [m for m in module.modules() if isinstance(m, nn.RNNBase)]
    if not layers or any(m.bidirectional or m.proj_size for m in layers):
        raise Refused("no recurrent layer that runs in one direction; backwards, padding would come first")
    for layer in layers:
        replace_forward(layer, _on_padded(layer))  # of a copy, which goes with the trial


def _on_padded(layer: nn.RNNBase) -> Callable[..., Any]:
    original = layer.forward

    def forward(x: Any, state: Any = None) -> Any:
        if not isinstance(x, PackedSequence):
            return original(x, state)
        padded, lengths = pad_packed_sequence(x, batch_first=layer.batch_first)
        out, last = original(padded, state)
        rows = torch.arange(len(lengths), device=out.device)
        ends = lengths.to(out.device) - 1
        final = out[rows, ends] if layer.batch_first else out[ends, rows]
        if isinstance(last, tuple):  # the cell state is there for its shape alone: the trial only times
            last = (torch.cat([last[0][:-1], final[None]]), last[1])
        else:
            last = torch.cat([last[:-1], final[None]])
        return pack_padded_sequence(out, lengths, batch_first=layer.batch_first, enforce_sorted=False), last

    return forward


def _freeze(module: nn.Module, top: str, paths: set[str]) -> None:
    for path, inner in module_paths(module, top):
        if path in paths:
            for parameter in inner.parameters(recurse=False):
                parameter.requires_grad_(False)


TRIAL: Final = TrialEntry(TimeModel, run)
