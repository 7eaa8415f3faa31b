"""Changing the text of the user's files: a place found again by its function and its first line, statements put in its stead.

A place is kept as parameters of a lever: `file` (relative to the script's folder), `function` (its qualified name, '<module>'
outside of all) and `code` (the first line of the statement, stripped), so that it is found again when lines above it have
changed, and a person can read it. Texts are changed as syntax trees that keep formatting (libcst).
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

import libcst as cst
from libcst import matchers as m

from flatout.errors import EditError
from flatout.records.evidence import Evidence
from flatout.records.finding import Finding
from flatout.records.lever import Candidate, Parameters, Refusal, Seams, string
from flatout.records.workload import Source

Edit = Callable[[str, Parameters], str]
Statement = cst.SimpleStatementLine | cst.BaseCompoundStatement
Node = TypeVar("Node", bound=cst.CSTNode)

MODULE: Final = "<module>"
_INSIDE: Final = (
    ".<locals>.<listcomp>",
    ".<locals>.<genexpr>",
    ".<locals>.<lambda>",
    ".<locals>.<dictcomp>",
    ".<locals>.<setcomp>",
)


@dataclass(frozen=True)
class Place:
    """A statement of a parsed text: `block` holds it at `index`; `function` is None at the top of the file."""

    module: cst.Module
    function: cst.FunctionDef | None
    block: Sequence[cst.BaseStatement | cst.BaseSmallStatement]
    index: int

    @property
    def statement(self) -> cst.BaseStatement:
        """The statement itself."""
        found = self.block[self.index]
        assert isinstance(found, cst.BaseStatement)
        return found


def parsed(text: str) -> cst.Module:
    """The text's syntax tree.

    Raises EditError when it is no Python.
    """
    try:
        return cst.parse_module(text)
    except cst.ParserSyntaxError as e:
        raise EditError(f"the text is no Python: {e.message}") from e


def find(text: str, parameters: Parameters) -> Place:
    """The place that the parameters name.

    Raises EditError when it is not there, or there more than once.
    """
    function, code = string(parameters, "function"), string(parameters, "code")
    module = parsed(text)
    finder = _Finder(module, function, code)
    module.visit(finder)
    if len(finder.found) != 1:
        how = "is not there" if not finder.found else f"stands there {len(finder.found)} times"
        raise EditError(f"'{code}' {how} in {function if function != MODULE else 'the file'}")
    return finder.found[0]


class _Finder(cst.CSTVisitor):
    def __init__(self, module: cst.Module, function: str, code: str) -> None:
        super().__init__()
        self.found: list[Place] = []
        self._module = module
        self._wanted = function
        self._code = code
        self._names: list[str] = []
        self._functions: list[cst.FunctionDef] = []

    def visit_ClassDef(self, node: cst.ClassDef) -> None:
        self._names.append(node.name.value)

    def leave_ClassDef(self, original_node: cst.ClassDef) -> None:
        self._names.pop()

    def visit_FunctionDef(self, node: cst.FunctionDef) -> None:
        self._names += [node.name.value, "<locals>"]
        self._functions.append(node)

    def leave_FunctionDef(self, original_node: cst.FunctionDef) -> None:
        del self._names[-2:]
        self._functions.pop()

    def visit_Module(self, node: cst.Module) -> None:
        self._look(node.body)

    def visit_IndentedBlock(self, node: cst.IndentedBlock) -> None:
        self._look(node.body)

    def _look(self, block: Sequence[cst.BaseStatement]) -> None:
        name = ".".join(self._names[:-1] if self._names and self._names[-1] == "<locals>" else self._names)
        if (name or MODULE) != self._wanted and not (self._wanted == MODULE and not self._functions):
            return
        function = self._functions[-1] if self._functions else None
        for index, statement in enumerate(block):
            if first_line(self._module, statement) == self._code:
                self.found.append(Place(self._module, function, block, index))


def function_of(module: cst.Module, name: str) -> cst.FunctionDef:
    """The function of this qualified name.

    Raises EditError when it is not there, or there more than once.
    """
    finder = _Functions(name)
    module.visit(finder)
    if len(finder.found) != 1:
        raise EditError(f"there is no one function '{name}' in the file")
    return finder.found[0]


class _Functions(cst.CSTVisitor):
    def __init__(self, wanted: str) -> None:
        super().__init__()
        self.found: list[cst.FunctionDef] = []
        self._wanted = wanted
        self._names: list[str] = []

    def visit_ClassDef(self, node: cst.ClassDef) -> None:
        self._names.append(node.name.value)

    def leave_ClassDef(self, original_node: cst.ClassDef) -> None:
        self._names.pop()

    def visit_FunctionDef(self, node: cst.FunctionDef) -> None:
        self._names.append(node.name.value)
        if ".".join(self._names) == self._wanted:
            self.found.append(node)
        self._names.append("<locals>")

    def leave_FunctionDef(self, original_node: cst.FunctionDef) -> None:
        del self._names[-2:]


def first_line(module: cst.Module, statement: cst.CSTNode) -> str:
    """A statement's first line, stripped of spaces and comments before it."""
    bare = statement.with_changes(leading_lines=()) if hasattr(statement, "leading_lines") else statement
    if isinstance(bare, (cst.FunctionDef, cst.ClassDef)):
        bare = bare.with_changes(lines_after_decorators=())
    return module.code_for_node(bare).strip().splitlines()[0].strip()


