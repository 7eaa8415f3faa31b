"""Images and convolution weights with the channels innermost, as the fast kernels want them.

What        `model.to(memory_format=torch.channels_last)` at its first call; four-dimensional inputs are converted at each.
Guarantee   BOUNDED: the same convolutions, summed in another order.
Refuses     Models without two-dimensional convolutions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from flatout.records.evidence import Evidence
from flatout.records.finding import Finding
from flatout.records.lever import Candidate, Lever, Parameters, Refusal, Seams

if TYPE_CHECKING:
    from torch import nn


def propose(evidence: Evidence, findings: Sequence[Finding]) -> Iterator[Candidate | Refusal]:
    """For models that convolve images."""
    convolutions = [
        o for o in evidence.operators if o.op == "aten.convolution" and o.inputs and len(o.inputs[0].shape) == 4
    ]
    if not convolutions:
        yield Refusal(lever=LEVER.id, because="no two-dimensional convolution was seen")
        return
    told = [f.saved_s for f in findings]
    busy_s = sum(o.total_s for o in evidence.operators if "convolution" in o.op)
    yield Candidate(
        lever=LEVER.id,
        saved_s=max(told, default=(0.0, 0.4 * busy_s)),
        where=findings[0].where if findings else evidence.source_of(convolutions[0].source),
        because=findings[0].because if findings else f"convolutions take {busy_s * 1e3:.2f} ms of a step",
    )


def apply(seams: Seams, parameters: Parameters) -> None:
    """Convert models that hold a two-dimensional convolution, and their images."""
    import torch
    from torch import Tensor, nn

    converted: set[int] = set()

    def convert(module: nn.Module) -> Callable[[], None] | None:
        if not any(isinstance(m, (nn.Conv2d, nn.ConvTranspose2d)) for m in module.modules()):
            return None
        module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        converted.add(id(module))
        seams.note(LEVER.id)

        def undo() -> None:
            module.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]

        return undo

    def inputs(module: nn.Module, given: Any) -> Any:
        args, kwargs = given
        if id(module) not in converted:
            return given
        return tuple(map(image, args)), {k: image(v) for k, v in kwargs.items()}

    def image(value: Any) -> Any:
        is_image = isinstance(value, Tensor) and value.dim() == 4 and value.is_floating_point()
        return value.contiguous(memory_format=torch.channels_last) if is_image else value

    seams.at_first_call(convert)
    seams.on_inputs(inputs)


LEVER = Lever(
    id="memory.channels-last",
    title="Channels last",
    guarantee="bounded",
    module=__name__,
    propose=propose,
    apply=apply,
)
