"""Larger batches, so that operators have enough to do.

What        `batch_size` times the parameter `factor` where a DataLoader is made; or, where batches do not come out of one, the
            constant or the default of an argument that is called batch size.
Guarantee   QUALITY: fewer updates on more samples each are another training; only the user's metric can tell how good.
Refuses     Runs whose operators have enough to do; batch sizes that are set nowhere in sight.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import libcst as cst

from flatout.core.errors import EditError, LeverRefused
from flatout.core.parts import lever
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Finding
from flatout.core.records.lever import Candidate, Hooks, Parameters, integer
from flatout.tune.rewrite.calls import LOADER, calls_ending, calls_to, keyword_argument
from flatout.tune.rewrite.source import code_of, nodes_of, parsed, pull, script_of, text_at, with_expression

_FACTORS = (4, 2)
_NAMED = re.compile(r"^(--)?(train_?|train-)?(batch(_|-)?(size)?|bs)$", re.IGNORECASE)


def propose(evidence: Evidence, findings: Sequence[Finding]) -> Iterator[Candidate]:
    """Propose four times and twice the batch, where a rule found operators too small."""
    if not findings:
        raise LeverRefused("operators have enough to do with these batches")
    loader = next((u for u in evidence.loaders if u.fetches >= 0.5), None)
    place: Parameters = {"was": loader.batch_size} if loader is not None else {}
    if loader is None:
        try:
            place = _in_script(evidence)
        except EditError as e:
            raise LeverRefused(f"batches do not come out of a DataLoader, and {e}") from e
    high = max(f.saved_s[1] for f in findings)
    for factor in _FACTORS:
        yield Candidate(
            parameters=place | {"factor": factor},
            # Of what each batch costs besides its samples, all but one part in `factor` goes.
            saved_s=(0.0, max(high, (1 - 1 / factor) * 0.9 * evidence.steps.step_s)),
            where=findings[0].where,
            because=findings[0].because,
        )


def _in_script(evidence: Evidence) -> Parameters:
    place: Parameters = {"file": script_of(evidence) or ""}
    edit(text_at(evidence, place), place | {"factor": _FACTORS[0]})
    return place


def apply(hooks: Hooks, parameters: Parameters) -> None:
    """Construct loaders with larger batches, or change the text."""
    from torch.utils.data import DataLoader

    factor = integer(parameters, "factor")
    if "file" in parameters:
        pull(LEVER.id, hooks, parameters, edit)
        return
    was = integer(parameters, "was") if "was" in parameters else None

    def enlarge(kind: type, arguments: dict[str, Any]) -> None:
        size = arguments.get("batch_size", 1)
        if isinstance(size, int) and arguments.get("batch_sampler") is None and was in (None, size):
            arguments["batch_size"] = factor * size
            hooks.note(LEVER.id)

    hooks.at_construction(DataLoader, enlarge)


def edit(text: str, parameters: Parameters) -> str:
    """Change the number that is a loader's batch size, or else the one constant or argument of that name."""
    module, factor = parsed(text), integer(parameters, "factor")
    number = _number(module)
    return with_expression(module, number, cst.Integer(str(factor * int(number.value)))).code


def _number(module: cst.Module) -> cst.Integer:
    """The literal that the batch size is.

    Raises EditError where there is none, or several that may be it.
    """
    sizes = {id(s): s for c in calls_to(module, LOADER) if (s := _size(c)) is not None}
    literals = [s for s in sizes.values() if isinstance(s, cst.Integer)]
    if len(sizes) == 1 and literals:
        return literals[0]
    names = {code_of(s).rpartition(".")[2] for s in sizes.values() if not isinstance(s, cst.Integer)}
    if literals or len(names) > 1:
        raise EditError("loaders have several batch sizes")
    found = [n for name, n in _constants(module) if (name in names if names else _NAMED.match(name))]
    if len(found) != 1:
        raise EditError(f"{len(found) or 'no'} constants or arguments are called batch size")
    return found[0]


def _size(call: cst.Call) -> cst.BaseExpression | None:
    arguments = keyword_argument(call, "batch_size")
    is_second = len(call.args) > 1 and call.args[1].keyword is None and not call.args[1].star
    return arguments if arguments is not None or not is_second else call.args[1].value


def _constants(module: cst.Module) -> Iterator[tuple[str, cst.Integer]]:
    """Names that are given a whole number, and arguments of command lines with one as their default."""
    for assign in nodes_of(cst.Assign, module):
        [target, *others] = (t.target for t in assign.targets)
        if isinstance(target, cst.Name) and not others and isinstance(assign.value, cst.Integer):
            yield target.value, assign.value
    for call in calls_ending(module, "add_argument"):
        words = [code_of(a.value).strip("\"'") for a in call.args]
        flag = next((word for word in words if word.startswith("--")), "")
        default = keyword_argument(call, "default")
        if flag and isinstance(default, cst.Integer):
            yield flag.removeprefix("--").replace("-", "_"), default


LEVER = lever(__name__, propose, apply=apply, edit=edit, num_losses=lambda parameters: 0, title="Larger batches")
