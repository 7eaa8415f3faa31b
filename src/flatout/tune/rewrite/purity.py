"""Whether a part of a file can be computed once for many times, by its syntax: no effects, no random numbers, no
writes.

A heuristic about types, strict about what is written down: a call is followed into the functions and methods of the file, and
known by name in libraries; anything else is refused.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

import libcst as cst

from flatout.core.errors import EditError
from flatout.core.runtime.torch_functions import is_in_place, is_random, is_view
from flatout.tune.rewrite.imports import dotted_name, full_name, imported_names
from flatout.tune.rewrite.source import code_of, word_set

_BUILTINS: Final = word_set(
    "abs all any bool bytes chr dict divmod enumerate float frozenset int isinstance len list map max min ord pow "
    "range repr reversed round set slice sorted str sum tuple zip True False None"
)
_LIBRARIES: Final = word_set(
    "torch numpy math cmath itertools functools operator re zlib string collections scipy unicodedata hashlib base64 "
    "binascii struct textwrap einops bisect fractions decimal statistics"
)
_IMPURE: Final = word_set(
    "seed manual_seed default_rng Generator empty empty_like empty_strided new_empty load save savez loadtxt savetxt "
    "fromfile tofile backward step zero_grad grad autograd enable_grad set_grad_enabled set_default_dtype "
    "set_num_threads compile jit distributed write read readline readlines next send close open requires_grad fit "
    "train eval set_printoptions register_buffer register_parameter "
    "add_module apply __setattr__ parameters named_parameters state_dict weight bias data"
)
"""Names of generators, effects, uninitialised memory, and weights that are trained."""
_WRITES: Final = word_set(
    "append extend insert pop remove clear update setdefault popitem add discard sort reverse fill put resize itemset "
    "copyto appendleft popleft extendleft rotate write"
)
_FRESH_METHODS: Final = word_set("clone copy tolist float double half new_zeros new_ones new_full astype repeat")


class Reads(NamedTuple):
    """Names that an expression depends on: in its own scope, attributes of `self`, variables read by functions it
    calls.
    """

    names: frozenset[str]
    attributes: frozenset[str]
    globals: frozenset[str]


class Purity:
    """The functions, classes and variables of one file, to tell what an expression in it depends on."""

    def __init__(self, module: cst.Module) -> None:
        self.tree = ast.parse(module.code)
        self._functions = {n.name: n for n in self.tree.body if isinstance(n, ast.FunctionDef)}
        self._classes = {n.name: n for n in ast.walk(self.tree) if isinstance(n, ast.ClassDef)}
        self._imports = imported_names(self.tree)
        self._inside: list[str] = []

    def reads(self, node: cst.CSTNode, *, owner: str = "", me: str = "self") -> Reads:
        """Names that an expression depends on; `owner` is the class around it and `me` its name for its instance.

        Raises EditError when it may do more than compute.
        """
        scope = _Scope(owner, me)
        self._expression(ast.parse(f"({code_of(node)}\n)", mode="eval").body, scope)
        return Reads(frozenset(scope.names), frozenset(scope.attributes), frozenset(scope.globals))

    def of_function(self, name: str) -> Reads:
        """Names that a function of the file depends on besides its arguments.

        Raises EditError when it may do more than compute.
        """
        scope = _Scope("", "")
        self._function(self._functions[name], scope)
        return Reads(frozenset(), frozenset(), frozenset(scope.globals))

    def function(self, name: str) -> ast.FunctionDef | None:
        """The function of that name at the top of the file."""
        return self._functions.get(name)

    def is_constant(self, name: str) -> bool:
        """Whether a variable of the file is bound once, at its top, and written to nowhere."""
        if self._is_defined(name):
            return True
        outside = [n for n in _outside_functions(self.tree) if isinstance(n, ast.Name) and n.id == name]
        if sum(isinstance(n.ctx, ast.Store) for n in outside) != 1:
            return False
        if any(isinstance(n, ast.Global) and name in n.names for n in ast.walk(self.tree)):
            return False
        return name not in {w.partition(".")[0] for w in written(self.tree)}

    def _is_defined(self, name: str) -> bool:
        return any(name in known for known in (self._functions, self._classes, self._imports, _BUILTINS))

    # -- expressions ------------------------------------------------------------------------------------------------------

    def _expression(self, node: ast.expr, scope: _Scope) -> None:
        if isinstance(node, (ast.Lambda, ast.Await, ast.Yield, ast.YieldFrom, ast.NamedExpr)):
            raise EditError(f"'{ast.unparse(node)}' may do more than compute")
        if isinstance(node, ast.Call):
            self._call(node, scope)
        elif isinstance(node, ast.Attribute):
            self._attribute(node, scope)
        elif isinstance(node, ast.Name):
            self._name(node.id, scope)
        elif isinstance(node, (ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp)):
            inner = replace(scope, locals=scope.locals | _bound(g.target for g in node.generators))
            for child in ast.iter_child_nodes(node):
                if isinstance(child, ast.comprehension):
                    self._expression(child.iter, inner)
                    for test in child.ifs:
                        self._expression(test, inner)
                elif isinstance(child, ast.expr):
                    self._expression(child, inner)
        else:
            for child in ast.iter_child_nodes(node):
                if isinstance(child, ast.expr):
                    self._expression(child, scope)

    def _name(self, name: str, scope: _Scope) -> None:
        if name in scope.locals or self._is_defined(name):
            return
        (scope.globals if scope.is_in_function else scope.names).add(name)

    def _attribute(self, node: ast.Attribute, scope: _Scope) -> None:
        if isinstance(node.value, ast.Name) and scope.me and node.value.id == scope.me:
            method = self._method(scope.owner, node.attr)
            if method is not None:
                if not any(isinstance(d, ast.Name) and d.id == "property" for d in method.decorator_list):
                    raise EditError(f"the method '{node.attr}' is handed on")
                self._function(method, scope)
            else:
                scope.attributes.add(node.attr)
            return
        if node.attr in _IMPURE or is_random(node.attr):
            raise EditError(f"'{ast.unparse(node)}' may change")
        self._expression(node.value, scope)

    def _call(self, node: ast.Call, scope: _Scope) -> None:
        for argument in (*node.args, *(k.value for k in node.keywords)):
            self._expression(argument.value if isinstance(argument, ast.Starred) else argument, scope)
        if any(k.arg in ("out", "generator", "inplace", "requires_grad") for k in node.keywords):
            raise EditError(f"'{ast.unparse(node)}' may do more than compute")
        full = self._full(node.func)
        if full:
            _check_library(full)
        elif isinstance(node.func, ast.Name):
            self._call_of_name(node.func.id, scope)
        elif isinstance(node.func, ast.Attribute):
            self._call_of_method(node.func, scope)
        else:
            raise EditError(f"'{ast.unparse(node.func)}' cannot be analysed")

    def _call_of_name(self, name: str, scope: _Scope) -> None:
        if name in self._functions and name not in scope.locals:
            self._function(self._functions[name], scope)
        elif name not in _BUILTINS or name in scope.locals:
            raise EditError(f"'{name}' cannot be analysed")

    def _call_of_method(self, node: ast.Attribute, scope: _Scope) -> None:
        if isinstance(node.value, ast.Name) and scope.me and node.value.id == scope.me:
            method = self._method(scope.owner, node.attr)
            if method is None:
                raise EditError(f"'{scope.me}.{node.attr}' is called, whose weights may be trained")
            self._function(method, scope)
            return
        is_fresh = _is_fresh(node.value) or (isinstance(node.value, ast.Name) and node.value.id in scope.fresh)
        if (is_in_place(node.attr) or node.attr in _WRITES) and not is_fresh:
            raise EditError(f"'{ast.unparse(node)}' writes to what it is called on")
        if _is_impure(node.attr):
            raise EditError(f"'{ast.unparse(node)}' may do more than compute")
        self._expression(node.value, scope)

    def _full(self, node: ast.expr) -> str:
        """What a callee is called by the file's imports; '' where it is not imported."""
        return full_name(self._imports, dotted_name(node))

    def _method(self, owner: str, name: str) -> ast.FunctionDef | None:
        cls = self._classes.get(owner)
        found = [n for n in cls.body if isinstance(n, ast.FunctionDef) and n.name == name] if cls is not None else []
        return found[0] if len(found) == 1 else None

    # -- functions --------------------------------------------------------------------------------------------------------

    def _function(self, function: ast.FunctionDef, outer: _Scope) -> None:
        if function.name in self._inside:
            return
        for decorator in function.decorator_list:
            if ast.unparse(decorator) not in ("property", "staticmethod", "torch.no_grad()"):
                raise EditError(f"'{function.name}' is decorated")
        parameters = [a.arg for a in _arguments(function.args)]
        is_static = any(ast.unparse(d) == "staticmethod" for d in function.decorator_list)
        is_method = bool(outer.owner) and self._method(outer.owner, function.name) is function and not is_static
        scope = replace(
            outer,
            me=parameters[0] if is_method and parameters else "",
            is_in_function=True,
            locals=set(parameters) | _bound([function]),
            fresh=_fresh_names(function) - set(parameters),
        )
        self._inside.append(function.name)
        try:
            self._body(function.body, scope)
        finally:
            self._inside.pop()

    def _body(self, statements: Iterable[ast.stmt], scope: _Scope) -> None:
        for statement in statements:
            self._statement(statement, scope)

    def _statement(self, node: ast.stmt, scope: _Scope) -> None:
        if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                self._target(target, scope, is_updated=isinstance(node, ast.AugAssign))
            if node.value is not None:
                self._expression(node.value, scope)
        elif isinstance(node, (ast.Expr, ast.Return)):
            if node.value is not None:
                self._expression(node.value, scope)
        elif isinstance(node, (ast.For, ast.While, ast.If)):
            self._expression(node.iter if isinstance(node, ast.For) else node.test, scope)
            if isinstance(node, ast.For):
                self._target(node.target, scope, is_updated=False)
            self._body([*node.body, *node.orelse], scope)
        elif not isinstance(node, (ast.Pass, ast.Break, ast.Continue, ast.Assert, ast.Raise)):
            raise EditError(f"'{ast.unparse(node).splitlines()[0]}' may do more than compute")

    def _target(self, node: ast.expr, scope: _Scope, *, is_updated: bool) -> None:
        if isinstance(node, (ast.Tuple, ast.List)):
            for element in node.elts:
                self._target(element, scope, is_updated=is_updated)
        elif isinstance(node, ast.Name):
            if is_updated and node.id not in scope.fresh:
                raise EditError(f"'{node.id}' is written to, which may be the caller's")
        else:
            base = node.value if isinstance(node, (ast.Subscript, ast.Attribute, ast.Starred)) else node
            if not isinstance(base, ast.Name) or base.id not in scope.fresh:
                raise EditError(f"'{ast.unparse(node)}' is written to")


