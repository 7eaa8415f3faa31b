"""Changes of the text of the user's files: a place found by its function and its first line, and statements replaced
there.

A place is kept as parameters of a lever: `file` (relative to the script's folder), `function` (its qualified name, '<module>'
outside of all) and `code` (the first line of the statement, stripped), so that it is found again when lines above it have
changed, and a person can read it. Texts are changed as syntax trees that keep formatting (libcst).
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from os.path import relpath
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar

import libcst as cst
from libcst import matchers as m

from flatout.core.errors import EditError, LeverRefused
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Finding
from flatout.core.records.lever import Candidate, Hooks, Parameter, Parameters, string
from flatout.core.records.workload import Source
from flatout.core.runtime.project_folder import is_editable
from flatout.machine.cost.feeding import function_name_of
from flatout.tune.rewrite.edit_cache import edited_text

Edit = Callable[[str, Parameters], str]
Statement: TypeAlias = "cst.SimpleStatementLine | cst.BaseCompoundStatement"
Node = TypeVar("Node", bound="cst.CSTNode")

MODULE: Final = "<module>"
_BETWEEN: Final = ": "
"""What separates file, function and code of a place that is one word of a plan."""


@dataclass(frozen=True)
class SourcePlace:
    """A statement of a parsed text: `block` contains it at `index`.

    `function` and `owner`, the class, are the innermost around it, None where there is none; `prefix` is what the qualified name
    of a function defined there begins with.
    """

    module: cst.Module
    function: cst.FunctionDef | None
    block: Sequence[cst.BaseStatement]
    index: int
    owner: cst.ClassDef | None = None
    prefix: str = ""

    @property
    def statement(self) -> cst.BaseStatement:
        """The statement that is at this place."""
        return self.block[self.index]

    @property
    def scope(self) -> str:
        """The qualified name of the function or class around it; '' at the top of the file."""
        return self.prefix.removesuffix(".").removesuffix(".<locals>")


def word_set(text: str) -> frozenset[str]:
    """The words of a text as a set, to write a list of names briefly."""
    return frozenset(text.split())


def parsed(text: str) -> cst.Module:
    """The syntax tree of a text.

    Raises EditError when it is no Python.
    """
    try:
        return cst.parse_module(text)
    except cst.ParserSyntaxError as e:
        raise EditError(f"the text is no Python: {e.message}") from e


def places_in(module: cst.Module) -> Iterator[SourcePlace]:
    """Every statement of a file, in order, each before those inside it."""
    return _places(module, SourcePlace(module, None, (), 0))


def _places(node: cst.CSTNode, around: SourcePlace) -> Iterator[SourcePlace]:
    if isinstance(node, cst.ClassDef):
        around = replace(around, prefix=f"{around.prefix}{node.name.value}.", owner=node)
    elif isinstance(node, cst.FunctionDef):
        around = replace(around, prefix=f"{around.prefix}{node.name.value}.<locals>.", function=node)
    if isinstance(node, (cst.Module, cst.IndentedBlock)):
        for index, statement in enumerate(node.body):
            yield replace(around, block=node.body, index=index)
            yield from _places(statement, around)
    elif not isinstance(node, (cst.SimpleStatementLine, cst.BaseExpression)):
        for child in node.children:
            yield from _places(child, around)


def find(text: str, parameters: Parameters) -> SourcePlace:
    """The place in the text that a lever's parameters name.

    Raises EditError when it is not there, or there more than once.
    """
    function, code = string(parameters, "function"), string(parameters, "code")
    module = parsed(text)
    found = [
        p
        for p in places_in(module)
        if (p.function is None if function == MODULE else p.scope == function)
        and first_line(module, p.statement) == code
    ]
    if len(found) != 1:
        how = "is not there" if not found else f"stands there {len(found)} times"
        raise EditError(f"'{code}' {how} in {function if function != MODULE else 'the file'}")
    return found[0]


def function_at(module: cst.Module, name: str) -> cst.FunctionDef:
    """The function of this qualified name.

    Raises EditError when it is not there, or there more than once.
    """
    functions = [(p.prefix, p.statement) for p in places_in(module) if isinstance(p.statement, cst.FunctionDef)]
    found = [f for prefix, f in functions if isinstance(f, cst.FunctionDef) and prefix + f.name.value == name]
    if len(found) != 1:
        raise EditError(f"there is no one function '{name}' in the file")
    return found[0]


def first_line(module: cst.Module, statement: cst.CSTNode) -> str:
    """A statement's first line, stripped of spaces and comments before it."""
    bare = statement.with_changes(leading_lines=()) if hasattr(statement, "leading_lines") else statement
    if isinstance(bare, (cst.FunctionDef, cst.ClassDef)):
        bare = bare.with_changes(lines_after_decorators=())
    return module.code_for_node(bare).strip().splitlines()[0].strip()


