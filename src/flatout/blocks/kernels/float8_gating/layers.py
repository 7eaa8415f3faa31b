"""Gated MLPs whose layers torchao multiplies in float8, run as one: found by the text of their forward.

torchao's layers stay where they are, with their parameters; what is changed is how the module that holds the three is called.
"""

from __future__ import annotations

import ast
import inspect
import math
import textwrap
from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatout.blocks.kernels.float8_gating.call import float8_gated_mlp
from flatout.blocks.kernels.float8_gating.triton import HALVES
from flatout.blocks.training.float8 import MULTIPLE
from flatout.core.runtime.patches import Undo, replace_forward

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class GatedNames(NamedTuple):
    """The names of a gated MLP's three layers in it."""

    gate: str
    up: str
    down: str


class GatedMlps(NamedTuple):
    """Modules that are run as one, by path, and what has them run layer by layer again."""

    paths: tuple[str, ...]
    undo: Undo


def run_gated_as_one(model: nn.Module) -> GatedMlps:
    """Run each gated MLP of three layers that torchao multiplies in float8, one scale a tensor, by one function; in place.

    Left alone is a module whose forward does more or other than `down(silu(gate(x)) * up(x))`, whose layers have biases, or one
    with hooks on it or on them. Copies of a module that is run so run layer by layer, and so do calls in float32 and with numbers
    of rows that float8 products do not take.
    """
    undos: dict[str, Undo] = {}
    for path, module in model.named_modules():
        names = gated_names(module)
        if names is not None and all(_is_plain_float8(module.get_submodule(name)) for name in names):
            undos[path] = replace_forward(module, partial(_forward, module, names))

    def undo() -> None:
        for one in undos.values():
            one()

    return GatedMlps(tuple(undos), undo)


def gated_names(module: nn.Module) -> GatedNames | None:
    """The layers of a module whose forward is `down(silu(gate(x)) * up(x))` of its own children; None for any other."""
    if _has_hooks(module):
        return None
    if sum(1 for child in module.children() if isinstance(child, nn.Linear)) != 3:
        return None
    forward = _Forward.of(module)
    return None if forward is None else forward.gated()


class _Forward(NamedTuple):
    """A forward of one argument as one expression, with what its names stand for."""

    module: nn.Module
    of_self: str
    argument: str
    result: ast.expr
    names: Mapping[str, Any]

    @classmethod
    def of(cls, module: nn.Module) -> _Forward | None:
        """Names that are assigned once in the text are replaced by what was assigned; None where there is more than that."""
        function = type(module).forward
        if not inspect.isfunction(function) or hasattr(function, "__wrapped__"):
            return None  # its text would be that of what is wrapped
        try:
            [tree] = ast.parse(textwrap.dedent(inspect.getsource(function))).body
        except (OSError, TypeError, SyntaxError, ValueError):
            return None
        if not isinstance(tree, ast.FunctionDef) or tree.decorator_list or len(tree.args.args) != 2:
            return None
        if tree.args.vararg or tree.args.kwarg or tree.args.kwonlyargs or tree.args.defaults or tree.args.posonlyargs:
            return None
        of_self, argument = (a.arg for a in tree.args.args)
        body = [s for s in tree.body if not (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))]
        reads = Counter(n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load))
        values: dict[str, ast.expr] = {}
        for statement in body[:-1]:
            target, value = _assigned(statement)
            if target is None or value is None or target in (*values, of_self, argument):
                return None
            values[target] = _inlined(value, values)
        if any(reads[name] != 1 for name in values):
            return None  # what nobody reads is done for something else
        last = body[-1] if body else None
        if not isinstance(last, ast.Return) or last.value is None:
            return None
        around = {**getattr(function, "__globals__", {}), **inspect.getclosurevars(function).nonlocals}
        return cls(module, of_self, argument, _inlined(last.value, values), around)

    def gated(self) -> GatedNames | None:
        down = self._layer_call(self.result)
        if down is None or not (isinstance(down.of, ast.BinOp) and isinstance(down.of.op, ast.Mult)):
            return None
        for active, plain in ((down.of.left, down.of.right), (down.of.right, down.of.left)):
            inner, up = self._silu_argument(active), self._layer_call(plain)
            gate = None if inner is None else self._layer_call(inner)
            if gate is not None and up is not None and self._is_argument(gate.of) and self._is_argument(up.of):
                names = GatedNames(gate.name, up.name, down.name)
                return names if len(set(names)) == len(names) else None
        return None

    def _layer_call(self, expression: ast.expr) -> _LayerCall | None:
        """The call of a Linear among the module's children, of one argument."""
        called = self._call(expression)
        if called is None or not isinstance(called.value, nn.Linear):
            return None
        assert isinstance(called.function, ast.Attribute)  # what else is a child
        return _LayerCall(called.function.attr, called.of)

    def _silu_argument(self, expression: ast.expr) -> ast.expr | None:
        called = self._call(expression)
        return called.of if called is not None and _is_silu(called.value) else None

    def is_silu(self) -> bool:
        of = self._silu_argument(self.result)
        return of is not None and self._is_argument(of)

    def _call(self, expression: ast.expr) -> _Called | None:
        if not isinstance(expression, ast.Call) or expression.keywords or len(expression.args) != 1:
            return None
        value = self._value(expression.func)
        return None if value is None else _Called(expression.func, value, expression.args[0])

    def _value(self, expression: ast.expr) -> object | None:
        """What a name, or an attribute of one, stands for; of the module itself children alone."""
        if isinstance(expression, ast.Name):
            return None if expression.id in (self.of_self, self.argument) else self.names.get(expression.id)
        if not isinstance(expression, ast.Attribute):
            return None
        if isinstance(expression.value, ast.Name) and expression.value.id == self.of_self:
            return self.module._modules.get(expression.attr)
        around = self._value(expression.value)
        return getattr(around, expression.attr, None) if inspect.ismodule(around) else None

    def _is_argument(self, expression: ast.expr) -> bool:
        return isinstance(expression, ast.Name) and expression.id == self.argument