@dataclass(frozen=True)
class _Scope:
    """Where an expression is, and what was found out about it; scopes inside one another collect the same findings."""

    owner: str
    me: str
    is_in_function: bool = False
    locals: set[str] = field(default_factory=set)
    fresh: set[str] = field(default_factory=set)
    names: set[str] = field(default_factory=set)
    attributes: set[str] = field(default_factory=set)
    globals: set[str] = field(default_factory=set)


def written(tree: ast.AST) -> set[str]:
    """Dotted names of objects written to in place: `x` for `x[0] = 1`, `x += 1`, `x.add_(1)`, `out=x`; `m.x` for `m.x =
    1`.
    """
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign)):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                for part in target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target]:
                    if not isinstance(part, ast.Name) or isinstance(node, ast.AugAssign):
                        found.add(_dotted(part))
        elif isinstance(node, ast.Delete):
            found |= {_dotted(target) for target in node.targets}
        elif isinstance(node, ast.Call):
            if isinstance(node.func, ast.Attribute) and (is_in_place(node.func.attr) or node.func.attr in _WRITES):
                found.add(_dotted(node.func.value))
            found |= {_dotted(k.value) for k in node.keywords if k.arg == "out"}
    return found - {""}


def _dotted(node: ast.expr) -> str:
    """The text 'a.b' of `a.b[0]` and `a.b`; '' where there is no name at the root."""
    while isinstance(node, (ast.Subscript, ast.Starred)):
        node = node.value
    if isinstance(node, ast.Attribute):
        outer = _dotted(node.value)
        return f"{outer}.{node.attr}" if outer else ""
    return node.id if isinstance(node, ast.Name) else ""


