"""What nobody reads is not computed.

What        A part of a model whose output is not used is run once, to see what it gives; then it hands out placeholders that
            raise an error as soon as anything is done with them. A statement whose result is read nowhere goes, or goes into
            the `if` that alone reads it.
Guarantee   EXACT: what is used is computed as before.
Refuses     Parts that draw random numbers or write to their buffers, parts that return more than tensors, models that are not
            being trained; statements that may do more than compute.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, NoReturn

import libcst as cst

from flatout.core.errors import EditError, LeverRefused, PlanError
from flatout.core.parts import lever
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Finding
from flatout.core.records.lever import Candidate, Hooks, Parameters, string
from flatout.tune.levers.submodules import answer_calls
from flatout.tune.rewrite.constants import PlainAssignment, connected, written_names
from flatout.tune.rewrite.purity import Purity
from flatout.tune.rewrite.source import SourcePlace, find, local_proposals, pull, with_changes

if TYPE_CHECKING:
    from torch import nn

_WEIGHTS: Final = re.compile(r"\.(weight|bias|parameters|named_parameters|state_dict|data|grad)\b")
_DATA: Final = ("torch.", "np.", "numpy.", "math.")
_JUDGED: Final = ("forward", "other", "transfer")


def propose(evidence: Evidence, findings: Sequence[Finding]) -> Iterator[Candidate]:
    """Propose whole parts of a model where everything is dead; else the statements that the findings name."""
    if not findings:
        raise LeverRefused("everything that is computed is used")
    dead = {i for f in findings for i in f.operators}
    modules = _dead_modules(evidence, dead)
    for path in modules:
        mine = [f for f in findings if any(_is_in(evidence.operators[i].module, path) for i in f.operators)]
        low, high = sum(f.saved_s[0] for f in mine), sum(f.saved_s[1] for f in mine)
        yield Candidate(
            parameters={"module": path},
            saved_s=(0.6 * low, 1.1 * high),
            where=mine[0].where,
            because=mine[0].because,
        )
    rest = [
        f
        for f in findings
        if not any(_is_in(evidence.operators[i].module, path) for i in f.operators for path in modules)
    ]
    if rest:
        why = "everything that is computed is used"
        yield from local_proposals(evidence, rest, edit, else_because=why, saved_fraction=(0.5, 1.1))


def _dead_modules(evidence: Evidence, dead: set[int]) -> list[str]:
    """Paths of the largest parts of root modules in which every operator of the forward is dead."""
    paths: set[str] = set()
    for row in dead:
        parts = evidence.operators[row].module.split(".")
        paths |= {".".join(parts[:n]) for n in range(2, len(parts) + 1)}
    alive = [
        o.module
        for i, o in enumerate(evidence.operators)
        if i not in dead and o.phase in _JUDGED and o.bytes > 0 and o.source >= 0
    ]
    whole = {p for p in paths if not any(_is_in(module, p) for module in alive)}
    return sorted(p for p in whole if not any(_is_in(p, other) for other in whole - {p}))


def _is_in(module: str, outer: str) -> bool:
    return module == outer or module.startswith(f"{outer}.")


# -- a part of a model ----------------------------------------------------------------------------------------------------------


def apply(hooks: Hooks, parameters: Parameters) -> None:
    """Have the part return placeholders; without the parameter `module`, edit the source."""
    if "module" not in parameters:
        pull(LEVER.id, hooks, parameters, edit)
        return
    name = string(parameters, "module")
    if "." in name:
        answer_calls(hooks, name, lambda part: Skipped(name, lambda: hooks.note(LEVER.id)).call)


class Skipped:
    """A part of a model that does not run while the model is trained."""

    def __init__(self, name: str, on_skip: Callable[[], None]) -> None:
        self._name = name
        self._on_skip = on_skip
        self._placeholder: Any = None
        self._is_able = True

    def call(
        self, original: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A placeholder in the shape of the first output; the module itself where gradients are off or it is not trained."""
        import torch

        if not self._is_able or not module.training or not torch.is_grad_enabled():
            return original(module, *args, **kwargs)
        if self._placeholder is None:
            before = _state(module)
            output = original(module, *args, **kwargs)
            self._placeholder = _placeholder(output, self._name)
            self._is_able = self._placeholder is not None and _state(module) == before
            return output
        self._on_skip()
        return self._placeholder


