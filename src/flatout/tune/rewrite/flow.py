"""Data flow along the statements of one block, so that a formula written over several lines is read as one.

A formula is matched as Python's own syntax tree: a name is followed to what was assigned to it; an operator, a function of torch
and a method of a tensor are one `Operation`. What a match replaces are whole statements before the last one, and one expression
in that.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from textwrap import dedent
from typing import Final, NamedTuple, TypeGuard

import libcst as cst
from libcst import matchers as m

from flatout.core.errors import EditError
from flatout.core.records.lever import Parameters, string
from flatout.core.runtime.torch_functions import is_in_place
from flatout.tune.rewrite.imports import call_name, dotted_name, full_name, imported_names, with_import
from flatout.tune.rewrite.source import MODULE, SourcePlace, code_of, find, with_changes, word_set

_WIDTHS: Final = (88, 120)
"""Statements that would get longer than the file's longest line, which counts within these bounds, are put on several lines."""
_OPERATORS: Final[Mapping[type, str]] = {
    ast.MatMult: "matmul",
    ast.Mult: "mul",
    ast.Div: "div",
    ast.Add: "add",
    ast.Sub: "sub",
    ast.Pow: "pow",
    ast.Invert: "logical_not",
    ast.USub: "neg",
    ast.Eq: "eq",
    ast.NotEq: "ne",
    ast.Gt: "gt",
}
_PURE: Final = word_set(
    "size dim view to bool unsqueeze transpose expand masked_fill float mean pow var std sqrt rsqrt"
)
"""Methods of tensors whose call can be left out when nobody uses the result."""
_DTYPES: Final = word_set("float32 float16 bfloat16 float64 float half double")
_CASTS: Final = word_set("float half bfloat16 type_as contiguous clone")


class Operation(NamedTuple):
    """A function of torch, a method of a tensor or an operator, by its bare name; `args` begin with the tensor."""

    name: str
    args: tuple[ast.expr, ...]
    options: dict[str, ast.expr]

    def option(self, name: str, place: int) -> ast.expr | None:
        """An argument of the operation, by its name or its position."""
        if name in self.options:
            return self.options[name]
        return self.args[place] if place < len(self.args) else None


class Expression(NamedTuple):
    """An expression and the statement of the block in which it is read."""

    node: ast.expr
    at: int


