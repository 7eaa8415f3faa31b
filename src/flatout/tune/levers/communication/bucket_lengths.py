"""The rows of a padded batch are computed in groups of like length, each as wide as its own longest row.

What        Each call of a root module becomes `flatout.call_by_length`: rows sorted by length and divided into `groups` of
            equally many, the model called on each group, cut to its longest row (up to a `multiple`), and the results put in the
            order of the rows. Batches, their order and their losses stay the same.
Guarantee   BOUNDED: padding that a model masks adds zeros; sums come in another order. DISTRIBUTION where the model draws
            random masks (dropout): the same distribution, other numbers.
Refuses     Batches whose rows are nearly as long as the longest; batches of few rows; devices that wait for their host; models
            with batch norm, whose statistics are those of a whole batch, and models that compute their loss. Models to which
            padding is not nothing are told by the proof.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import libcst as cst

from flatout.core.errors import EditError, LeverRefused, PlanError, UsageError
from flatout.core.parts import lever
from flatout.core.records.evidence import Evidence, Operator, Padding
from flatout.core.records.finding import Finding
from flatout.core.records.lever import Candidate, Hooks, Parameters, integer
from flatout.machine.cost.accounting import model_seconds
from flatout.machine.cost.compiling import draws_in_model
from flatout.tune.levers.proposals import reads_padding
from flatout.tune.rewrite.enclosing_blocks import enclosing_loops, parents_of
from flatout.tune.rewrite.imports import with_import
from flatout.tune.rewrite.models import names_of_models
from flatout.tune.rewrite.source import code_of, nodes_of, parsed, with_expression

if TYPE_CHECKING:
    from torch import nn

_EVEN: Final = 0.8
"""Where the mean row is longer than this part of the longest, groups gain little over a cut to the longest row."""
_GROUPS: Final = (4, 2)
_FEWEST_ROWS: Final = 4
"""Of each group: fewer leave a device idle, and most of a CPU's products too."""
_PARTS: Final = 16
"""A group's width is rounded up to this part of the whole one, to a power of two and 8 at least: few shapes exist then."""
_ALIGNED: Final = 8
_LOW: Final = 0.3
"""Of what is promised, in our judgement: smaller calls, and more of them."""
_WHOLE_BATCH: Final = ("batch_norm",)
_LOSSES: Final = ("nll_loss", "mse_loss", "l1_loss", "binary_cross_entropy", "kl_div", "_ctc_loss")


def propose(evidence: Evidence, findings: Sequence[Finding]) -> Iterator[Candidate]:
    """Propose it for tokens whose rows are much shorter than the longest of their batch."""
    padding = _uneven(evidence)
    if not findings:
        raise LeverRefused("what is computed for padding takes too little of a step")
    if any(part in o.op for o in evidence.operators for part in _WHOLE_BATCH):
        raise LeverRefused("batch norm takes its statistics from a whole batch")
    if any(_is_loss_in_model(operator, evidence) for operator in evidence.operators):
        raise LeverRefused("the model computes the loss of its batch itself; groups have losses of their own")
    if evidence.steps.device_s is not None and not evidence.steps.is_device_bound:
        raise LeverRefused("the device waits for its host, and each group has launches of its own")
    rows, width = padding.shape[:2]
    busy_s = model_seconds(evidence)
    for groups in _GROUPS:
        if rows < groups * _FEWEST_ROWS:
            continue
        remaining = _remaining(padding, groups)
        yield Candidate(
            parameters={"pad": int(padding.pad_value), "groups": groups, "multiple": _multiple(width)},
            saved_s=(_LOW * (1 - remaining) * busy_s, (1 - remaining) * busy_s),
            guarantee="distribution" if draws_in_model(evidence) else None,
            is_risky=reads_padding(evidence),
            because=f"the mean row of '{padding.name}' has {padding.mean_length:.0f} positions, the longest of a batch "
            f"{padding.longest:.0f} of {width}; in {groups} groups of like length {remaining:.0%} of the positions remain",
        )


def _uneven(evidence: Evidence) -> Padding:
    """The tokens with most padding; LeverRefused where groups would gain nothing."""
    tokens = [p for p in evidence.paddings if p.dtype in ("int64", "int32") and p.signs]
    if not tokens:
        raise LeverRefused("no padded tokens")
    padding = max(tokens, key=lambda p: p.padding_fraction)
    if padding.shape[0] < _GROUPS[-1] * _FEWEST_ROWS:
        raise LeverRefused(f"a batch has {padding.shape[0]} rows, too few for groups")
    if padding.mean_length > _EVEN * padding.longest:
        raise LeverRefused("the rows of a batch are of nearly one length")
    return padding


def _is_loss_in_model(operator: Operator, evidence: Evidence) -> bool:
    line = evidence.source_of(operator.source)
    is_loss = operator.phase == "forward" and any(name in operator.op for name in _LOSSES)
    return is_loss and line is not None and line.function.endswith(".forward")


def _remaining(padding: Padding, groups: int) -> float:
    """Share of the positions that groups leave: of lengths spread evenly up to the longest, half a group's spread is padding."""
    mean, longest = padding.mean_length, padding.longest
    return min(1.0, (mean + (longest - mean) / groups) / padding.shape[1])


def _multiple(width: int) -> int:
    return int(max(_ALIGNED, 1 << max(0, (width // _PARTS).bit_length() - 1)))


def apply(hooks: Hooks, parameters: Parameters) -> None:
    """Call root modules in groups of rows. What is called without tokens is called as it is."""
    from flatout.blocks.data.by_length import call_by_length, is_tokens
    from flatout.core.tensors.nests import tensors_in

    pad, groups, multiple = (integer(parameters, name) for name in ("pad", "groups", "multiple"))
    if groups < 2 or multiple < 1:
        raise PlanError(
            f"'groups' is {groups} and 'multiple' {multiple}: there must be 2 groups and a multiple of 1 at least"
        )

    def by_length(module: nn.Module, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if not any(is_tokens(tensor) for tensor in tensors_in((args, kwargs))):
            return original(*args, **kwargs)
        try:
            result = call_by_length(original, *args, pad=pad, groups=groups, multiple=multiple, **kwargs)
        except UsageError as e:
            raise PlanError(f"the lever '{LEVER.id}' does not go with this model: {e}; take it out of the plan") from e
        hooks.note(LEVER.id)
        return result

    hooks.in_place_of_calls(by_length)


def edit(text: str, parameters: Parameters) -> str:
    """Write `flatout.call_by_length(model, ...)` wherever a loop calls a model that is made in the file.

    Raises EditError where there is no such call.
    """
    module = parsed(text)
    names, parents = names_of_models(module), parents_of(module)
    arguments = [f"{name}={integer(parameters, name)}" for name in ("pad", "groups", "multiple")]
    changes: dict[cst.CSTNode, cst.CSTNode] = {}
    for call in nodes_of(cst.Call, module):
        if code_of(call.func) in names and call.args and enclosing_loops(parents, call):
            written = ", ".join([code_of(call.func), *(code_of(arg).rstrip(", ") for arg in call.args), *arguments])
            changes[call] = cst.parse_expression(f"flatout.call_by_length({written})")
    if not changes:
        raise EditError("no loop of the file calls a model that is made in it")
    for old, new in changes.items():
        module = with_expression(module, old, new)
    return with_import(module, "flatout").code


LEVER = lever(
    __name__,
    propose,
    apply=apply,
    edit=edit,
    title="Rows computed in groups of like length",
    conflicts=("communication.trim-padding",),
    errors=("not one result a row",),
)