def _check_library(full: str) -> None:
    parts = full.split(".")
    if parts[0] not in _LIBRARIES:
        raise EditError(f"'{full}' cannot be analysed")
    if any(map(_is_impure, parts)) or is_in_place(parts[-1]) or parts[:2] == ["torch", "cuda"]:
        raise EditError(f"'{full}' may do more than compute")
    if parts[0] == "torch" and parts[-1][:1].isupper():
        raise EditError(f"'{full}' makes an object")


def _is_impure(name: str) -> bool:
    return name in _IMPURE or name.startswith("rand") or is_random(name)


def _is_fresh(node: ast.expr) -> bool:
    """Whether what an expression gives is nobody else's: memory of its own."""
    if isinstance(
        node, (ast.BinOp, ast.Constant, ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
    ):
        return True
    if not isinstance(node, ast.Call):
        return False
    if isinstance(node.func, ast.Name):
        return True
    if not isinstance(node.func, ast.Attribute):
        return False
    root = node.func
    while isinstance(root.value, ast.Attribute):
        root = root.value
    is_library = isinstance(root.value, ast.Name) and root.value.id in ("torch", "np", "numpy", "F", "math")
    if is_library:
        return not is_view(node.func.attr)
    return node.func.attr in _FRESH_METHODS or (is_in_place(node.func.attr) and _is_fresh(node.func.value))


def _fresh_names(function: ast.FunctionDef) -> set[str]:
    """Local names that only ever stand for what the function itself has made."""
    fresh: set[str] = set()
    other: set[str] = set()
    for node in ast.walk(function):
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                is_new = isinstance(target, ast.Name) and node.value is not None and _is_fresh(node.value)
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    is_new = all(map(_is_fresh, node.value.elts))
                names = _bound([target])
                fresh |= names if is_new else set()
                other |= set() if is_new else names
        elif isinstance(node, ast.For):
            other |= _bound([node.target])
    return fresh - other


def _bound(targets: Iterable[ast.AST]) -> set[str]:
    return {n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}


def _arguments(arguments: ast.arguments) -> Iterator[ast.arg]:
    yield from (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
    yield from (a for a in (arguments.vararg, arguments.kwarg) if a is not None)


def _outside_functions(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            yield from _outside_functions(child)