class Flow:
    """The block around a place, with the function, class and file around it."""

    def __init__(self, text: str, parameters: Parameters) -> None:
        self.place: SourcePlace = find(text, parameters)
        self.at = self.place.index
        self.module = self.place.module
        self.texts = [dedent(_bare(s)) for s in self.place.block]
        self.trees: list[ast.stmt] = [ast.parse(t).body[0] for t in self.texts]
        self._tree = ast.parse(text)
        path = string(parameters, "function").split(".")
        self._kind = _class_at(self._tree, path)
        function = self.place.function
        self.scope: ast.AST = ast.parse(code_of(function)) if function is not None else self._tree
        self.is_inside_loop = any(isinstance(n, (ast.For, ast.While)) for n in ast.walk(self.scope)) or function is None
        self._imports = imported_names(self._tree)

    # -- reading ----------------------------------------------------------------------------------------------------------

    def expressions(self) -> Iterator[Expression]:
        """Every expression of the block's plain statements, the outer before the inner."""
        for index, tree in enumerate(self.trees):
            if not isinstance(tree, (*_COMPOUND, ast.FunctionDef, ast.ClassDef)):
                yield from (Expression(node, index) for node in ast.walk(tree) if isinstance(node, ast.expr))

    def operation(self, node: ast.expr) -> Operation | None:
        """The node as an operation on tensors; None for anything else."""
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            return Operation(_OPERATORS[type(node.op)], (node.left, node.right), {})
        if isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATORS:
            return Operation(_OPERATORS[type(node.op)], (node.operand,), {})
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _OPERATORS:
            return Operation(_OPERATORS[type(node.ops[0])], (node.left, node.comparators[0]), {})
        if isinstance(node, ast.Attribute) and node.attr in ("mT", "values"):
            return Operation(node.attr, (node.value,), {})
        if not isinstance(node, ast.Call) or any(isinstance(a, ast.Starred) for a in node.args):
            return None
        options = {k.arg: k.value for k in node.keywords if k.arg}
        full = self.full_name(node.func)
        if full.startswith("torch."):
            return Operation(full.rpartition(".")[2].removesuffix("_"), tuple(node.args), options)
        layer = self.layer(node.func)
        if layer is not None:
            return Operation(layer[0], tuple(node.args), layer[1])
        if isinstance(node.func, ast.Attribute) and not full:
            return Operation(node.func.attr.removesuffix("_"), (node.func.value, *node.args), options)
        return None

    def full_name(self, node: ast.expr) -> str:
        """The full name of a dotted name, by the file's imports."""
        full = full_name(self._imports, dotted_name(node))
        return "" if full.startswith(".") else full

    def layer(self, node: ast.expr) -> tuple[str, dict[str, ast.expr]] | None:
        """Name and options of softmax or dropout as a module: `self.softmax`, constructed once in the class."""
        constructor = node if isinstance(node, ast.Call) else self.attribute(node)
        full = self.full_name(constructor.func) if isinstance(constructor, ast.Call) else ""
        if isinstance(constructor, ast.Call) and full in ("torch.nn.Softmax", "torch.nn.Dropout"):
            options = {k.arg: k.value for k in constructor.keywords if k.arg}
            if constructor.args:
                options["dim" if full.endswith("Softmax") else "p"] = constructor.args[0]
            return (f"{full.rpartition('.')[2]}()", options | {"module": node})
        return None

    def attribute(self, node: ast.expr) -> ast.expr | None:
        """The value that the class assigns to `self.name`, as an attribute or a buffer; None when there is not exactly
        one.
        """
        if self._kind is None or not isinstance(node, ast.Attribute) or dotted_name(node.value) != "self":
            return None
        found: list[ast.expr | None] = []
        for one in ast.walk(self._kind):
            if isinstance(one, ast.Assign) and any(_is_self(t, node.attr) for t in one.targets):
                found.append(one.value)
            elif isinstance(one, (ast.AugAssign, ast.AnnAssign)) and _is_self(one.target, node.attr):
                found.append(one.value if isinstance(one, ast.AnnAssign) else None)
            elif isinstance(one, ast.Call) and dotted_name(one.func) == "self.register_buffer" and len(one.args) > 1:
                name = one.args[0]
                if isinstance(name, ast.Constant) and name.value == node.attr:
                    found.append(one.args[1])
        return found[0] if len(found) == 1 else None

    def linear(self, node: ast.AST) -> ast.Call | None:
        """How the class constructs the nn.Linear that this expression calls with one argument; None for anything else."""
        is_call = isinstance(node, ast.Call) and len(node.args) == 1 and not node.keywords
        constructor = self.attribute(node.func) if is_call and isinstance(node, ast.Call) else None
        is_it = isinstance(constructor, ast.Call) and self.full_name(constructor.func) == "torch.nn.Linear"
        return constructor if is_it and isinstance(constructor, ast.Call) else None

    def own_class(self, node: ast.expr) -> ast.ClassDef | None:
        """The class of this file of which the class constructs `self.name`; None for anything else."""
        constructor = self.attribute(node)
        name = (
            constructor.func.id if isinstance(constructor, ast.Call) and isinstance(constructor.func, ast.Name) else ""
        )
        found = [s for s in self._tree.body if isinstance(s, ast.ClassDef) and s.name == name]
        return found[0] if len(found) == 1 else None

    def written(self, expr: Expression) -> Expression | None:
        """The value that was assigned to a name last before it is read, in the block; None where that is not one
        assignment.
        """
        if not isinstance(expr.node, ast.Name):
            return None
        for index in range(expr.at - 1, -1, -1):
            if expr.node.id in bound_in(self.trees[index]):
                value = _assigned(self.trees[index], expr.node.id)
                return Expression(value, index) if value is not None else None
        return None

    def value(self, expr: Expression) -> ast.expr | None:
        """The value of a name or of `self.name`, wherever in the function, the class or the file it is assigned, once."""
        here = self.written(expr)
        if here is not None:
            return here.node
        if isinstance(expr.node, ast.Attribute):
            return self.attribute(expr.node)
        if not isinstance(expr.node, ast.Name):
            return None
        for scope in (self.scope, ast.Module(body=self._tree.body, type_ignores=[])):
            own = [s for s in _statements(scope) if expr.node.id in bound_in(s) and not isinstance(s, _COMPOUND)]
            if own:
                return _assigned(own[0], expr.node.id) if len(own) == 1 else None
            if expr.node.id in _arguments(scope):
                return None
        return None

    def same(self, one: Expression, two: Expression) -> bool:
        """Whether both stand for one value: the same text, of names that were not assigned to in between."""
        if ast.dump(one.node) != ast.dump(two.node):
            return False
        first, last = sorted((one.at, two.at))
        return not any(bound_in(t) & read_in(one.node) for t in self.trees[first:last])

    def text(self, expr: Expression) -> str:
        """The expression's text as it is in the file."""
        return ast.get_source_segment(self.texts[expr.at], expr.node) or ast.unparse(expr.node)

    # -- changing ---------------------------------------------------------------------------------------------------------

    def replaced(self, last: Expression, new: str, *, removed: set[int], reused: Sequence[Expression]) -> cst.Module:
        """The file with `new` in place of the expression `last`, without the statements `removed`, which led to it.

        `reused` are the parts that `new` takes over from them. Raises EditError when something else needs what is removed, or
        a part has changed by then.
        """
        for part in reused:
            between = range(part.at, last.at)
            changed = [
                n for i in between if i not in removed for n in bound_in(self.trees[i]) if n in read_in(part.node)
            ]
            if changed:
                raise EditError(f"'{changed[0]}' is assigned again before the end of the formula")
        for index in sorted(removed):
            self._check_unread(index, last, removed)
        removed = removed | self._idle(last, new, removed)
        block = self.place.block
        first = block[min((*removed, last.at))]
        statement = cst.parse_statement(self.with_segment(last, new))
        statement = statement.with_changes(leading_lines=getattr(first, "leading_lines", ()))
        changes: dict[cst.CSTNode, Sequence[cst.BaseStatement]] = {block[i]: () for i in removed}
        changes[block[last.at]] = [statement]
        return with_changes(self.module, changes)

    def _idle(self, last: Expression, new: str, removed: set[int]) -> set[int]:
        """Statements that only made something for those which are removed."""
        found: set[int] = set()
        for index in range(last.at - 1, -1, -1):
            tree = self.trees[index]
            gone = removed | found
            read = set().union(*(read_in(self.trees[i]) for i in gone), read_in(last.node))
            if index in gone or not isinstance(tree, ast.Assign) or not self._is_pure(tree.value):
                continue
            names = bound_in(tree)
            if not isinstance(tree.targets[0], ast.Name) or not names <= read or names & read_in(ast.parse(new)):
                continue
            try:
                self._check_unread(index, last, gone | {index})
            except EditError:
                continue
            found.add(index)
        return found

    def _is_pure(self, node: ast.expr) -> bool:
        calls = [n for n in ast.walk(node) if isinstance(n, ast.Call)]
        return all(
            self.full_name(c.func).startswith(("torch.", "math."))
            or (isinstance(c.func, ast.Attribute) and c.func.attr in _PURE)
            or dotted_name(c.func) == "float"
            for c in calls
        )

    def with_segment(self, last: Expression, new: str) -> str:
        """The text of a statement with one of its expressions replaced, on several lines where it would get too long."""
        whole = rewritten(self, [(last, new)])
        longest = max(map(len, self.module.code.splitlines()))
        indent = 8 if self.place.function is not None else 0
        if max(map(len, whole.splitlines())) + indent > min(max(longest, _WIDTHS[0]), _WIDTHS[1]):
            return rewritten(self, [(last, _on_lines(new))])
        return whole

    def _check_unread(self, index: int, last: Expression, removed: set[int]) -> None:
        """Raise EditError when a name that this statement binds is read by anything that stays."""
        for name in bound_in(self.trees[index]):
            inside = 0
            for other, tree in enumerate(self.trees):
                reads = [n for n in ast.walk(tree) if _reads(n, name)]
                inside += len(reads)
                gone = other in removed
                if gone or not reads:
                    continue
                if other == last.at:
                    inner = {id(n) for n in ast.walk(last.node)}
                    if all(id(n) in inner for n in reads):
                        continue
                if self._reaches(index, other, name):
                    raise EditError(f"'{name}' is used besides: {self.texts[other].splitlines()[0].strip()}")
            if inside != sum(_reads(n, name) for n in ast.walk(self.scope)):
                raise EditError(f"'{name}' is used outside of this block")

    def _reaches(self, index: int, other: int, name: str) -> bool:
        """Whether what `index` binds can be what `other` reads."""
        if other > index:
            between = self.trees[index + 1 : other]
            return not any(name in bound_in(t) and not isinstance(t, _COMPOUND) for t in between)
        before = any(name in bound_in(t) and not isinstance(t, _COMPOUND) for t in self.trees[:other])
        return self.is_inside_loop and not before