def _state(module: nn.Module) -> tuple[object, ...]:
    """What a call must not change: buffers, and where the random generators are."""
    from flatout.core.tensors.generators import generator_states

    return (*((id(b), b._version) for b in module.buffers() if not b.is_inference()), generator_states())


def _placeholder(value: Any, name: str) -> Any:
    """The nest with placeholders for its tensors; None where something else is in it."""
    from torch import Tensor

    if isinstance(value, Tensor):
        return Unread(name)
    if type(value) in (tuple, list):
        inner = [_placeholder(item, name) for item in value]
        return None if None in [i for i in inner if not isinstance(i, Unread)] else type(value)(inner)
    if type(value) is dict:
        items = {key: _placeholder(item, name) for key, item in value.items()}
        return None if None in [i for i in items.values() if not isinstance(i, Unread)] else items
    return None


class Unread:
    """A placeholder for a tensor that was not computed: every use of it raises PlanError."""

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        object.__setattr__(self, "_name", name)

    def __getattribute__(self, name: str) -> Any:
        if name in ("__class__", "__slots__", "__torch_function__"):
            return object.__getattribute__(self, name)
        return _fail(self)

    @classmethod
    def __torch_function__(cls, function: object, types: object, args: Any = (), kwargs: Any = None) -> NoReturn:
        from flatout.core.tensors.nests import tree_flatten

        _fail(next((leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Unread)), None))


def _fail(unread: object, *_: object, **__: object) -> NoReturn:
    name = object.__getattribute__(unread, "_name") if isinstance(unread, Unread) else "a part of the model"
    raise PlanError(
        f"the output of '{name}' is read, but 'graph.remove-dead-code' left it out; take that lever out of the plan"
    )


_READING: Final = (
    "getitem setitem delitem len iter next contains bool int float index complex str repr format bytes call"
)
_COMPARING: Final = "eq ne lt le gt ge"
_ADDING: Final = "add radd iadd sub rsub isub neg pos abs invert and rand or ror xor rxor lshift rshift"
_MULTIPLYING: Final = (
    "mul rmul imul matmul rmatmul imatmul truediv rtruediv itruediv floordiv rfloordiv mod rmod pow rpow"
)
_HANDLING: Final = "array setattr enter exit reduce_ex copy deepcopy"

for _use in " ".join((_READING, _COMPARING, _ADDING, _MULTIPLYING, _HANDLING)).split():
    setattr(Unread, f"__{_use}__", _fail)


# -- a statement ----------------------------------------------------------------------------------------------------------------


def edit(text: str, parameters: Parameters) -> str:
    """Leave out an assignment that nothing reads, or move it into the `if` that alone reads it.

    Raises EditError where that is not certain.
    """
    if "module" in parameters:
        raise EditError(f"where the output of '{parameters['module']}' is handed on cannot be decided from the text")
    place = find(text, parameters)
    scope = cst.Module(body=[place.function]) if place.function is not None else place.module
    tree = ast.parse(scope.code)
    if any(isinstance(n, (ast.FunctionDef, ast.Lambda)) for n in ast.walk(tree) if n is not tree.body[0]) and (
        place.function is not None
    ):
        raise EditError("a function inside this one may read it")
    if any(isinstance(n, (ast.Global, ast.Nonlocal)) for n in ast.walk(tree)):
        raise EditError("the function shares names with others")
    purity = Purity(place.module)
    unsettled = _unsettled(tree)
    for reader in (None, *_ifs_after(place)):
        dead = _dead(place, purity, tree, reader, unsettled)
        if any(statement is place.statement for statement in dead):
            return _without(place, dead, reader)
    raise EditError("it is read, or its names are bound more than once")


def _ifs_after(place: SourcePlace) -> list[cst.If]:
    return [s for s in place.block[place.index + 1 :] if isinstance(s, cst.If) and s.orelse is None]


