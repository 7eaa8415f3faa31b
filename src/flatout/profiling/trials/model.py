"""One call of a captured root module on a deep copy of it, against a variant of the call."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from flatout.measure.timer import compare
from flatout.profiling.calls import Captured, iter_tensors, map_tensors, module_paths, without_replication
from flatout.profiling.trials.scene import Refused, Scene
from flatout.profiling.trials.switches import SWITCHES, without_autocast
from flatout.records.trial import TimeModel, TrialResult


def run(trial: TimeModel, scene: Scene) -> TrialResult:
    """Seconds of the call as it was and of its variant; a copy of the module runs, never the user's own."""
    root = scene.roots[trial.model]
    # `or` would ask the module for its length, which a compiled one refuses.
    module, captured = root.held if root.held is not None else root.module(), root.captured
    if module is None or captured is None:
        raise Refused("the module or its inputs could not be kept")
    module = without_replication(module)
    if module in scene.compiled:
        raise Refused("the module is under torch.compile, and trying it otherwise would compile it anew")
    if any(isinstance(m, nn.parallel.DistributedDataParallel) for m in module.modules()):
        raise Refused("a part of the module synchronises its gradients with other processes")
    try:
        twin = copy.deepcopy(module)
    except (RuntimeError, TypeError, NotImplementedError) as e:
        raise Refused(f"the module cannot be copied ({e})") from e
    now = _held(call_of(twin, captured, captured.args, captured.kwargs, backward=trial.backward), trial.held)
    contexts, cured, per = _variant(trial, twin, captured, scene)
    runs = {"now": _in(contexts["now"], now), "cured": _in(contexts["cured"], cured)}
    if trial.variant == "threads" and (slow_s := _once_s(runs["cured"])) > _HOPELESS * _once_s(runs["now"]):
        raise Refused(f"a call with {trial.factor} threads took {slow_s:.1f} s: the cores are busy with something else")
    timings = compare(
        runs,
        device=scene.device,
        min_time_s=min(0.8, scene.limit_s / 3),
        max_time_s=min(5.0, scene.limit_s),
    )
    return TrialResult(
        trial=trial,
        now_s=timings["now"].call_s.value,
        cured_s=timings["cured"].call_s.value / per,
        spread_fraction=timings["now"].spread or 0.0,
    )


_HOPELESS: Final = 4.0
"""Threads that wait for busy cores can be a thousand times slower; there is no need to repeat that."""


def _once_s(call: Callable[[], object]) -> float:
    began = perf_counter()
    call()
    return perf_counter() - began


Context = Callable[[], contextlib.AbstractContextManager[object]]


def _variant(
    trial: TimeModel, twin: nn.Module, captured: Captured, scene: Scene
) -> tuple[dict[str, Context], Callable[[], object], float]:
    """(contexts of both calls, the cured call, how many calls of now it stands for)."""
    plain: Context = contextlib.nullcontext
    contexts: dict[str, Context] = {"now": plain, "cured": plain}
    args, kwargs = captured.args, captured.kwargs
    per = 1.0
    backward = trial.backward
    if trial.variant == "without-graph":
        contexts["cured"] = torch.no_grad
        backward = False
    elif trial.variant == "without-anomaly":
        contexts = {"now": lambda: _anomaly(True), "cured": lambda: _anomaly(False)}
    elif trial.variant == "deterministic-off":
        contexts = {"now": lambda: _deterministic(True), "cured": lambda: _deterministic(False)}
    elif trial.variant == "cropped":
        args, kwargs = (map_tensors(v, lambda t: _crop(t, trial)) for v in (args, kwargs))
    elif trial.variant == "batched":
        size = next((t.shape[0] for t in iter_tensors((args, kwargs)) if t.dim() > 0), 0)
        args, kwargs = (map_tensors(v, lambda t: _repeat(t, size, trial.factor)) for v in (args, kwargs))
        per = float(trial.factor)
    elif trial.variant == "unpacked":
        twin = copy.deepcopy(twin)
        _unpack(twin)
    elif trial.variant == "frozen":
        twin = copy.deepcopy(twin)
        _freeze(twin, scene.roots[trial.model].name, set(trial.modules or scene.unused_modules))
    elif trial.variant == "float32":
        twin = copy.deepcopy(twin).float()
        args, kwargs = (map_tensors(v, lambda t: t.float() if t.is_floating_point() else t) for v in (args, kwargs))
        contexts["cured"] = without_autocast
    elif trial.variant == "channels-last":
        twin = _channels_last_module(copy.deepcopy(twin))
        args, kwargs = (map_tensors(v, _channels_last) for v in (args, kwargs))
    elif trial.variant in SWITCHES:
        contexts["cured"] = SWITCHES[trial.variant](trial.factor)
    with contexts["cured"]():
        cured = _held(call_of(twin, captured, args, kwargs, backward=backward), trial.held)
    return contexts, cured, per


