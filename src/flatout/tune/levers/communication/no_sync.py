"""Gradients that are accumulated are synchronised once, before the optimizer reads them.

What        The forwards of a DistributedDataParallel module run under `no_sync()`, but for each `every`-th since the last step of
            an optimizer. A step that comes early, at an epoch's end, finds its gradients averaged over the ranks then.
Guarantee   BOUNDED: local sums first, then the sum over the ranks. What reads gradients between two backwards reads local ones.
Refuses     One synchronisation a step; several optimizers; static graphs, whose first step must be whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import libcst as cst
from libcst import matchers as m

from flatout.core.errors import EditError, LeverRefused
from flatout.core.parts import lever
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Finding
from flatout.core.records.lever import Candidate, Hooks, Parameters, integer
from flatout.tune.rewrite.calls import DDP, call_in
from flatout.tune.rewrite.imports import with_import
from flatout.tune.rewrite.source import code_of, editable_place, fresh_name, names_in, nodes_of, with_changes

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel
    from torch.optim import Optimizer


def propose(evidence: Evidence, findings: Sequence[Finding]) -> Iterator[Candidate]:
    """Propose it where the rule found more than one synchronisation per step."""
    modules = evidence.distributed.replications if evidence.distributed is not None else ()
    able = [r for r in modules if round(r.syncs_per_step) > 1 and not r.static_graph]
    if not findings or not able:
        why = "its graph is static" if findings else "gradients are synchronised once a step, or not at all"
        raise LeverRefused(why)
    finding, every = findings[0], round(able[0].syncs_per_step)
    place = editable_place(evidence, finding.where, edit)
    yield Candidate(
        parameters={"every": every} | ({"file": place["file"]} if place else {}),
        # How much of an exposed wait is another rank's lateness is not known before it is gone.
        saved_s=(0.5 * finding.saved_s[0], finding.saved_s[1]),
        where=finding.where,
        because=finding.because,
    )


def apply(hooks: Hooks, parameters: Parameters) -> None:
    """Count forwards between steps, and synchronise in the last of them alone."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    every = integer(parameters, "every")
    original: Callable[..., Any] = DistributedDataParallel.forward
    counts: dict[DistributedDataParallel, int] = {}

    def forward(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> Any:
        is_counted = torch.is_grad_enabled() and self.training and not self.static_graph
        if not is_counted or not self.require_backward_grad_sync:
            return original(self, *args, **kwargs)
        counts[self] = counts.get(self, 0) + 1
        if counts[self] % every == 0:
            return original(self, *args, **kwargs)
        hooks.note(LEVER.id)
        with self.no_sync():
            return original(self, *args, **kwargs)

    def before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for module, count in counts.items():
            if count % every:
                _average(module, dist)
            counts[module] = 0

    hooks.replace(DistributedDataParallel, "forward", forward)
    hooks.at_start(lambda: register_optimizer_step_pre_hook(before_step).remove)


def _average(module: DistributedDataParallel, dist: Any) -> None:
    """Gradients averaged over the ranks; those that are equal already stay so."""
    num = dist.get_world_size(module.process_group)
    for parameter in module.module.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad.div_(num), group=module.process_group)


def edit(text: str, parameters: Parameters) -> str:
    """Put the body of the loop over micro-batches under `no_sync()` for all but its last round."""
    module, call = call_in(text, {}, DDP)
    assigned = [a for a in nodes_of(cst.Assign, module) if a.value is call]
    if len(assigned) != 1 or len(assigned[0].targets) != 1 or not isinstance(assigned[0].targets[0].target, cst.Name):
        raise EditError("the replicated module has no name of its own")
    model = code_of(assigned[0].targets[0].target)
    loops = [f for f in nodes_of(cst.For, module) if _accumulates(f, model)]
    if len(loops) != 1:
        raise EditError(f"{len(loops) or 'no'} loops over range() add up gradients of '{model}'")
    loop = loops[0]
    if m.findall(loop.body, m.Break() | m.Continue() | m.Return()):
        raise EditError("the loop can be left early")
    assert isinstance(loop.iter, cst.Call) and isinstance(loop.target, cst.Name)
    count = loop.iter.args[0].value
    name = fresh_name(module, "micro") if loop.target.value == "_" else loop.target.value
    last = str(int(code_of(count)) - 1) if isinstance(count, cst.Integer) else f"{code_of(count)} - 1"
    head = f"with {model}.no_sync() if {name} < {last} else nullcontext():\n    pass\n"
    inside = cst.parse_statement(head, config=module.config_for_parsing)
    assert isinstance(inside, cst.With) and isinstance(loop.body, cst.IndentedBlock)
    new = loop.with_changes(
        target=cst.Name(name),
        body=loop.body.with_changes(body=[inside.with_changes(body=inside.body.with_changes(body=loop.body.body))]),
    )
    return with_import(with_changes(module, {loop: [new]}), "contextlib", "nullcontext").code


def _accumulates(loop: cst.For, model: str) -> bool:
    """Whether it is `for i in range(n)` around a backward of this model, with no optimizer's step inside."""
    is_range = m.matches(loop.iter, m.Call(func=m.Name("range"), args=[m.Arg(star="", keyword=None)]))
    if not is_range or not isinstance(loop.target, cst.Name) or model not in names_in(loop.body):
        return False
    steps = m.findall(loop.body, m.Call(func=m.Attribute(attr=m.Name("step") | m.Name("zero_grad"))))
    backwards = m.findall(loop.body, m.Call(func=m.Attribute(attr=m.Name("backward"))))
    return bool(backwards) and not steps and isinstance(loop.body, cst.IndentedBlock)


LEVER = lever(__name__, propose, apply=apply, edit=edit, title="Gradients synchronised once a step")