def _dead(
    place: SourcePlace, purity: Purity, tree: ast.Module, reader: cst.If | None, unsettled: set[str]
) -> list[cst.SimpleStatementLine]:
    """Assignments of the block, in order, that only one another and the body of `reader` read."""
    end = next((i for i, s in enumerate(place.block) if s is reader), len(place.block))
    loads, stores = _counts(tree)
    inside = _counts(ast.parse(cst.Module(body=[*reader.body.body]).code))[0] if reader is not None else Counter[str]()
    changed = written_names(tree)
    dead: list[PlainAssignment] = []
    after: set[str] = set()
    for statement in reversed(place.block[:end]):
        assert isinstance(statement, (cst.SimpleStatementLine, cst.BaseCompoundStatement))
        targets = _targets(statement)
        own_loads, own_stores = _counts(ast.parse(cst.Module(body=[statement]).code))
        if targets and not targets & (after | changed) and all(stores[t] == 1 for t in targets):
            assert isinstance(statement, cst.SimpleStatementLine)
            by_dead = _counts(ast.parse(cst.Module(body=[d.statement for d in dead]).code))[0]
            is_unread = all(loads[t] == inside[t] + by_dead[t] for t in targets)
            if is_unread and _is_pure(statement, purity, after | changed | unsettled if reader is not None else set()):
                value = cst.ensure_type(statement.body[0], cst.Assign).value
                dead.insert(0, PlainAssignment(statement, tuple(targets), value, frozenset(own_loads)))
                continue
        after |= set(own_stores)
    # What is made of the anchor, and what all that is made of: what else is dead is told by other findings.
    return [a.statement for anchor in dead if anchor.statement is place.statement for a in connected(dead, anchor)]


def _unsettled(tree: ast.Module) -> set[str]:
    """Names that may stand for weights, which an optimizer writes to: those bound to such, or outside loops by unknown calls."""
    found: set[str] = set()
    in_loops = {id(n) for loop in ast.walk(tree) if isinstance(loop, (ast.For, ast.While)) for n in ast.walk(loop)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            is_known = isinstance(node.value, ast.Constant) or ast.unparse(node.value).startswith(_DATA)
            if _WEIGHTS.search(ast.unparse(node.value)) or (id(node) not in in_loops and not is_known):
                found |= {n.id for t in node.targets for n in ast.walk(t) if isinstance(n, ast.Name)}
    return found


def _is_pure(statement: cst.SimpleStatementLine, purity: Purity, rebound: set[str]) -> bool:
    """Whether it only computes, from names that are the same where it would go."""
    [small] = statement.body
    assert isinstance(small, cst.Assign)
    try:
        reads = purity.reads(small.value, me="")
    except EditError:
        return False
    return not reads.names & rebound and all(map(purity.is_constant, reads.globals))


def _without(place: SourcePlace, dead: Sequence[cst.SimpleStatementLine], reader: cst.If | None) -> str:
    changes: dict[cst.CSTNode, Sequence[cst.BaseStatement]] = dict.fromkeys(dead, ())
    if reader is not None:
        if not isinstance(reader.body, cst.IndentedBlock):
            raise EditError("the `if` that reads it has its body on its line")
        body = reader.body.with_changes(body=[*dead, *reader.body.body])
        changes[reader] = [reader.with_changes(body=body)]
    elif len(dead) == len(place.block):
        raise EditError("its block contains nothing else")
    return with_changes(place.module, changes).code


def _targets(statement: cst.CSTNode) -> set[str]:
    """Names that a plain assignment on a line of its own binds; none where it does anything else."""
    if not isinstance(statement, cst.SimpleStatementLine) or len(statement.body) != 1:
        return set()
    [small] = statement.body
    if not isinstance(small, cst.Assign) or not all(isinstance(t.target, cst.Name) for t in small.targets):
        return set()
    return {t.target.value for t in small.targets if isinstance(t.target, cst.Name)}


def _counts(tree: ast.AST) -> tuple[Counter[str], Counter[str]]:
    """How often each name is read, and bound."""
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    loads = Counter(name.id for name in names if isinstance(name.ctx, ast.Load))
    return loads, Counter(name.id for name in names) - loads


LEVER = lever(__name__, propose, apply=apply, edit=edit, is_local=True, title="What nobody reads left out")
