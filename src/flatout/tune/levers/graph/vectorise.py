"""A Python loop over samples, rows or groups becomes one batched computation.

What        A loop over `range(n)`, the rows of a tensor, `enumerate` or `zip` of such, whose iterations do not feed one another
            and hand over by `append`, `+=`, `out[i] =`, counts at a key or `max`: its body becomes a function that torch.vmap
            maps over all of them. Host reads become one at the end, conditions torch.where, rows chosen by a mask or up to a
            length masked reductions; sums and means of the rows with `owner == i` become index_add. Comprehensions inside
            torch.stack, torch.cat, torch.tensor and sum likewise.
Guarantee   BOUNDED: sums are taken in another order.
Refuses     Bodies that carry a value to the next iteration, do more than compute (calls that change something, prints, random
            numbers), leave the loop early, need values on the host, or bind a name that is read later.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import libcst as cst
from libcst import matchers as m

from flatout.core.records.lever import Parameters
from flatout.tune.levers.proposals import source_lever
from flatout.tune.rewrite.iterations import iteration_of, over_rows
from flatout.tune.rewrite.source import assigned_in, code_of, names_in
from flatout.tune.rewrite.vmap_loops import Loop, LoopInputs, batched, findings_in_loops

_SAVED: Final = (0.6, 1.05)
"""Of what the rules promise for a loop that is gone: torch.vmap costs its own dispatch."""


def edit(text: str, parameters: Parameters) -> str:
    """Write the loop as one call of torch.vmap.

    Raises EditError where that is not certain.
    """
    return batched(text, parameters, _opened)


def _opened(loop: Loop) -> LoopInputs:
    """Rows of tensors, or the numbers of a range."""
    device = _device(loop.module, loop.target, loop.block)
    iteration = iteration_of(loop.target, loop.over, torch=loop.torch, device=device)
    iteration, block = over_rows(iteration, loop.block)
    return LoopInputs(iteration, block)


def _device(module: cst.Module, target: cst.BaseExpression, block: Sequence[cst.CSTNode]) -> str:
    """The tensor whose device numbers should be on: the one that they index, in a file that mentions devices."""
    if not any(word in module.code for word in ("cuda", "device")):
        return ""
    counter = target.elements[0].value if isinstance(target, cst.Tuple) else target
    local = assigned_in(block)
    for node in (n for one in block for n in m.findall(one, m.Subscript() | m.Comparison())):
        tensor: cst.BaseExpression | None = None
        if isinstance(node, cst.Subscript) and names_in(node.slice) & names_in(counter):
            tensor = node.value
        elif isinstance(node, cst.Comparison) and code_of(node.comparisons[0].comparator) == code_of(counter):
            tensor = node.left
        if isinstance(tensor, (cst.Name, cst.Attribute)) and not names_in(tensor) & local:
            return f"{code_of(tensor)}.device"
    return ""


LEVER = source_lever(
    __name__,
    edit,
    title="A loop as one batched computation",
    else_because="no loop of small operators was found",
    findings=findings_in_loops,
    loops=(True,),
    saved_fraction=_SAVED,
)