def code_of(node: cst.CSTNode) -> str:
    """The text of a node, without what is around it."""
    return cst.Module(body=()).code_for_node(node).strip()


def names_in(node: cst.CSTNode | Iterable[cst.CSTNode]) -> set[str]:
    """All bare names that a node reads or writes (no attributes, no keywords of calls)."""
    return {name.value for name in bare_names(node)}


def bare_names(node: cst.CSTNode | Iterable[cst.CSTNode]) -> list[cst.Name]:
    """Every bare name in a node, in order (no attributes, no keywords of calls)."""
    if isinstance(node, cst.Name):
        return [node]
    if isinstance(node, (cst.Attribute, cst.Arg)):
        return bare_names(node.value)
    children = node.children if isinstance(node, cst.CSTNode) else node
    return [name for child in children for name in bare_names(child)]


def nodes_of(kind: type[Node], node: cst.CSTNode) -> list[Node]:
    """All nodes of a class in a node, each before those inside it."""
    return m.findall(node, m.MatchIfTrue(lambda found: isinstance(found, kind)))  # type: ignore[return-value]


def assigned_in(node: cst.CSTNode | Sequence[cst.CSTNode]) -> set[str]:
    """Bare names that a node binds: assignments, counters of loops, names of `with`, imports."""
    found: set[str] = set()
    nodes = [node] if isinstance(node, cst.CSTNode) else node
    for one in nodes:
        for target in m.findall(
            one, m.AssignTarget() | m.AnnAssign() | m.AugAssign() | m.For() | m.AsName() | m.NamedExpr()
        ):
            bound = target.name if isinstance(target, cst.AsName) else target.target  # type: ignore[attr-defined]
            found |= _bound(bound)
    return found


def _bound(target: cst.CSTNode) -> set[str]:
    if isinstance(target, cst.Name):
        return {target.value}
    if isinstance(target, (cst.Tuple, cst.List)):
        return set().union(*(_bound(e.value) for e in target.elements))
    if isinstance(target, cst.StarredElement):
        return _bound(target.value)
    return set()


def statements(template: str, **nodes: cst.CSTNode) -> list[cst.BaseStatement]:
    """Statements from a template, in which `{name}` is replaced by a node."""
    from libcst.helpers import parse_template_module

    return list(parse_template_module(template, **nodes).body)  # type: ignore[arg-type]


def expression(template: str, **nodes: cst.CSTNode) -> cst.BaseExpression:
    """An expression from a template, in which `{name}` is replaced by a node."""
    from libcst.helpers import parse_template_expression

    return parse_template_expression(template, **nodes)  # type: ignore[arg-type]


Change: TypeAlias = "Callable[[Any], cst.CSTNode | Sequence[cst.CSTNode]] | cst.CSTNode | Sequence[cst.CSTNode]"
"""What replaces a node: a node, or statements; or what returns it when it is called with the node whose parts are changed."""


@cache
def _node_changer() -> type[Any]:
    """The class of what changes nodes, made when the first text is changed: libcst takes half a second to import."""

    class NodeChanger(cst.CSTTransformer):
        """Changes nodes (by identity), the inner before the outer; comments above a statement stay above what replaces it."""

        def __init__(self, changes: Mapping[cst.CSTNode, Change]) -> None:
            super().__init__()
            self._changes = {id(old): change for old, change in changes.items()}
            self._nodes = list(changes)  # so that identities stay taken

        def on_leave(
            self, original_node: cst.CSTNode, updated_node: cst.CSTNode
        ) -> Any:  # what a visitor may return is more than its stubs say of one node
            change = self._changes.get(id(original_node))
            if change is None:
                return super().on_leave(original_node, updated_node)
            new = change(updated_node) if callable(change) else change
            if isinstance(new, cst.CSTNode):
                return new
            return cst.FlattenSentinel(_with_lines_of(updated_node, new)) if new else cst.RemoveFromParent()

    return NodeChanger


def _with_lines_of(old: cst.CSTNode, new: Sequence[cst.CSTNode]) -> list[cst.CSTNode]:
    """Statements that replace one: the comments and empty lines above it come above the first of them."""
    lines = getattr(old, "leading_lines", ())
    found = [n.with_changes(leading_lines=()) if n is old and lines else n for n in new]
    if lines and hasattr(found[0], "leading_lines"):
        found[0] = found[0].with_changes(leading_lines=lines)
    return found