def code_of(node: cst.CSTNode) -> str:
    """A node's text, alone."""
    return cst.Module(body=()).code_for_node(node).strip()


def names_in(node: cst.CSTNode | Sequence[cst.CSTNode]) -> set[str]:
    """All bare names that a node reads or writes (no attributes, no keywords of calls)."""
    found: set[str] = set()
    for one in [node] if isinstance(node, cst.CSTNode) else node:
        one.visit(_Names(found))
    return found


class _Names(cst.CSTVisitor):
    def __init__(self, found: set[str]) -> None:
        super().__init__()
        self._found = found

    def visit_Attribute(self, node: cst.Attribute) -> bool:
        node.value.visit(self)
        return False

    def visit_Arg(self, node: cst.Arg) -> bool:
        node.value.visit(self)
        return False

    def visit_Name(self, node: cst.Name) -> None:
        self._found.add(node.value)


def assigned_in(node: cst.CSTNode | Sequence[cst.CSTNode]) -> set[str]:
    """Bare names that are bound in a node: assigned to, counted by a loop, named by `with`, imported."""
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
    """Statements of a template; `{name}` in it stands for a node."""
    from libcst.helpers import parse_template_module

    return list(parse_template_module(template, **nodes).body)  # type: ignore[arg-type]


def expression(template: str, **nodes: cst.CSTNode) -> cst.BaseExpression:
    """An expression of a template; `{name}` in it stands for a node."""
    from libcst.helpers import parse_template_expression

    return parse_template_expression(template, **nodes)  # type: ignore[arg-type]


def with_statements(module: cst.Module, changes: Mapping[cst.CSTNode, Sequence[cst.BaseStatement]]) -> cst.Module:
    """The tree with statements (told by identity) replaced by others; the first keeps the comments above the old one."""
    return module.visit(_Replacer(changes))


class _Replacer(cst.CSTTransformer):
    def __init__(self, changes: Mapping[cst.CSTNode, Sequence[cst.BaseStatement]]) -> None:
        super().__init__()
        self._changes = {id(old): new for old, new in changes.items()}
        self._kept = list(changes)  # so that identities stay taken

    def on_leave(  # type: ignore[override]  # statements become several, which libcst's type of one node cannot say
        self, original_node: cst.CSTNode, updated_node: cst.CSTNode
    ) -> cst.CSTNode | cst.FlattenSentinel[cst.CSTNode] | cst.RemovalSentinel:
        if id(original_node) not in self._changes:
            return super().on_leave(original_node, updated_node)
        new = list(self._changes[id(original_node)])
        lines = getattr(original_node, "leading_lines", ())
        if new and lines and hasattr(new[0], "leading_lines"):
            new[0] = new[0].with_changes(leading_lines=lines)
        return cst.FlattenSentinel(new) if new else cst.RemoveFromParent()


def spaced(statement: cst.CSTNode, number: int) -> cst.BaseStatement:
    """The statement with at least so many blank lines above it, and above the comments that belong to it."""
    lines = statement.leading_lines  # type: ignore[attr-defined]
    missing = number - sum(line.comment is None for line in lines)
    blank = [cst.EmptyLine(indent=False)] * max(0, missing)
    return statement.with_changes(leading_lines=[*blank, *lines])  # type: ignore[return-value]


def with_expression(module: Node, old: cst.CSTNode, new: cst.CSTNode) -> Node:
    """The tree with one node (told by identity) replaced by another of its kind."""
    return module.deep_replace(old, new)  # type: ignore[return-value]


def renamed(node: Node, names: Mapping[str, str]) -> Node:
    """The node with bare names replaced; attributes and keywords stay."""
    return node.visit(_Renamer(names))  # type: ignore[return-value]


