"""The logits of all tokens over a large vocabulary are in memory at once.

Costs        Several arrays of tokens x vocabulary at the peak: the logits, their log-softmax, and their gradients.
Evidence     A log-softmax over a large last dimension, and what has its number of elements among what is alive at the peak.
Levers       memory.chunked-loss
False alarm  A model whose other activations are larger: the share of the peak says so.
"""

from __future__ import annotations

from collections.abc import Iterator

from flatout.core.parts import rule
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Finding
from flatout.machine.cost.memory import main_memory, num_elements_of

_LARGE_VOCABULARY = 4096
_CHUNKS = 8


def check(evidence: Evidence) -> Iterator[Finding]:
    """Yield one finding for the largest such loss."""
    memory = main_memory(evidence)
    losses = [o for o in evidence.operators if o.op == "aten._log_softmax" and o.phase == "forward" and o.outputs]
    losses = [o for o in losses if len(o.outputs[0].shape) >= 2 and o.outputs[0].shape[-1] >= _LARGE_VOCABULARY]
    if memory is None or not losses:
        return
    loss = max(losses, key=lambda o: o.outputs[0].num_elements)
    num = loss.outputs[0].num_elements
    alike = [
        p for p in memory.at_peak if p.kind in ("activations", "temporaries") and num_elements_of(p.example) == num
    ]
    logits_bytes = sum(p.bytes for p in alike)
    vocabulary = loss.outputs[0].shape[-1]
    yield Finding(
        where=evidence.source_of(loss.source),
        because=f"{logits_bytes / 2**20:.1f} MiB at the peak are arrays of {num // vocabulary} tokens x {vocabulary} classes; "
        f"in {_CHUNKS} chunks of tokens, an eighth of that is alive at once.",
        edit="compute the head and the loss in chunks of tokens: "
        "flatout.linear_cross_entropy(hidden, head.weight, targets, head.bias); or F.linear_cross_entropy(..., "
        "options=nn.LinearCrossEntropyOptions(batch_chunk_size=256)) from torch 2.12 on",
        module=loss.module,
        saved_bytes=logits_bytes - logits_bytes // _CHUNKS,
        device=memory.device,
    )


RULE = rule(__name__, check, title="All logits over a large vocabulary at once")