def with_changes(node: Node, changes: Mapping[cst.CSTNode, Change]) -> Node:
    """The tree with nodes (by identity) changed, the inner before the outer; comments above a statement stay there."""
    return node.visit(_node_changer()(changes))  # type: ignore[return-value]


def spaced(statement: cst.CSTNode, number: int) -> cst.BaseStatement:
    """The statement with at least so many blank lines above it, and above the comments that belong to it."""
    lines = statement.leading_lines  # type: ignore[attr-defined]
    missing = number - sum(line.comment is None for line in lines)
    blank = [cst.EmptyLine(indent=False)] * max(0, missing)
    return statement.with_changes(leading_lines=[*blank, *lines])  # type: ignore[return-value]


def with_expression(module: Node, old: cst.CSTNode, new: cst.CSTNode) -> Node:
    """The tree with one node (by identity) replaced by another of its kind."""
    return module.deep_replace(old, new)  # type: ignore[return-value]


def with_names(node: Node, names: Mapping[str, str]) -> Node:
    """The node with bare names replaced; attributes and keywords stay."""

    def renamed(name: cst.CSTNode) -> cst.CSTNode:
        return name.with_changes(value=names[cst.ensure_type(name, cst.Name).value])

    return with_changes(node, dict.fromkeys((name for name in bare_names(node) if name.value in names), renamed))


def fresh_name(module: cst.Module, wanted: str, *, taken: Collection[str] = ()) -> str:
    """The wanted name, with one underscore more for each time that it is in use in the file, or taken."""
    return free_name(wanted, names_in(module).union(taken))


def free_name(wanted: str, taken: Collection[str]) -> str:
    """The wanted name, with one underscore more for each time that it is taken."""
    while wanted in taken:
        wanted += "_"
    return wanted


# -- from evidence to a place, and from a place into a run ----------------------------------------------------------------------


def place_parameters(evidence: Evidence, where: Source, *, loop: bool = False) -> Parameters:
    """The statement around a line (or, with `loop`, the innermost loop around it) as a lever's parameters.

    Raises EditError when the file cannot be read any more, or is not one of the script's.
    """
    path = Path(where.file)
    try:
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
    except (OSError, UnicodeDecodeError, SyntaxError) as e:
        raise EditError(f"'{where.file}' cannot be read: {e}") from e
    root = _root(evidence)
    if root is None or not is_editable(path, root, is_installed=where.is_installed):
        raise EditError(f"'{where.file}' is not in the script's project")
    line = where.loops[-1] if loop and where.loops else where.line
    statement = _statement_at(tree, line)
    if statement is None:
        raise EditError(f"'{path.name}' has no statement at line {line}")
    first = text.splitlines()[statement.lineno - 1]
    code = first.encode()[statement.col_offset :].decode()
    return {"file": relpath(path, root), "function": function_name_of(where) or MODULE, "code": code.strip()}


def several_places(places: Iterable[Parameters]) -> Parameters:
    """Places at which one lever changes the text, as its parameters: the first one, and `also` the others."""
    first, *others = {tuple(place.items()): place for place in places if place}.values() or [{}]
    also = tuple(_BETWEEN.join(string(place, part) for part in ("file", "function", "code")) for place in others)
    return first | {"also": also} if also else first


def changed_places(parameters: Parameters) -> Iterator[Parameters]:
    """A lever's parameters for each place at which it changes the text (`several_places`), or for each of its `files`."""
    files, also = parameters.get("files"), parameters.get("also")
    if isinstance(files, tuple):
        yield from (parameters | {"file": file} for file in files)
        return
    yield parameters
    for place in also if isinstance(also, tuple) else ():
        yield parameters | dict(zip(("file", "function", "code"), str(place).split(_BETWEEN, 2), strict=True))


def _statement_at(tree: ast.Module, line: int) -> ast.stmt | None:
    """The innermost statement that covers a line."""
    nodes = (node for node in ast.walk(tree) if isinstance(node, ast.stmt))  # from the outside to the inside
    covering = [s for s in nodes if s.lineno <= line <= (s.end_lineno or s.lineno)]
    return sorted(covering, key=lambda s: s.lineno)[-1] if covering else None


def _root(evidence: Evidence) -> Path | None:
    """The folder of the script that ran, or that a module was run from."""
    command = evidence.workload.command
    if len(command) < 2:
        return None
    if command[1] == "-m":
        return Path(evidence.workload.cwd).resolve()
    script = Path(evidence.workload.cwd, command[1]).resolve()
    return script if script.is_dir() else script.parent


