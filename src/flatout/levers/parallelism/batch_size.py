"""Larger batches, so that operators have enough to do.

What        `batch_size` times the parameter `factor` where a DataLoader is made; or, where batches do not come out of one, the
            constant or the default of an argument that is called batch size.
Guarantee   QUALITY: fewer updates on more samples each are another training; only the user's metric can tell how good.
Refuses     Runs whose operators have enough to do; batch sizes that are set nowhere in sight.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import libcst as cst
from libcst import matchers as m

from flatout.errors import EditError
from flatout.levers.syntax.calls import LOADER, calls_of, keyword_argument
from flatout.levers.syntax.source import code_of, parsed, pull, with_expression
from flatout.records.evidence import Evidence
from flatout.records.finding import Finding
from flatout.records.lever import Candidate, Lever, Parameters, Refusal, Seams, integer

_FACTORS = (4, 2)
_NAMED = re.compile(r"^(--)?(train_?|train-)?(batch(_|-)?(size)?|bs)$", re.IGNORECASE)


def propose(evidence: Evidence, findings: Sequence[Finding]) -> Iterator[Candidate | Refusal]:
    """Four times and twice the batch, where a rule found operators too small."""
    if not findings:
        yield Refusal(lever=LEVER.id, because="operators have enough to do with these batches")
        return
    loader = next((u for u in evidence.loaders if u.fetches >= 0.5), None)
    place: Parameters = {"was": loader.batch_size} if loader is not None else {}
    if loader is None:
        try:
            place = _in_script(evidence)
        except EditError as e:
            yield Refusal(lever=LEVER.id, because=f"batches do not come out of a DataLoader, and {e}")
            return
    high = max(f.saved_s[1] for f in findings)
    for factor in _FACTORS:
        yield Candidate(
            lever=LEVER.id,
            parameters=place | {"factor": factor},
            # Of what each batch costs besides its samples, all but one part in `factor` goes.
            saved_s=(0.0, max(high, (1 - 1 / factor) * 0.9 * evidence.steps.step_s)),
            where=findings[0].where,
            because=findings[0].because,
        )


def _in_script(evidence: Evidence) -> Parameters:
    command = evidence.workload.command
    script = Path(evidence.workload.cwd, command[1]) if len(command) > 1 else Path()
    try:
        text = script.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise EditError(f"'{script}' cannot be read") from e
    place: Parameters = {"file": script.name}
    edit(text, place | {"factor": _FACTORS[0]})
    return place


def apply(seams: Seams, parameters: Parameters) -> None:
    """Have loaders made with larger batches, or the text changed."""
    from torch.utils.data import DataLoader

    factor = integer(parameters, "factor")
    if "file" in parameters:
        pull(LEVER.id, seams, parameters, edit)
        return
    was = integer(parameters, "was") if "was" in parameters else None

    def enlarge(kind: type, given: dict[str, Any]) -> None:
        size = given.get("batch_size", 1)
        if isinstance(size, int) and given.get("batch_sampler") is None and was in (None, size):
            given["batch_size"] = factor * size
            seams.note(LEVER.id)

    seams.at_making(DataLoader, enlarge)


def edit(text: str, parameters: Parameters) -> str:
    """The number of a loader's batch size; else of the one constant or argument of that name."""
    module, factor = parsed(text), integer(parameters, "factor")
    number = _number(module)
    return with_expression(module, number, cst.Integer(str(factor * int(number.value)))).code


def _number(module: cst.Module) -> cst.Integer:
    """The literal that the batch size is.

    Raises EditError where there is none, or several that may be it.
    """
    sizes = {id(s): s for c in calls_of(module, LOADER) if (s := _size(c)) is not None}
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
    given = keyword_argument(call, "batch_size")
    is_second = len(call.args) > 1 and call.args[1].keyword is None and not call.args[1].star
    return given if given is not None or not is_second else call.args[1].value


def _constants(module: cst.Module) -> Iterator[tuple[str, cst.Integer]]:
    """Names that are given a whole number, and arguments of command lines with one as their default."""
    for assign in m.findall(module, m.Assign(targets=[m.AssignTarget(target=m.Name())], value=m.Integer())):
        assert isinstance(assign, cst.Assign) and isinstance(assign.value, cst.Integer)
        yield code_of(assign.targets[0].target), assign.value
    for call in m.findall(module, m.Call(func=m.Attribute(attr=m.Name("add_argument")))):
        assert isinstance(call, cst.Call)
        flag = next(
            (code_of(a.value).strip("\"'") for a in call.args if code_of(a.value).strip("\"'").startswith("--")), ""
        )
        default = keyword_argument(call, "default")
        if flag and isinstance(default, cst.Integer):
            yield flag.removeprefix("--").replace("-", "_"), default


LEVER = Lever(
    id="parallelism.batch-size",
    title="Larger batches",
    guarantee="quality",
    module=__name__,
    propose=propose,
    apply=apply,
    edit=edit,
)
