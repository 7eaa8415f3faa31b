"""Every operator that has native code, as it is found by discovery, against eager."""

from __future__ import annotations

import operator
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any, Final

import pytest
import torch
from tests.blocks.inference.native.compared import verdicts
from tests.blocks.inference.native.random_models import Drawn, Model
from tests.blocks.inference.native.random_operators import BY_HAND, Step
from torch import Tensor

from flatout.blocks.inference.native.operator_table import decompositions, operators

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not shutil.which("cc"), reason="needs a C compiler")]
_ATTEMPTS: Final = 10
_KINDS: Final[tuple[Callable[[Tensor], Tensor], ...]] = (lambda x: x, lambda x: x > 0, lambda x: (x * 3).long())
"""What an operator may take: numbers; where torch refuses those, truth values; then whole numbers."""


@pytest.mark.long
def test_every_operator_equals_eager(tmp_path: Path) -> None:
    """A new file in `operators` is tested here; arguments that its schema does not tell are drawn in BY_HAND."""
    targets = [t for t in operators() if t is not operator.getitem]
    models = [_model(number, target) for number, target in enumerate(targets)]
    missing = [str(t) for t, model in zip(targets, models, strict=True) if model is None]
    assert not missing, f"give a step for {missing} in tests/blocks/inference/native/random_operators.py: BY_HAND"

    found = verdicts([model for model in models if model is not None], tmp_path)

    assert [f"{v.model}\n{v.why}" for v in found if v.kind != "equal"] == []


@pytest.mark.long
def test_no_operator_has_both_native_code_and_a_decomposition() -> None:
    own = {t for t in operators() if t in decompositions() and t not in torch.export.default_decompositions()}
    assert own == set()


def _model(number: int, target: Any) -> Model | None:
    draw = Random(number)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(number)
        x = torch.randn(2, 3, 4).clamp(-2, 2)
        for attempt in range(_ATTEMPTS * len(_KINDS)):
            try:
                step = (
                    BY_HAND[target](draw, x)
                    if target in BY_HAND
                    else _step(draw, x, target, _KINDS[attempt // _ATTEMPTS])
                )
                result = step.eval()(x)
            except (RuntimeError, ValueError, IndexError, TypeError, NotImplementedError):  # torch does not take these
                continue
            if result.numel() and bool(torch.isfinite(result).all()):
                return Model(number, Drawn([(step, [0])], [1], [], has_count=False).eval(), [x], [], 1)
    return None


def _step(draw: Random, x: Tensor, target: Any, kind: Callable[[Tensor], Tensor]) -> Step:
    """One of the operator's overloads on arguments that are drawn by its schema."""
    overloads = [target] if isinstance(target, torch._ops.OpOverload) else list(_overloads(target))
    overload = draw.choice(overloads)
    drawn = [_argument(draw, argument, x) for argument in overload._schema.arguments if not argument.kwarg_only]

    def call(x: Tensor) -> Tensor:
        tensors = iter((x.abs() + 0.1, x * 0.5 + 0.2, x))
        args = [kind(next(tensors)) if arg is Tensor else [kind(x), kind(-x)] if arg is list else arg for arg in drawn]
        result = overload(*args)
        return (result if isinstance(result, Tensor) else result[0]).to(x.dtype)

    return Step(f"{overload} {drawn}", call)


def _overloads(packet: Any) -> Iterator[Any]:
    for name in packet.overloads():
        overload = getattr(packet, name)
        if not any(a.is_out or (a.alias_info and a.alias_info.is_write) for a in overload._schema.arguments):
            yield overload


def _argument(draw: Random, argument: Any, x: Tensor) -> Any:
    """A value by the argument's type and name; the class Tensor, or list, for a tensor or several."""
    kind, rank = str(argument.type), x.dim()
    if kind == "Tensor":
        return Tensor
    if kind == "List[Tensor]":
        return list
    if argument.name == "dim" and kind in ("int", "Optional[int]"):
        return draw.randrange(-rank, rank)
    if argument.name in ("dim", "dims") and "List[int]" in kind:
        return draw.sample(range(rank), rank if argument.name == "dims" else draw.randint(1, rank))
    if argument.has_default_value() and draw.random() < 0.5:
        return argument.default_value
    drawn: dict[str, Any] = {
        "int": draw.randint(1, 2),
        "float": 0.5,
        "number": 0.5,
        "bool": draw.random() < 0.5,
        "List[int]": [*x.shape],
        "Optional[number]": 0.5,
        "Optional[float]": 0.5,
    }
    return drawn.get(kind, argument.default_value)
