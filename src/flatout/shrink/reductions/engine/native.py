"""A small model runs as native code, an event at a time.

What        `flatout.blocks.inference.native.build`: the module as one C file for this processor, in float32 or with 8 bits
            where that is measured to be faster.
Guarantee   QUALITY: in 8 bits the metric decides, and the outputs' error stays within 1 % of their largest number. BOUNDED in
            float32: errors as eager has them.
Price       In float32 none: errors of 1e-7 to 5e-7 of the outputs' scale, eager's are 1e-7 to 3e-7. In 8 bits 0.8 % of that scale
            (LSTM of 128) and 0.7 % (MLP 128-256-256-8) for 2.5 and 2.1 times the speed (`bench/native.py`); 0.1 to 0.4 % on
            eleven models of random weights, 2.9 to 29 times as fast as eager (`bench/shrinking.py`). Trained models in 8 bits
            lost nothing that one seed could tell: digits with an MLP of 512 (-1.0 to 0.6 points) and a CNN of 32 (-0.7 to 0.7),
            text with a transformer of 64 (`bench/quantising_quality.py`). One thread of a Xeon with AVX-512 VNNI; with AVX2 alone
            (EPYC) the eleven were 1.2 to 3.4 times as fast as in float32. Not worth it: convolutions over images on the Xeon (6 %
            or nothing); a GRU over a whole sequence took twice the bytes.
Refuses     GPUs; models of more than 64 MB; layers that took fewer bits already; operators without native code, by name and line;
            sizes are those of the example.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from flatout.core.errors import UsageError
from flatout.core.parts import reduction
from flatout.core.records.lever import Parameters, string
from flatout.core.records.reduction import Option, ReductionRefusal

if TYPE_CHECKING:
    from flatout.shrink.candidate import CandidateModel

_MOST_BYTES: Final = 64 << 20
"""Above it a call is long, and torch's threads and blocked products are worth what they cost."""
_FEW_BITS: Final = "flatout.shrink.quantise."
"""Whose layers call code of their own, which cannot be exported."""


def options(candidate: CandidateModel) -> Iterator[Option | ReductionRefusal]:
    """One option for float32, one for 8 bits."""
    because = _refused(candidate)
    if because:
        yield ReductionRefusal(reduction=REDUCTION.id, because=because)
        return
    yield Option(
        reduction=REDUCTION.id,
        name="native",
        parameters={"precision": "float32"},
        because="no operator waits for Python",
    )
    note = "a quarter of the bytes are read"
    yield Option(reduction=REDUCTION.id, name="native int8", parameters={"precision": "int8"}, because=note, step=1)


def _refused(candidate: CandidateModel) -> str:
    tensors = [*candidate.model.parameters(), *candidate.model.buffers()]
    if any(t.device.type != "cpu" for t in tensors):
        return "native code runs on the processor, the model is elsewhere"
    if candidate.call is not candidate.model:
        return "something else runs the model already"
    if any(type(module).__module__.startswith(_FEW_BITS) for module in candidate.model.modules()):
        return "layers in fewer bits call code of their own; native code has 8 bits of its own"
    size = sum(t.numel() * t.element_size() for t in tensors)
    return f"{size / 2**20:.0f} MB of weights are more than {_MOST_BYTES >> 20}" if size > _MOST_BYTES else ""


def apply(candidate: CandidateModel, parameters: Parameters) -> CandidateModel:
    """Raises NativeError where the model has no native code, UsageError where nothing was worth 8 bits.

    With a state the engine carries it, and `call` gets none.
    """
    import inspect

    from flatout.blocks.inference.native import Engine, build
    from flatout.blocks.inference.native.model_call import Called, Carrying, timed

    precision, num_state = string(parameters, "precision"), candidate.task.num_state
    names = [*inspect.signature(candidate.model.forward).parameters][
        len(candidate.inputs) - num_state : len(candidate.inputs)
    ]
    state = names if num_state else ()
    engine = build(candidate.model, candidate.inputs, state=state, precision=precision, events=0)
    if precision == "int8" and "int8" not in engine.manifest.precision.values():
        raise UsageError("no layer was faster in 8 bits within the error that is allowed")
    assert isinstance(engine, Engine)
    inputs = candidate.inputs[: len(candidate.inputs) - num_state]
    call = Carrying(engine, inputs) if num_state else Called(engine, inputs)
    note = f"native code for {engine.isa}; timed as engine.step(x, out)"
    compiled = candidate.with_call(call, note, num_bytes=engine.manifest.weights_bytes)
    return replace(
        compiled, start_stateful=call.begun if isinstance(call, Carrying) else None, timed=timed(engine, inputs)
    )


REDUCTION = reduction(__name__, options, apply, title="A small model as native code")
