"""Methods that a loop calls instead of their module (a policy's `act`, a model's `loss`): where time is spent in them, and what
a decorator before one needs.
"""

from __future__ import annotations

import ast
from collections import Counter
from typing import Final, NamedTuple

import libcst as cst
from libcst import matchers as m

from flatout.core.errors import EditError, LeverRefused
from flatout.core.records.evidence import Evidence
from flatout.core.records.lever import Parameters
from flatout.core.records.workload import Source
from flatout.machine.cost.accounting import milliseconds
from flatout.tune.rewrite.imports import call_name
from flatout.tune.rewrite.source import (
    assigned_in,
    bare_names,
    code_of,
    function_at,
    names_in,
    nodes_of,
    place_parameters,
    with_changes,
)

_SMALL_PART: Final = 0.1
_SLOW_DEVICE: Final = 1e12
"""FLOP/s that any GPU reaches in small products: a call that takes ten times as long as that waits for its host."""
_READS: Final = ("backward", "step", "item", "tolist", "numpy", "cpu")
"""What makes a graph end, or changes more than it returns."""


CAPTURED: Final = "captured"
"""The decorator of flatout that replays calls from CUDA graphs."""
REPLAY_S: Final = 0.25e-3
"""What a replayed call leaves: copying arguments and results, one launch and one node of the autograd graph; some 0.1 to 0.2 ms
(H200, torch 2.11)."""
_IN_PYTHON: Final = ("random.", "numpy.", "np.", "time.")
"""Calls that give something else each time, and that no graph holds."""


class CalledMethod(NamedTuple):
    """The method of a module in which most time is spent: `seconds` of a step, with its part of the backward pass."""

    line: Source
    seconds: float
    num_calls: float
    parameters: Parameters
    waits_for_host: bool
    """Whether the models that it calls are so small that a device waits for their launches."""


def slowest_method(evidence: Evidence) -> CalledMethod:
    """The method in which most time is spent.

    Raises LeverRefused where the script compiles, where models are called as they are, and where it is a small part of a step.
    """
    if evidence.compilation is not None and evidence.compilation.num_graphs:
        raise LeverRefused("the script compiles already")
    calling = {
        where: evidence.source_of(model.source)
        for model in evidence.models
        if (where := _method(evidence, model.source))
    }
    seconds = {where: _seconds_in(evidence, *where) for where in calling}
    if not seconds:
        raise LeverRefused("the loop calls its models as they are, and no method of theirs that does")
    where = max(seconds, key=lambda w: seconds[w])
    line, spent_s = calling[where], seconds[where]
    if spent_s < _SMALL_PART * evidence.steps.whole_s or line is None:
        raise LeverRefused(f"{where[1]} takes {milliseconds(spent_s)} of a step")
    try:
        file = place_parameters(evidence, line)["file"]
    except EditError as e:
        raise LeverRefused(str(e)) from e
    called = [m for m in evidence.models if _is_in(evidence.source_of(m.source), *where)]
    flop = sum(2.0 * m.num_parameters * max(1, m.batch_size) * m.calls for m in called)
    in_calls_s = sum(m.call_s * m.calls for m in called)
    return CalledMethod(
        line=line,
        seconds=spent_s,
        num_calls=max(m.calls for m in called),
        parameters={"file": file, "function": where[1]},
        waits_for_host=evidence.workload.device != "cpu" and flop < 0.1 * _SLOW_DEVICE * in_calls_s,
    )


def draws_in(evidence: Evidence, method: CalledMethod) -> bool:
    """Whether the method's text draws random numbers."""
    line = method.line
    texts = [t.text for t in evidence.sources if _is_in(t, line.file, line.function)]
    return any(word in text for text in texts for word in ("sample", "rand", "normal"))


def plain_method(module: cst.Module, name: str) -> cst.FunctionDef:
    """A method of a class of modules that returns tensors and does nothing else, as far as its text shows.

    Raises EditError where it is something else.
    """
    holder = _holder(module, name)
    if holder is None or not _is_module(module, holder):
        raise EditError(f"'{name}' is no method of a module")
    return _plain(module, name)


def plain_function(module: cst.Module, name: str) -> cst.FunctionDef:
    """A function, or a method of a class of no modules, that returns tensors and reads none, as far as its text shows.

    Raises EditError where it is something else.
    """
    holder = _holder(module, name)
    if holder is not None and _is_module(module, holder):
        raise EditError(f"'{name}' is a method of a module")
    if name.count(".") > (holder is not None) or name.rpartition(".")[2].startswith("__"):
        raise EditError(f"'{name}' is inside of another function, or called by Python itself")
    function = _plain(module, name)
    if not (function.params.params or function.params.posonly_params):
        raise EditError(f"'{name}' takes no tensors")
    return function