def script_of(evidence: Evidence) -> str | None:
    """The script's own file, relative to the folder that changes of text are relative to; None where that is not known."""
    command = evidence.workload.command
    if command[1:2] != ("-m",):
        return Path(command[1]).name if len(command) > 1 else None
    if len(command) < 3:
        return None
    stem = Path(*command[2].split("."))
    files = (stem.with_name(f"{stem.name}.py"), stem / "__main__.py")
    return next((str(file) for file in files if Path(evidence.workload.cwd, file).is_file()), None)


def project_files(evidence: Evidence) -> Iterator[tuple[str, str]]:
    """The script and what it imports from its own folder, directly or not: relative paths, and texts."""
    root, first = _root(evidence), script_of(evidence)
    waiting, known = [first] if first is not None else [], {first}
    while root is not None and waiting:
        file = waiting.pop(0)
        try:
            text = (root / file).read_text(encoding="utf-8")
            tree = ast.parse(text)
        except (OSError, UnicodeDecodeError, SyntaxError):
            continue
        yield file, text
        for name in _imported_modules(tree, Path(file).parent.parts):
            stem = Path(*name.split("."))
            for found in (f"{stem}.py", str(stem / "__init__.py")):
                if found not in known and (root / found).is_file():
                    waiting.append(found)
                known.add(found)


def _imported_modules(tree: ast.Module, package: Sequence[str]) -> Iterator[str]:
    """Full names that imports of a file may stand for, a member of a package among them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            name = ".".join((*above, *([node.module] if node.module else ())))
            yield from (n for n in (name, *(f"{name}.{a.name}".lstrip(".") for a in node.names)) if n)


def text_at(evidence: Evidence, parameters: Parameters) -> str:
    """The text of the file that the parameters name.

    Raises EditError when it cannot be read.
    """
    root = _root(evidence)
    try:
        return (root or Path()).joinpath(string(parameters, "file")).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise EditError(f"'{parameters['file']}' cannot be read: {e}") from e


def readable_place(evidence: Evidence, where: Source | None, *, loop: bool = False) -> Parameters:
    """The place at a line (`place_parameters`); nothing where there is none, as in a file of somebody else's."""
    try:
        return place_parameters(evidence, where, loop=loop) if where is not None else {}
    except EditError:
        return {}


def editable_place(
    evidence: Evidence, where: Source | None, edit: Edit, *, loop: bool = False, **more: Parameter
) -> Parameters:
    """The place at a line where `edit` is certain of it, with `more` parameters for it; else nothing."""
    place = readable_place(evidence, where, loop=loop)
    with suppress(EditError):
        if place:
            edit(text_at(evidence, place), place | more)
            return place
    return {}


def local_proposals(
    evidence: Evidence,
    findings: Sequence[Finding],
    edit: Edit,
    *,
    else_because: str,
    loops: Sequence[bool] = (False,),
    saved_fraction: tuple[float, float] = (1.0, 1.0),
    cost_fraction: float = 0.0,
) -> Iterator[Candidate]:
    """A candidate for the first line of each finding where the edit is certain.

    The lines are the one that the finding names and those that it names also; edits that come to the same text are proposed once.
    `loops`: what is edited of a line, in the order tried: the innermost loop around it (True), its statement (False).
    `saved_fraction` is the fraction of the finding's seconds that is saved, at least and at most; at most `cost_fraction` of the
    cause's cost, where that is more. Raises LeverRefused where the edit is certain nowhere.
    """
    proposed: set[tuple[str, str]] = set()
    whys: list[str] = []
    for finding in findings:
        tries = [(where, loop) for where in (finding.where, *finding.also) if where is not None for loop in loops]
        for where, loop in tries:
            try:
                parameters = place_parameters(evidence, where, loop=loop)
                changed = (string(parameters, "file"), edit(text_at(evidence, parameters), parameters))
            except EditError as e:
                whys.append(f"line {where.line}: {e}")
                continue
            if changed not in proposed:
                low, high = finding.saved_s
                yield Candidate(
                    parameters=parameters,
                    saved_s=(saved_fraction[0] * low, max(saved_fraction[1] * high, cost_fraction * finding.cost_s)),
                    where=where,
                    because=finding.because,
                )
            proposed.add(changed)
            break
    if not proposed:
        raise LeverRefused(whys[0] if whys else else_because)


def pull(lever: str, hooks: Hooks, parameters: Parameters, edit: Edit) -> None:
    """Make the edit in the text of the file when the script, or what it imports, is compiled; once for a text (`edited_text`)."""

    def change(text: str) -> str:
        changed = edited_text(lever, text, parameters, edit)
        hooks.note(lever)
        return changed

    hooks.at_source(string(parameters, "file"), change)
