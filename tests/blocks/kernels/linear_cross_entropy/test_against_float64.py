from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.blocks.kernels.against_float64 import (
    Call,
    Case,
    assert_no_worse_than_reference,
    drawn,
    name_of,
    on_cpu,
    on_device,
    on_devices,
    skip_what_cannot_run,
)

from flatout.core.records.kernel import Kernel
from flatout.core.registry import kernels

_OP = "linear_cross_entropy"


def _case(
    name: str,
    *,
    tokens: int = 13,
    width: int = 24,
    vocabulary: int = 97,
    ignored: tuple[int, ...] = (),
    has_bias: bool = False,
    by: float = 1.0,
    frozen: tuple[str, ...] = (),
    **options: Any,
) -> Case:
    def make(generator: torch.Generator) -> Call:
        hidden = drawn(generator, tokens, width, by=by)
        weight = drawn(generator, vocabulary, width, by=0.5)
        bias = drawn(generator, vocabulary) if has_bias else None
        targets = torch.randint(vocabulary, (tokens,), generator=generator)
        targets[list(ignored)] = options.get("ignore_index", -100)
        for name, tensor in (("hidden", hidden), ("weight", weight)):
            tensor.requires_grad_(name not in frozen)
        return Call((hidden, weight, targets, bias), options)

    return Case(name, make)


CASES = [
    _case("plain"),
    _case("bias", has_bias=True, chunk=5),
    _case("one row, one class more than a power of two", tokens=1, vocabulary=1025),
    _case("one class", vocabulary=1),
    _case("chunks that do not come out even", chunk=5),
    _case("many chunks", tokens=29, chunk=4),
    _case("some ignored, a whole chunk of them", ignored=(0, 1, 2, 3, 6, 11), chunk=4),
    _case("all ignored", ignored=tuple(range(13))),
    _case("another class ignored", ignored=(3, 4), ignore_index=7),
    _case("no tokens", tokens=0),
    _case("label smoothing", label_smoothing=0.1, ignored=(5,), chunk=4),
    _case("z-loss", z_loss=1e-2, ignored=(5,)),
    _case("softcap", softcap=5.0, chunk=6),
    _case("all at once", label_smoothing=0.2, z_loss=1e-2, softcap=8.0, has_bias=True, ignored=(0, 12), chunk=5),
    _case("sum", reduction="sum", ignored=(1,), chunk=5),
    _case("none", reduction="none", ignored=(1, 2), chunk=5, label_smoothing=0.1, has_bias=True),
    _case("huge logits", by=60.0),
    _case("only hidden learns", frozen=("weight",), chunk=5),
    _case("only weight learns", frozen=("hidden",), chunk=5),
    _case("only bias learns", frozen=("hidden", "weight"), has_bias=True, chunk=5),
    _case("nothing learns", frozen=("hidden", "weight")),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kernel", "case", "dtype"), on_cpu(_OP, CASES), ids=name_of)
def test_loss_and_gradients_are_no_worse_than_the_reference(kernel: Kernel, case: Case, dtype: torch.dtype) -> None:
    assert_no_worse_than_reference(kernel, kernels(_OP)[-1], case, dtype, "cpu")


@on_device
@pytest.mark.device
@pytest.mark.parametrize(
    ("kernel", "case", "dtype"),
    on_devices(_OP, [*CASES, _case("larger", tokens=700, width=256, vocabulary=50257, chunk=256)]),
    ids=name_of,
)
def test_on_a_device_too(kernel: Kernel, case: Case, dtype: torch.dtype) -> None:
    skip_what_cannot_run(kernel, case.call(dtype, "cuda"), dtype, "cuda")
    assert_no_worse_than_reference(kernel, kernels(_OP)[-1], case, dtype, "cuda")
