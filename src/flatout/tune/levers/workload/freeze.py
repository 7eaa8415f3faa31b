"""Gradients that no optimizer reads are not computed.

What        `requires_grad_(False)` on the parameters that no optimizer holds, at the model's first call.
Guarantee   EXACT: what is trained gets the same gradients.
Refuses     Runs in which every gradient is read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import libcst as cst

from flatout.core.errors import EditError, LeverRefused
from flatout.core.parts import lever
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Finding
from flatout.core.records.lever import Candidate, Hooks, Parameters
from flatout.tune.rewrite.calls import calls_ending
from flatout.tune.rewrite.imports import call_name
from flatout.tune.rewrite.models import Construction, constructions_in
from flatout.tune.rewrite.source import code_of, nodes_of, parsed, statements, with_changes

if TYPE_CHECKING:
    from torch import nn


def propose(evidence: Evidence, findings: Sequence[Finding]) -> Iterator[Candidate]:
    """Propose all modules whose gradients nothing reads, together."""
    modules = [m for u in evidence.unused_gradients for m in u.modules]
    if not modules:
        raise LeverRefused("every gradient is read by an optimizer")
    savings = [f.saved_s for f in findings]
    seconds = sum(u.seconds for u in evidence.unused_gradients)
    yield Candidate(
        parameters={"modules": tuple(sorted(modules))},
        saved_s=(sum(a for a, _ in savings), sum(b for _, b in savings)) if savings else (0.0, seconds),
        where=findings[0].where if findings else None,
        because=f"{len(modules)} module(s) get gradients that no optimizer reads",
    )


def apply(hooks: Hooks, parameters: Parameters) -> None:
    """Freeze the own parameters of the named modules."""
    from flatout.tune.script_hooks import user_class_name

    paths_wanted = parameters["modules"]
    wanted = set(paths_wanted if isinstance(paths_wanted, (tuple, list)) else [str(paths_wanted)])
    counts: dict[str, int] = {}

    def freeze(module: nn.Module) -> Callable[[], None] | None:
        kind = user_class_name(module)
        counts[kind] = counts.get(kind, 0) + 1
        title = kind if counts[kind] == 1 else f"{kind} ({counts[kind]})"
        found = []
        for path, inner in module.named_modules():
            if (f"{title}.{path}" if path else title) in wanted:
                found += [p for p in inner.parameters(recurse=False) if p.requires_grad]
        for parameter in found:
            parameter.requires_grad_(False)
        if not found:
            return None
        hooks.note(LEVER.id)

        def undo() -> None:
            for parameter in found:
                parameter.requires_grad_(True)

        return undo

    hooks.at_first_call(freeze)


def edit(text: str, parameters: Parameters) -> str:
    """Write `model.body.requires_grad_(False)` below the statement that constructs the model."""
    module = parsed(text)
    if ".requires_grad" in text:
        raise EditError("the script sets requires_grad itself")
    constructions = constructions_in(module)
    trained = _trained(module)
    paths_wanted = parameters["modules"]
    changes: dict[cst.CSTNode, Sequence[cst.BaseStatement]] = {}
    by_kind: dict[str, list[str]] = {}
    for path in paths_wanted if isinstance(paths_wanted, (tuple, list)) else [str(paths_wanted)]:
        kind, _, rest = path.partition(".")
        by_kind.setdefault(kind, []).append(rest)
    for kind, paths in by_kind.items():
        models = [one for one in constructions if one.kind == kind]
        if len(models) != 1:
            raise EditError(
                f"the file makes a '{kind}' in {len(models)} places"
                if models
                else f"where a '{kind}' is constructed was not found"
            )
        frozen = _frozen(
            models[0], paths, trained, {one.name for one in constructions if one.function is models[0].function}
        )
        lines = [f"{_dotted(models[0].name, path)}.requires_grad_(False)\n" for path in frozen]
        changes[models[0].statement] = [models[0].statement, *statements("".join(lines))]
    return with_changes(module, changes).code


def _trained(module: cst.Module) -> set[str]:
    """What `.parameters()` is called of in the calls that make optimizers.

    Raises EditError when that is not all that they are given.
    """
    found: set[str] = set()
    for call in nodes_of(cst.Call, module):
        if call_name(module, call.func).startswith("torch.optim.") and call.args:
            trained = calls_ending(call.args[0], "parameters")
            if not trained:
                continue
            found |= {_path(code_of(c.func.value)) for c in trained if isinstance(c.func, cst.Attribute)}
    if not found:
        raise EditError("what the optimizer trains cannot be read from the text")
    return found


def _frozen(model: Construction, paths: Sequence[str], trained: set[str], known: set[str]) -> list[str]:
    """The shortest paths inside of the model that hold nothing that is trained."""
    stranger = next((t for t in trained if not any(f"{t}.".startswith(f"{name}.") for name in known)), None)
    if stranger is not None:
        raise EditError(f"what '{stranger}' is cannot be read from the text")
    inner = [t[len(model.name) :].strip(".").split(".") for t in trained if f"{t}.".startswith(f"{model.name}.")]
    found: list[str] = []
    for path in paths:
        parts = path.split(".") if path else []
        for length in range(len(parts) + 1):
            prefix = parts[:length]
            if not any(t[: len(prefix)] == prefix or t == [""] for t in inner):
                found.append(".".join(prefix))
                break
        else:
            raise EditError(f"'{model.name}' is passed to the optimizer with '{path or model.name}'")
    return list(dict.fromkeys(found))


def _path(code: str) -> str:
    """An expression as torch names a module: an index is a name.

    >>> _path("net.body[0]")
    'net.body.0'
    """
    return re.sub(r"\[(\d+)\]", r".\1", code)


def _dotted(name: str, path: str) -> str:
    """How Python reaches a module inside of another.

    >>> _dotted("net", "body.0.weight")
    'net.body[0].weight'
    """
    return name + "".join(f"[{part}]" if part.isdigit() else f".{part}" for part in path.split(".") if part)


LEVER = lever(__name__, propose, apply=apply, edit=edit, title="No gradients that nobody reads")