_COMPOUND: Final = (ast.If, ast.For, ast.While, ast.With, ast.Try)


def without_casts(flow: Flow, expr: Expression) -> Expression:
    """The tensor before changes of its precision and its layout in memory."""
    while True:
        operation = flow.operation(expr.node)
        is_cast = operation is not None and (
            operation.name in _CASTS or (operation.name in ("to", "type") and _is_dtype(flow, operation))
        )
        if operation is None or not is_cast or not operation.args:
            return expr
        expr = Expression(operation.args[0], expr.at)


def _is_dtype(flow: Flow, operation: Operation) -> bool:
    operands = [*operation.args[1:], *operation.options.values()]
    if len(operands) == 1 and isinstance(operands[0], ast.Name):
        operands = [flow.value(Expression(operands[0], len(flow.trees))) or operands[0]]
    return len(operands) == 1 and (
        (isinstance(operands[0], ast.Attribute) and operands[0].attr == "dtype")
        or flow.full_name(operands[0]).removeprefix("torch.") in _DTYPES
    )


def written_number(node: ast.expr | None) -> float | None:
    """The value of a number that is written out, with its sign; None for anything else."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = written_number(node.operand)
        return None if value is None else -value
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)) and not isinstance(node.value, bool):
        return float(node.value)
    return None


def is_written_number(node: ast.expr | None) -> TypeGuard[ast.expr]:
    """Whether a node is a number that is written out."""
    return written_number(node) is not None


def written_numbers(node: ast.expr | None) -> tuple[float, ...]:
    """Numbers that are written out, one or a tuple or list of them; () for anything else."""
    if isinstance(node, (ast.Tuple, ast.List)):
        values = [written_number(e) for e in node.elts]
        return tuple(v for v in values if v is not None) if None not in values else ()
    value = written_number(node)
    return () if value is None else (value,)


def bound_in(tree: ast.AST) -> set[str]:
    """Bare names that a statement binds, changes in place, or deletes."""
    found = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)}
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Call)
            and isinstance(node.value.func, ast.Attribute)
        ):
            owner = node.value.func.value
            if is_in_place(node.value.func.attr) and isinstance(owner, ast.Name):
                found.add(owner.id)
        if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load) and isinstance(node.value, ast.Name):
            found.add(node.value.id)
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
    return found


def read_in(tree: ast.AST) -> set[str]:
    """Bare names that a node reads."""
    return {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}


def has_bias(constructor: ast.Call) -> bool:
    """Whether a call of `nn.Linear(...)` constructs a bias.

    Raises EditError where its arguments do not tell.
    """
    bias = next(
        (k.value for k in constructor.keywords if k.arg == "bias"),
        constructor.args[2] if len(constructor.args) > 2 else None,
    )
    if bias is not None and not isinstance(bias, ast.Constant):
        raise EditError(f"whether the layer has a bias depends on '{ast.unparse(bias)}'")
    return bias is None or bool(bias.value)


def functional(module: cst.Module) -> tuple[cst.Module, str]:
    """The file with torch.nn.functional imported, and its name there."""
    for name in ("F", "functional", "nn.functional", "torch.nn.functional"):
        if call_name(module, cst.parse_expression(name)) == "torch.nn.functional":
            return module, name
    if m.findall(module, m.Name("F")):
        return with_import(module, "torch"), "torch.nn.functional"
    return with_import(module, "torch.nn.functional", alias="F"), "F"


def _reads(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, (ast.Load, ast.Del))


def _assigned(tree: ast.stmt, name: str) -> ast.expr | None:
    """What a statement makes of one name; of `if t: x = a` it is `a if t else x`."""
    if isinstance(tree, ast.Assign) and len(tree.targets) == 1 and dotted_name(tree.targets[0]) == name:
        return tree.value
    if isinstance(tree, ast.AnnAssign) and dotted_name(tree.target) == name:
        return tree.value
    if isinstance(tree, ast.AugAssign) and dotted_name(tree.target) == name:
        return ast.BinOp(left=ast.Name(id=name, ctx=ast.Load()), op=tree.op, right=tree.value)
    if isinstance(tree, ast.Expr) and isinstance(tree.value, ast.Call):
        return tree.value
    if isinstance(tree, ast.If) and len(tree.orelse) <= 1:
        body, known = _assigned(tree.body[-1], name), {name}
        for before in reversed(tree.body[:-1]):
            target = before.targets[0] if isinstance(before, ast.Assign) and len(before.targets) == 1 else None
            if not isinstance(target, ast.Name) or target.id in known or body is None:
                return None
            assert isinstance(before, ast.Assign)
            replaced = _With(target.id, before.value).visit(deepcopy(body))
            body = replaced if isinstance(replaced, ast.expr) else None
            known.add(target.id)
        other = _assigned(tree.orelse[0], name) if tree.orelse else ast.Name(id=name, ctx=ast.Load())
        if body is not None and other is not None and bound_in(tree) == known:
            return ast.IfExp(test=tree.test, body=body, orelse=other)
    return None


class _With(ast.NodeTransformer):
    """Puts an expression for a name; what holds it has no place in the text any more."""

    def __init__(self, name: str, value: ast.expr) -> None:
        self._name = name
        self._value = value

    def visit(self, node: ast.AST) -> ast.AST:
        if _reads(node, self._name):
            return self._value
        has_it = any(_reads(n, self._name) for n in ast.walk(node))
        changed: ast.AST = self.generic_visit(node)
        if has_it and hasattr(changed, "lineno"):
            del changed.lineno
        return changed


def _class_at(tree: ast.Module, path: Sequence[str]) -> ast.ClassDef | None:
    """The class whose method has this qualified name."""
    if path == [MODULE] or len(path) < 2:
        return None
    body: Sequence[ast.stmt] = tree.body
    found: ast.ClassDef | None = None
    for name in path[:-1]:
        found = next((s for s in body if isinstance(s, ast.ClassDef) and s.name == name), None)
        if found is None:
            return None
        body = found.body
    return found


def _statements(scope: ast.AST) -> Iterator[ast.stmt]:
    """Statements of a scope, those of functions and classes inside left out."""
    todo = list(scope.body) if isinstance(scope, ast.Module) else []
    if len(todo) == 1 and isinstance(todo[0], (ast.FunctionDef, ast.AsyncFunctionDef)):
        todo = list(todo[0].body)
    while todo:
        statement = todo.pop()
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        yield statement
        for field in ("body", "orelse", "finalbody"):
            todo += getattr(statement, field, [])


def _arguments(scope: ast.AST) -> set[str]:
    body = scope.body if isinstance(scope, ast.Module) else []
    if len(body) == 1 and isinstance(body[0], ast.FunctionDef):
        arguments = body[0].args
        return {a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
    return set()


def _is_self(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == name and dotted_name(node.value) == "self"


def _bare(statement: cst.BaseStatement) -> str:
    bare = statement.with_changes(leading_lines=()) if getattr(statement, "leading_lines", None) else statement
    assert isinstance(bare, (cst.SimpleStatementLine, cst.BaseCompoundStatement))
    return cst.Module(body=(bare,)).code


def rewritten(flow: Flow, parts: Sequence[tuple[Expression, str]]) -> str:
    """The text of one statement with some of its parts replaced."""
    index = parts[0][0].at
    text = flow.texts[index]
    lines = text.splitlines(keepends=True)
    starts = [sum(len(line.encode()) for line in lines[:n]) for n in range(len(lines) + 1)]
    for expr, new in sorted(parts, key=lambda p: (p[0].node.lineno, p[0].node.col_offset), reverse=True):
        node, raw = expr.node, text.encode()
        assert node.end_lineno is not None and node.end_col_offset is not None and expr.at == index
        begin = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset
        before, after = _without_parentheses(raw[:begin].decode(), raw[end:].decode())
        text = f"{before}{new}{after}"
    return text if text.endswith("\n") else text + "\n"


def _without_parentheses(before: str, after: str) -> tuple[str, str]:
    """The texts before and after an expression without a pair of parentheses right around it, where it is no call's."""
    is_pair = before.endswith("(") and after.startswith(")")
    if is_pair and not (before[:-1][-1:].isalnum() or before[:-1][-1:] in ("_", ")", "]")):
        return before[:-1], after[1:]
    return before, after


def _on_lines(call: str) -> str:
    """A call with each argument on a line of its own."""
    tree = ast.parse(call, mode="eval").body
    outer = tree
    while (
        isinstance(outer, ast.Call) and isinstance(outer.func, ast.Attribute) and isinstance(outer.func.value, ast.Call)
    ):
        outer = outer.func.value
    if not isinstance(outer, ast.Call):
        return call
    name = ast.get_source_segment(call, outer.func) or ""
    whole = ast.get_source_segment(call, outer) or ""
    arguments = [ast.get_source_segment(call, a) or "" for a in outer.args]
    arguments += [f"{k.arg}={ast.get_source_segment(call, k.value)}" for k in outer.keywords]
    inside = "".join(f"    {a},\n" for a in arguments)
    return call.replace(whole, f"{name}(\n{inside})", 1)
