"""A linear layer computes those of its rows that are read, and no others.

What        `compute_rows_as_read(model.head)` (from flatout) behind the construction of the model: the layer returns a tensor
            whose rows are computed when an index reads them, and all of them when anything else is done with it.
Guarantee   BOUNDED: the products have fewer rows, and libraries sum those in another order.
Refuses     Layers that are no nn.Linear; layers of which all rows are read; scripts without an optimizer of torch, whose steps
            tell when weights change.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from flatout.core.errors import EditError, LeverRefused
from flatout.core.parts import lever
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Finding
from flatout.core.records.lever import Candidate, Hooks, Parameters, string
from flatout.tune.levers.submodules import Answer, answer_calls
from flatout.tune.rewrite.imports import with_import
from flatout.tune.rewrite.models import behind_model
from flatout.tune.rewrite.source import parsed

if TYPE_CHECKING:
    from torch import nn

_BLOCK = "compute_rows_as_read"


def propose(evidence: Evidence, findings: Sequence[Finding]) -> Iterator[Candidate]:
    """Propose it for each layer that computes rows which nobody reads."""
    if not evidence.optimizers:
        raise LeverRefused("no optimizer of torch changes the weights")
    names = list(dict.fromkeys(f.module for f in findings if "." in f.module))
    if not names:
        raise LeverRefused("every row that a layer computes is read")
    for name in names:
        found = [f for f in findings if f.module == name]
        yield Candidate(
            parameters={"module": name},
            saved_s=(0.5 * sum(f.saved_s[0] for f in found), sum(f.saved_s[1] for f in found)),
            where=found[0].where,
            because=found[0].because,
        )


def apply(hooks: Hooks, parameters: Parameters) -> None:
    """Answer the calls of the layer with rows that are computed when they are read."""

    def rows_of(module: nn.Module) -> Answer:
        from torch import nn

        from flatout.blocks.training.rows_as_read import late_rows

        is_linear = type(module) is nn.Linear
        if is_linear:
            hooks.note(LEVER.id)

        def answer(original: Any, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if not is_linear or len(args) != 1 or kwargs:
                return original(layer, *args, **kwargs)
            assert isinstance(layer, nn.Linear)
            return late_rows(layer, args[0])

        return answer

    answer_calls(hooks, string(parameters, "module"), rows_of)


def edit(text: str, parameters: Parameters) -> str:
    """Write `compute_rows_as_read(model.head)` behind the construction of the model."""
    _, _, path = string(parameters, "module").partition(".")
    if not all(part.isidentifier() or part.isdigit() for part in path.split(".")):
        raise EditError(f"'{path}' is no path to a layer")
    layer = "model" + "".join(f"[{part}]" if part.isdigit() else f".{part}" for part in path.split("."))
    changed = behind_model(text, f"{_BLOCK}({layer})\n")
    return with_import(parsed(changed), "flatout", _BLOCK).code


LEVER = lever(__name__, propose, apply=apply, edit=edit, is_local=True, title="Rows computed as they are read")
