"""A debug mode is on in every step.

Costs        Anomaly detection records a Python traceback for every forward operator and checks every gradient for NaN;
             deterministic algorithms can be slower kernels; blocking launches and debug logs stop the host.
Evidence     The switches in force, and the line that threw them. Trial: forward and backward with the mode off.
Levers       graph.debug-off
False alarm  Hunting a NaN right now; determinism that is wanted: the trial says what it costs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Literal

from flatout.core.parts import rule
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Finding, Note
from flatout.core.records.trial import TimeModel
from flatout.core.records.workload import Setting
from flatout.machine.cost.accounting import around, model_seconds, remaining_fraction, result_of

_Variant = Literal["without-anomaly", "deterministic-off"]
_MODES: Final[dict[str, tuple[_Variant, str, str]]] = {
    "detect_anomaly": ("without-anomaly", "anomaly detection", "remove torch.autograd.set_detect_anomaly(True)"),
    "deterministic_algorithms": (
        "deterministic-off",
        "deterministic algorithms",
        "remove torch.use_deterministic_algorithms(True) unless you need bitwise repeatable runs",
    ),
}
_ENVIRONMENT: Final = {
    "CUDA_LAUNCH_BLOCKING": "makes every launch wait for its kernel",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "turns the caching allocator off: every tensor is a cudaMalloc",
    "TORCH_SHOW_CPP_STACKTRACES": "collects C++ stacks for errors",
}


def propose(evidence: Evidence) -> Iterator[TimeModel]:
    """Time the model without each mode that is on."""
    yield from filter(None, (_trial_of(evidence, setting) for setting in _on(evidence)))


def check(evidence: Evidence) -> Iterator[Finding]:
    """Yield one finding per mode."""
    for setting in _on(evidence):
        result = result_of(evidence, _trial_of(evidence, setting))
        if result is None:
            continue
        busy_s = model_seconds(evidence)
        # Absolute, not relative: anomaly detection costs more the deeper the stack is, and a trial's stack is deeper.
        cost_s = max(0.0, min(busy_s - (result.cured_s or 0.0), busy_s * (1 - remaining_fraction(result))))
        remaining = 1 - cost_s / busy_s if busy_s else 1.0
        _, name, edit = _MODES[setting.name]
        yield Finding(
            where=setting.source,
            cost_s=cost_s,
            saved_s=around(cost_s, 0.15),
            because=f"{name} is on; without it forward and backward take {remaining:.0%} (tried)",
            edit=edit,
            basis="trial",
        )


def note(evidence: Evidence) -> Iterator[Note]:
    """Yield a note for each environment variable that slows torch down; its cost cannot be tried from inside."""
    for setting in evidence.workload.settings:
        if setting.name in _ENVIRONMENT and setting.value not in ("", "0"):
            yield Note(where=None, text=f"{setting.name}={setting.value} {_ENVIRONMENT[setting.name]}")


def _on(evidence: Evidence) -> list[Setting]:
    return [s for s in evidence.workload.settings if s.name in _MODES and s.value == "True"]


def _trial_of(evidence: Evidence, setting: Setting) -> TimeModel | None:
    used = [i for i, m in enumerate(evidence.models) if m.num_graphs_used]
    if not used:
        return None
    largest = max(used, key=lambda i: evidence.models[i].call_s * evidence.models[i].calls)
    return TimeModel(model=largest, variant=_MODES[setting.name][0], backward=True)


RULE = rule(__name__, check, propose=propose, note=note, title="A debug mode is left on")
