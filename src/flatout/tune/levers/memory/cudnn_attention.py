"""Attention by cuDNN's kernels where FlashAttention-2's run.

What        `torch.nn.attention.sdpa_kernel` for the whole process, cuDNN before FlashAttention in its order; calls that cuDNN
            does not take go to the next one, as before. Code that is compiled takes the order at its compilation.
Guarantee   BOUNDED: the same sums in another order.
Refuses     Devices older than Hopper, on which cuDNN's kernels are no faster; steps with little time in FlashAttention's kernels.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from flatout.core.errors import EditError, LeverRefused
from flatout.core.parts import lever
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Finding
from flatout.core.records.lever import Candidate, Hooks, Parameters
from flatout.machine.cost.accounting import milliseconds
from flatout.tune.rewrite.imports import with_import, with_start
from flatout.tune.rewrite.source import fresh_name, parsed

_KERNELS: Final = re.compile(r"flash_(fwd|bwd|::flash_)|flash::|pytorch_flash")
_DEVICES: Final = re.compile(r"\b(H100|H200|H800|GH200|B100|B200|GB200|B300|GB300)\b")
_SMALL_PART: Final = 0.03
_SAVED: Final = (0.1, 0.55)
"""Of FlashAttention-2's time: cuDNN's kernels took 0.51 of it forward and 0.55 backward with heads of 128 numbers, and save less
with heads of 64 (H200, bfloat16, causal, 16 k tokens)."""
_EFFORT: Final = 2.0
_ORDER: Final = ("CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH")


def propose(evidence: Evidence, findings: Sequence[Finding]) -> Iterator[Candidate]:
    """Propose it for devices of Hopper's generation and later that spend time in FlashAttention's kernels."""
    if not _DEVICES.search(evidence.workload.device):
        raise LeverRefused("cuDNN's kernels for attention are faster from Hopper on")
    step = evidence.device_step
    if step is None:
        raise LeverRefused("the kernels of a step were not recorded")
    seconds = sum(k.seconds for k in step.kernels if _KERNELS.search(k.name))
    if seconds < _SMALL_PART * evidence.steps.step_s:
        raise LeverRefused(f"kernels of FlashAttention take {milliseconds(seconds)} of a step")
    yield Candidate(
        parameters={},
        saved_s=(_SAVED[0] * seconds, _SAVED[1] * seconds),
        because=f"kernels of FlashAttention-2 take {milliseconds(seconds)} of a step, and cuDNN has faster ones for this device",
    )


def apply(hooks: Hooks, parameters: Parameters) -> None:
    """Set the order before the script's first line."""

    def start() -> Callable[[], None]:
        hooks.note(LEVER.id)
        return _cudnn_first()

    hooks.at_start(start)


def _cudnn_first() -> Callable[[], None]:
    """Set the order; returns how to set what was there before."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    order = sdpa_kernel([getattr(SDPBackend, name) for name in _ORDER], set_priority=True)
    order.__enter__()

    def undo() -> None:
        order.__exit__(None, None, None)

    return undo


def edit(text: str, parameters: Parameters) -> str:
    """Enter `sdpa_kernel` where the script starts.

    Raises EditError where the file chooses kernels for attention itself.
    """
    if "sdpa_kernel" in text or "enable_flash_sdp" in text or "SDPBackend" in text:
        raise EditError("the file chooses kernels for attention itself")
    order = ", ".join(f"SDPBackend.{name}" for name in _ORDER)
    module = parsed(text)
    name = fresh_name(module, "attention_order")  # it ends when nothing refers to it
    lines = f"{name} = sdpa_kernel([{order}], set_priority=True)\n{name}.__enter__()\n"
    module = with_start(module, lines)
    for member in ("sdpa_kernel", "SDPBackend"):
        module = with_import(module, "torch.nn.attention", member)
    return module.code


LEVER = lever(__name__, propose, apply=apply, edit=edit, effort=_EFFORT, title="Attention by cuDNN")