def call_of(module: nn.Module, captured: Captured, args: Any, kwargs: Any, *, backward: bool) -> Callable[[], object]:
    """A function that calls the module as captured, with a backward if asked for; it has run once.

    Raises Refused when the module does not take these inputs.
    """
    parameters = [p for p in module.parameters() if p.requires_grad]

    def forward() -> Any:
        with contextlib.ExitStack() as stack:
            for device, dtype in captured.autocast.items():
                stack.enter_context(torch.autocast(device, dtype=dtype))
            if not backward and not captured.grad_enabled:
                stack.enter_context(torch.no_grad())
            return module(*args, **kwargs)

    def both() -> object:
        for parameter in parameters:
            parameter.grad = None
        loss = _scalar(forward())
        loss.backward()
        return loss

    call = both if backward else forward
    try:
        call()
    except Exception as e:  # the user's own module may raise anything on a variant of its inputs
        raise Refused(f"the module does not take these inputs ({type(e).__name__}: {str(e)[:80]})") from e
    return call


def _held(call: Callable[[], object], num: int) -> Callable[[], object]:
    return call if num == 1 else lambda: [call() for _ in range(num)]


def _scalar(output: Any) -> Tensor:
    total: Tensor | None = None
    for tensor in iter_tensors(output):
        if tensor.requires_grad and tensor.is_floating_point():
            total = tensor.float().sum() if total is None else total + tensor.float().sum()
    if total is None:
        raise Refused("the module's output has no gradient")
    return total


def _in(context: Context, call: Callable[[], object]) -> Callable[[], object]:
    def inside() -> object:
        with context():
            return call()

    return inside


def _crop(tensor: Tensor, trial: TimeModel) -> Tensor:
    if tensor.dim() >= 2 and tensor.shape[1] == trial.length:
        return tensor[:, : trial.cropped_length].contiguous()
    if tensor.dim() == 1 and not tensor.is_floating_point():
        return tensor.clamp(max=trial.cropped_length)
    return tensor


def _repeat(tensor: Tensor, size: int, factor: int) -> Tensor:
    if tensor.dim() == 0 or tensor.shape[0] != size:
        return tensor
    return torch.cat([tensor] * factor)


def _unpack(module: nn.Module) -> None:
    """Let every recurrent layer inside run on the padded batch when it is given a packed one."""
    layers = [m for m in module.modules() if isinstance(m, nn.RNNBase)]
    if not layers or any(m.bidirectional or m.proj_size for m in layers):
        raise Refused("no recurrent layer that runs in one direction; backwards, padding would come first")
    for layer in layers:
        layer.forward = _on_padded(layer)


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


def _channels_last_module(module: nn.Module) -> nn.Module:
    module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return module


def _channels_last(tensor: Tensor) -> Tensor:
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor


def _freeze(module: nn.Module, top: str, paths: set[str]) -> None:
    for path, inner in module_paths(module, top):
        if path in paths:
            for parameter in inner.parameters(recurse=False):
                parameter.requires_grad_(False)


@contextlib.contextmanager
def _anomaly(on: bool) -> Iterator[None]:
    before, check = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()
    torch.set_anomaly_enabled(on, check)
    try:
        yield
    finally:
        torch.set_anomaly_enabled(before, check)


@contextlib.contextmanager
def _deterministic(on: bool) -> Iterator[None]:
    before, warn = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch._C._set_deterministic_algorithms(on, warn_only=warn)
    try:
        yield
    finally:
        torch._C._set_deterministic_algorithms(before, warn_only=warn)