def check_graph_holds(text: str, module: cst.Module, name: str, function: cst.FunctionDef) -> None:
    """Raise EditError where a function is captured already, or calls or reads what no CUDA graph holds."""
    if any(CAPTURED in code_of(d.decorator) for d in function.decorators):
        raise EditError(f"'{name}' is captured already")
    for call in nodes_of(cst.Call, function.body):
        called = call_name(module, call.func)
        if called.startswith(_IN_PYTHON) or called in ("print", "input"):
            raise EditError(f"'{name}' calls {called}, which no graph holds")
    own = assigned_in(function.body) | names_in(function.params)
    if changing := sorted(({n.value for n in bare_names(function.body)} - own) & _changing_globals(text)):
        raise EditError(f"'{name}' reads '{changing[0]}', a global variable that changes")


def _holder(module: cst.Module, name: str) -> cst.ClassDef | None:
    """The class whose method it is."""
    return next((c for c in nodes_of(cst.ClassDef, module) if c.name.value == name.split(".")[-2:][0]), None)


def _plain(module: cst.Module, name: str) -> cst.FunctionDef:
    method = function_at(module, name)
    decorators = {code_of(d.decorator) for d in method.decorators}
    if decorators & {"property", "staticmethod", "classmethod"} or method.asynchronous is not None:
        raise EditError(f"'{name}' is no plain method")
    called = {c.func.attr.value for c in nodes_of(cst.Call, method.body) if isinstance(c.func, cst.Attribute)}
    if reads := sorted(called & set(_READS)):
        raise EditError(f"'{name}' calls {', '.join(f'.{read}()' for read in reads)}")
    if m.findall(method.body, m.Yield()):
        raise EditError(f"'{name}' is a generator")
    return method


def _changing_globals(text: str) -> set[str]:
    """Names of the module that are bound more than once, in a loop, or by a function that declares them global."""
    bound: Counter[str] = Counter()
    todo: list[tuple[ast.AST, int]] = [(ast.parse(text), 1)]
    while todo:
        node, times = todo.pop()
        if isinstance(node, ast.Global):
            bound.update(dict.fromkeys(node.names, 2))
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bound[node.id] += times
        is_function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda))
        again = 2 if isinstance(node, (ast.For, ast.While, ast.AugAssign)) else times
        # Inside a function names are its own, but for those that it declares global.
        todo.extend((child, 0 if is_function else again * bool(times)) for child in ast.iter_child_nodes(node))
    return {name for name, times in bound.items() if times > 1}


def with_decorator(module: cst.Module, name: str, decorator: str) -> cst.Module:
    """The tree with a decorator next to the method's `def`."""
    method = function_at(module, name)
    new = cst.Decorator(cst.parse_expression(decorator))
    return with_changes(module, {method: method.with_changes(decorators=[*method.decorators, new])})


def _method(evidence: Evidence, source: int) -> tuple[str, str] | None:
    """File and name of the method that a line is in, other than a `forward`; None for a line of a plain function."""
    line = evidence.source_of(source)
    if line is None or line.is_installed or "." not in line.function or "<" in line.function:
        return None
    return None if line.function.endswith((".forward", ".__call__")) else (line.file, line.function)


def _is_in(line: Source | None, file: str, function: str) -> bool:
    return line is not None and (line.file, line.function) == (file, function)


def _seconds_in(evidence: Evidence, file: str, function: str) -> float:
    """Seconds of a step in a method, what it calls included, and its part of the backward pass."""
    forward_s = sum(
        t.seconds
        for t in evidence.lines
        if t.process == "main" and _is_in(evidence.source_of(t.source), file, function)
    )
    called_s = sum(model.calls * model.call_s for model in evidence.models)
    in_it_s = sum(
        model.calls * model.call_s
        for model in evidence.models
        if _is_in(evidence.source_of(model.source), file, function)
    )
    share = in_it_s / called_s if called_s else 0.0
    return max(forward_s, in_it_s) + share * evidence.steps.phases.get("backward", 0.0)


def _is_module(module: cst.Module, holder: cst.ClassDef, depth: int = 0) -> bool:
    """Whether a class of the file is one of torch.nn.Module, as far as the file shows."""
    for base in holder.bases:
        if call_name(module, base.value).startswith("torch.nn."):
            return True
        inside = next((c for c in nodes_of(cst.ClassDef, module) if c.name.value == code_of(base.value)), None)
        if inside is not None and depth < len(module.body) and _is_module(module, inside, depth + 1):
            return True
    return False