class _LayerCall(NamedTuple):
    name: str
    of: ast.expr


class _Called(NamedTuple):
    function: ast.expr
    value: object
    of: ast.expr


def _assigned(statement: ast.stmt) -> tuple[str | None, ast.expr | None]:
    """The one name that a statement assigns, and what to it."""
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        target, value = statement.targets[0], statement.value
    elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
        target, value = statement.target, statement.value
    else:
        return None, None
    return (target.id if isinstance(target, ast.Name) else None), value


def _is_silu(function: object) -> bool:
    """Whether a function or a module computes SiLU, a module of another library's by the text of its forward."""
    if function is F.silu or type(function) is nn.SiLU:
        return not getattr(function, "inplace", False)
    if not isinstance(function, nn.Module) or function._modules or function._parameters or _has_hooks(function):
        return False
    forward = _Forward.of(function)
    return forward is not None and forward.is_silu()


def _has_hooks(module: nn.Module) -> bool:
    return "forward" in module.__dict__ or any(getattr(module, hooks) for hooks in _HOOKS)


def _inlined(expression: ast.expr, values: Mapping[str, ast.expr]) -> ast.expr:
    class Inlining(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> ast.expr:
            return values.get(node.id, node)

    result: ast.expr = Inlining().visit(expression)
    return result


def _is_plain_float8(layer: nn.Module) -> bool:
    """Whether torchao multiplies a layer with one scale a tensor, and nothing else happens in it."""
    kind = type(layer)
    if kind.__name__ != "Float8Linear" or not kind.__module__.startswith("torchao."):
        return False
    if (
        layer.bias is not None
        or any(getattr(layer, hooks) for hooks in _HOOKS)
        or layer._compiled_call_impl is not None
    ):
        return False
    config: Any = layer.config
    return bool(config == type(config).from_recipe_name("tensorwise"))


def _forward(module: nn.Module, names: GatedNames, x: Tensor) -> Tensor:
    """As one, or layer by layer as before where the units take it only so, or not at all."""
    kind = x.device.type
    if torch.is_autocast_enabled(kind):
        x = x.to(torch.get_autocast_dtype(kind))
    if x.dtype not in HALVES or math.prod(x.shape[:-1]) % MULTIPLE:
        result: Tensor = type(module).forward(module, x)
        return result
    gate, up, down = (module.get_parameter(f"{name}.weight") for name in names)
    return float8_gated_mlp(x, gate, up, down)