class _Renamer(cst.CSTTransformer):
    def __init__(self, names: Mapping[str, str]) -> None:
        super().__init__()
        self._names = names

    def visit_Attribute_attr(self, node: cst.Attribute) -> None:
        pass

    def leave_Attribute(self, original_node: cst.Attribute, updated_node: cst.Attribute) -> cst.Attribute:
        return updated_node.with_changes(attr=original_node.attr)

    def leave_Arg(self, original_node: cst.Arg, updated_node: cst.Arg) -> cst.Arg:
        return updated_node.with_changes(keyword=original_node.keyword)

    def leave_Name(self, original_node: cst.Name, updated_node: cst.Name) -> cst.Name:
        new = self._names.get(original_node.value)
        return updated_node.with_changes(value=new) if new else updated_node


def fresh_name(module: cst.Module, wanted: str) -> str:
    """This name, with an underscore more for each time it is taken."""
    taken = names_in(module)
    while wanted in taken:
        wanted += "_"
    return wanted


# -- from evidence to a place, and from a place into a run ----------------------------------------------------------------------


def place_of(evidence: Evidence, where: Source, *, loop: bool = False) -> Parameters:
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
    if root is None or not path.is_relative_to(root):
        raise EditError(f"'{where.file}' is not in the script's folder")
    line = where.loops[-1] if loop and where.loops else where.line
    statement = _statement_at(tree, line)
    if statement is None:
        raise EditError(f"'{path.name}' has no statement at line {line}")
    function = where.function
    for tail in _INSIDE:
        function = function.removesuffix(tail)
    first = text.splitlines()[statement.lineno - 1]
    code = first.encode()[statement.col_offset :].decode()
    return {"file": str(path.relative_to(root)), "function": function or MODULE, "code": code.strip()}


def _statement_at(tree: ast.Module, line: int) -> ast.stmt | None:
    """The innermost statement that covers a line."""
    found: ast.stmt | None = None
    for node in ast.walk(tree):
        if not isinstance(node, ast.stmt) or not node.lineno <= line <= (node.end_lineno or node.lineno):
            continue
        if found is None or node.lineno >= found.lineno:  # walk goes from the outside to the inside
            found = node
    return found


def _root(evidence: Evidence) -> Path | None:
    """The folder of the script that ran."""
    command = evidence.workload.command
    if len(command) < 2:
        return None
    script = Path(evidence.workload.cwd, command[1]).resolve()
    return script if script.is_dir() else script.parent


def text_at(evidence: Evidence, parameters: Parameters) -> str:
    """The text of the file that the parameters name.

    Raises EditError when it cannot be read.
    """
    root = _root(evidence)
    try:
        return (root or Path()).joinpath(string(parameters, "file")).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise EditError(f"'{parameters['file']}' cannot be read: {e}") from e


def offered(
    lever: str,
    evidence: Evidence,
    findings: Sequence[Finding],
    edit: Edit,
    *,
    else_because: str,
    loops: Sequence[bool] = (False,),
    saved_fraction: tuple[float, float] = (1.0, 1.0),
    cost_fraction: float = 0.0,
) -> Iterator[Candidate | Refusal]:
    """A candidate for the first line of each finding where the edit is certain; one refusal where it is nowhere.

    The lines are the one that the finding names and those that it names also; edits that come to the same text are offered once.
    `loops`: what is edited of a line, in the order tried: the innermost loop around it (True), its statement (False).
    `saved_fraction` is what of the promised seconds is saved, at least and at most. Where `cost_fraction` of what the cause
    costs is more, that is the most.
    """
    seen: set[tuple[str, str]] = set()
    whys: list[str] = []
    for finding in findings:
        tries = [(where, loop) for where in (finding.where, *finding.also) if where is not None for loop in loops]
        for where, loop in tries:
            try:
                parameters = place_of(evidence, where, loop=loop)
                changed = (string(parameters, "file"), edit(text_at(evidence, parameters), parameters))
            except EditError as e:
                whys.append(f"line {where.line}: {e}")
                continue
            if changed not in seen:
                low, high = finding.saved_s
                yield Candidate(
                    lever=lever,
                    parameters=parameters,
                    saved_s=(saved_fraction[0] * low, max(saved_fraction[1] * high, cost_fraction * finding.cost_s)),
                    where=where,
                    because=finding.because,
                )
            seen.add(changed)
            break
    if not seen:
        yield Refusal(lever=lever, because=whys[0] if whys else else_because)


def pull(lever: str, seams: Seams, parameters: Parameters, edit: Edit) -> None:
    """Have the edit made to the text of the file when the script, or what it imports, is compiled."""

    def change(text: str) -> str:
        changed = edit(text, parameters)
        seams.note(lever)
        return changed

    seams.at_source(string(parameters, "file"), change)
