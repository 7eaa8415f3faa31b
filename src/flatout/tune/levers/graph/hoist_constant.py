"""What comes out the same every time is computed once.

What        In a module's method: constants made of buffers and fixed attributes become buffers, made at the end of `__init__`
            (attributes in a class that is no module, as a data set).
            In a loop: what does not depend on it is computed before it. A function that is called again with equal arguments
            keeps its results: `functools.cache` where those are texts and numbers, else `flatout.memoise`. So does an
            expression of a function's arguments, which becomes a function of its own.
Guarantee   EXACT: the same operators on the same numbers, once.
Refuses     What reads weights, the batch, random numbers or anything that is written to; calls that cannot be analysed.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Final, NamedTuple

import libcst as cst
import msgspec
from libcst import matchers as m

from flatout.core.errors import EditError
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Finding
from flatout.core.records.lever import Parameters
from flatout.core.records.workload import Source
from flatout.tune.levers.proposals import source_lever
from flatout.tune.rewrite.calls import calls_ending
from flatout.tune.rewrite.constants import (
    PlainAssignment,
    connected,
    constant_assignments,
    has_work,
    largest_parts,
    last_callee,
    times_bound,
    written_names,
)
from flatout.tune.rewrite.enclosing_blocks import levels, parents_of, root_name
from flatout.tune.rewrite.flow import read_in
from flatout.tune.rewrite.imports import with_import
from flatout.tune.rewrite.models import names_of_models
from flatout.tune.rewrite.purity import Purity, Reads, written
from flatout.tune.rewrite.source import (
    Change,
    SourcePlace,
    assigned_in,
    bare_names,
    code_of,
    expression,
    find,
    free_name,
    fresh_name,
    names_in,
    nodes_of,
    statements,
    with_changes,
    with_expression,
    with_names,
    word_set,
)

_TIMED: Final = "overhead.recomputed-constant"
"""The rule that saw tensors come out the same; others see time spent."""
_SAMPLED: Final = 8
"""Sampled lines that are looked at when a batch takes long to make."""
_NUMBERS: Final = word_set("len int float bool size dim numel item max min tolist prod sqrt log exp")
_TEXT_METHODS: Final = word_set(
    "lower upper split rsplit strip lstrip rstrip encode startswith endswith casefold splitlines title partition "
    "isalpha"
)
_TEXT_KINDS: Final = ("str", "int", "float", "bool", "bytes")
_READERS: Final = word_set("extend join")
_READING_FUNCTIONS: Final = word_set("len sum min max sorted list tuple set frozenset any all str")
_TAKEN: Final = word_set(
    "training forward type half float double to cuda cpu apply eval train children modules parameters buffers"
)
"""Attributes of nn.Module that a buffer cannot be called."""


# -- offers ---------------------------------------------------------------------------------------------------------------------


def _around(evidence: Evidence, findings: Sequence[Finding]) -> list[Finding]:
    """The findings with the lines of their callers, of which the outermost comes first."""
    timed = {(s.file, s.function) for f in findings if f.rule == _TIMED for s in (f.where, *f.also) if s is not None}
    around: list[Finding] = []
    for finding in findings:
        is_timed = finding.rule == _TIMED
        if not is_timed and finding.where is not None and (finding.where.file, finding.where.function) in timed:
            continue
        low, high = finding.saved_s
        saved_s = (0.6 * low if is_timed else 0.0, 1.1 * high)
        lines = tuple(_lines(evidence, finding, is_timed=is_timed))
        around.append(msgspec.structs.replace(finding, where=None, also=lines, saved_s=saved_s))
    return around


def _lines(evidence: Evidence, finding: Finding, *, is_timed: bool) -> list[Source]:
    """Where the finding's lines are reached from: constants are hoisted as far out as can be, functions decorated within."""
    found: list[Source] = []
    for where in (finding.where, *finding.also):
        if where is None:
            continue
        index = next((i for i, s in enumerate(evidence.sources) if (s.file, s.line) == (where.file, where.line)), -1)
        callers = [evidence.sources[i] for i in evidence.callers.get(index, ())]
        stack = [where]
        for caller in callers:
            if f"{stack[-1].function.rpartition('.')[2]}(" not in caller.text:
                break
            stack.append(caller)
        found += [s for s in (reversed(stack) if is_timed else stack) if s not in found]
    if finding.regime == "input":  # it names one function; the work may be in those that it calls
        hottest = sorted((r for r in evidence.lines if r.phase in ("data", "other")), key=lambda r: -r.seconds)
        sampled = [s for s in (evidence.source_of(r.source) for r in hottest[:_SAMPLED]) if s is not None]
        found += [s for s in sampled if s not in found]
    return found


# -- the edit -------------------------------------------------------------------------------------------------------------------


def edit(text: str, parameters: Parameters) -> str:
    """Compute the constant at the end of `__init__`, before the loop, or once for each set of arguments.

    Raises EditError where that is not certain.
    """
    place = find(text, parameters)
    purity = Purity(place.module)
    why: list[str] = []
    for edit_of in (_in_constructor, _before_loop, _cached_in_function, _cached_of_arguments):
        try:
            return edit_of(place, purity)
        except EditError as e:
            why.append(str(e))
    raise EditError(
        "; ".join(dict.fromkeys(w for w in why if w)) or "it is no expression that could be computed before"
    )


# -- into __init__ --------------------------------------------------------------------------------------------------------------


class _Method(NamedTuple):
    """A method, its class, and the `__init__` at whose end constants of the method can be made."""

    module: cst.Module
    cls: cst.ClassDef
    init: cst.FunctionDef
    function: cst.FunctionDef

    @property
    def me(self) -> str:
        """The name of the object in the method."""
        return self.function.params.params[0].name.value

    @property
    def has_no_buffers(self) -> bool:
        """Whether the class is a data set, or has no base: no module, as far as the file shows."""
        bases = [code_of(base.value).rpartition(".")[2] for base in self.cls.bases]
        return all(base == "object" or base.endswith("Dataset") for base in bases)

    @property
    def init_me(self) -> str:
        """The name of the object in `__init__`."""
        return self.init.params.params[0].name.value


def _in_constructor(place: SourcePlace, purity: Purity) -> str:
    function, cls = place.function, place.owner
    if cls is None or function is None or not any(s is function for s in cls.body.body):
        raise EditError("")
    inits = [s for s in cls.body.body if isinstance(s, cst.FunctionDef) and s.name.value == "__init__"]
    if len(inits) != 1 or inits[0] is function or not function.params.params or not inits[0].params.params:
        raise EditError("the class has no __init__ in which it could be made")
    method = _Method(place.module, cls, inits[0], function)
    me, owner = method.me, cls.name.value
    attributes = _fixed_attributes(method)
    local = _locals(function)

    def depends(reads: Reads, known: frozenset[str]) -> str:
        """Why it is not the same every time; '' if it is."""
        for name in sorted(reads.attributes - attributes):
            return f"'{me}.{name}' may change"
        for name in sorted(reads.names - known):
            if name in local or not purity.is_constant(name):
                return f"'{name}' may differ from call to call"
        return next((f"'{name}' is written to" for name in sorted(reads.globals) if not purity.is_constant(name)), "")

    constants = constant_assignments(place, purity, depends, owner=owner, me=me)
    anchor = next((c for c in constants if c.statement is place.statement), None)
    if anchor is not None and has_work(anchor.value) and place.block is function.body.body:
        return _move_statements(method, connected(constants, anchor))
    changed = written_names(_as_ast([function]))
    return _move_expressions(method, largest_parts(place.statement, purity, depends, changed, owner=owner, me=me))


def _move_statements(method: _Method, group: list[PlainAssignment]) -> str:
    moved = {id(c.statement) for c in group if has_work(c.value)}
    rest = [s for s in method.function.body.body if id(s) not in moved]
    read_later = read_in(_as_ast(rest))
    taken = _locals(method.init)
    names = {t: free_name(t, taken) for c in group for t in c.targets}
    attributes: dict[str, str] = {}
    lines: list[cst.BaseStatement] = []
    for constant in group:
        others = set().union(*(c.reads for c in group if c is not constant))
        live = [t for t in constant.targets if t in read_later and has_work(constant.value)]
        _refuse_shadowed(method, constant.value, {method.me, *names})
        value = with_names(constant.value, names | {method.me: method.init_me})
        for target in live:
            attributes[target] = _attribute_name(method.cls, target)
        if len(constant.targets) == 1 and live and not others & set(live):
            lines += _stored(method, attributes[live[0]], value)
            continue
        targets = ", ".join(names[t] for t in constant.targets)
        lines += statements(f"{targets} = {{value}}\n", value=value)
        for target in live:
            lines += _stored(method, attributes[target], cst.Name(names[target]))
    changes: dict[cst.CSTNode, Change] = {}
    for constant in group:
        is_unread = not set(constant.targets) & read_in(_as_ast([s for s in rest if s is not constant.statement]))
        if id(constant.statement) in moved or is_unread:
            changes[constant.statement] = ()
    stay = [s for s in method.function.body.body if s not in changes]
    for name in bare_names(s for s in stay if isinstance(s, cst.CSTNode)):
        if name.value in attributes:
            changes[name] = expression(f"{method.me}.{attributes[name.value]}")
    return _with_lines(method, lines, changes)


def _move_expressions(method: _Method, found: Mapping[cst.BaseExpression, str]) -> str:
    lines: list[cst.BaseStatement] = []
    changes: dict[cst.CSTNode, Change] = {}
    for value, wanted in found.items():
        attribute = _attribute_name(method.cls, wanted)
        _refuse_shadowed(method, value, {method.me})
        lines += _stored(method, attribute, with_names(value, {method.me: method.init_me}))
        changes[value] = expression(f"{method.me}.{attribute}")
    return _with_lines(method, lines, changes)


def _refuse_shadowed(method: _Method, value: cst.BaseExpression, known: set[str]) -> None:
    for name in sorted((names_in(value) - known) & (_locals(method.init) - {method.init_me})):
        raise EditError(f"'{name}' means something else in __init__")


def _stored(method: _Method, attribute: str, value: cst.BaseExpression) -> list[cst.BaseStatement]:
    """The line that keeps a tensor as a buffer, a number, and all of a class that is no module, as an attribute."""
    if method.has_no_buffers or (last_callee(value) in _NUMBERS and not isinstance(value, cst.Name)):
        return statements(f"{method.init_me}.{attribute} = {{value}}\n", value=value)
    return statements(f'{method.init_me}.register_buffer("{attribute}", {{value}}, persistent=False)\n', value=value)


def _with_lines(method: _Method, lines: Sequence[cst.BaseStatement], changes: Mapping[cst.CSTNode, Change]) -> str:
    body = method.init.body
    if m.findall(body, m.Return()):
        raise EditError("__init__ returns before its end")
    assert isinstance(body, cst.IndentedBlock)
    longer = body.with_changes(body=[*body.body, *lines])
    return with_changes(method.module, {**changes, body: longer}).code


def _fixed_attributes(method: _Method) -> set[str]:
    """Attributes that __init__ sets once to buffers, numbers and tensors that are not trained, and that nobody writes to."""
    tree, me, own = ast.parse(method.module.code), method.init_me, _as_ast([method.init])
    found: dict[str, int] = {}
    is_loaded = "load_state_dict(" in method.module.code
    for node in ast.walk(own):
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                parts = target.elts if isinstance(target, ast.Tuple) else [target]
                for part in parts:
                    if isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name) and part.value.id == me:
                        found[part.attr] = found.get(part.attr, 0) + (1 if _is_untrained(node.value) else 2)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == f"{me}.register_buffer" and node.args:
            name = node.args[0]
            is_persistent = not any(k.arg == "persistent" for k in node.keywords)
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                found[name.value] = found.get(name.value, 0) + (2 if is_persistent and is_loaded else 1)
    elsewhere = {w.rpartition(".")[2] for w in _written_outside(tree, method.cls.name.value) if "." in w}
    return {name for name, num in found.items() if num == 1} - elsewhere


def _written_outside(tree: ast.Module, cls: str) -> set[str]:
    """What is written to in the file, less what __init__ of the class and methods of other classes do to themselves."""
    found: set[str] = set()
    classes = {n.name: n for n in ast.walk(tree) if isinstance(n, ast.ClassDef)}
    families = {cls, *(n for n, c in classes.items() if any(ast.unparse(b).endswith(cls) for b in c.bases))}
    methods: set[int] = set()
    for name, node in classes.items():
        for method in (n for n in node.body if isinstance(n, ast.FunctionDef) and n.args.args):
            methods |= {id(n) for n in ast.walk(method)}
            mine = written(method)
            me = method.args.args[0].arg
            if name not in families:
                mine = {w for w in mine if not (w.startswith(f"{me}.") and w.count(".") == 1)}
            elif name == cls and method.name == "__init__":
                plain = {
                    ast.unparse(t)
                    for n in ast.walk(method)
                    if isinstance(n, ast.Assign)
                    for target in n.targets
                    for t in (target.elts if isinstance(target, ast.Tuple) else [target])
                }
                mine -= plain
            found |= mine
    rest = [n for n in tree.body if not isinstance(n, ast.ClassDef)]
    return found | written(ast.Module(body=rest, type_ignores=[]))


def _is_untrained(value: ast.expr) -> bool:
    """Whether no weights are made there: no class is called but torch's tensor functions."""
    for node in ast.walk(value):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func).rpartition(".")[2]
            if name[:1].isupper() or name in ("requires_grad_", "cls"):
                return False
        if isinstance(node, ast.keyword) and node.arg == "requires_grad":
            return False
    return True


# -- before the loop ------------------------------------------------------------------------------------------------------------


def _before_loop(place: SourcePlace, purity: Purity) -> str:
    owners = (level.owner for level in levels(parents_of(place.module), place.statement))
    loops = [*takewhile(lambda owner: isinstance(owner, (cst.For, cst.While)), owners)]
    why = "it is not in a loop, or only in some of its rounds"
    scope = ast.parse(place.module.code) if place.function is None else _as_ast([place.function])
    for loop in reversed(loops):
        assert isinstance(loop, (cst.For, cst.While))
        try:
            return _out_of(loop, place, purity, scope)
        except EditError as e:
            why = str(e)
    raise EditError(why)


def _out_of(loop: cst.For | cst.While, place: SourcePlace, purity: Purity, scope: ast.Module) -> str:
    tree = _as_ast([loop])
    times, changed = times_bound(tree), written_names(tree)

    def depends(reads: Reads, known: frozenset[str]) -> str:
        if reads.attributes:
            return "it reads attributes of an object"
        for name in sorted((reads.names | reads.globals) - known):
            if name in times or name in changed:
                return f"'{name}' changes in the loop"
        return next((f"'{name}' is written to" for name in sorted(reads.globals) if not purity.is_constant(name)), "")

    constants = constant_assignments(place, purity, depends, me="", times=times)
    anchor = next((c for c in constants if c.statement is place.statement), None)
    if anchor is not None and has_work(anchor.value):
        group = connected(constants, anchor)
        _refuse_read_before(tree, group)
        moved = [c.statement for c in group]
        bare = [s.with_changes(leading_lines=[n for n in s.leading_lines if n.comment]) for s in moved]
        inner = with_changes(cst.Module(body=[loop]), dict.fromkeys(moved, ())).body[0]
        if not inner.body.body:  # type: ignore[union-attr]
            raise EditError("nothing is left in the loop")
        return _with_loop(place.module, loop, bare, inner)
    found = largest_parts(place.statement, purity, depends, written_names(scope), owner="", me="")
    lines: list[cst.BaseStatement] = []
    new: cst.BaseStatement = loop
    for value, wanted in found.items():
        name = fresh_name(place.module, wanted)
        lines += statements(f"{name} = {{value}}\n", value=value)
        new = with_expression(new, value, cst.Name(name))
    return _with_loop(place.module, loop, lines, new)


def _with_loop(
    module: cst.Module, loop: cst.For | cst.While, lines: Sequence[cst.BaseStatement], new: cst.BaseStatement
) -> str:
    return with_changes(module, {loop: [*lines, new.with_changes(leading_lines=())]}).code


def _refuse_read_before(tree: ast.Module, group: Sequence[PlainAssignment]) -> None:
    """A name that is read above its assignment has there the value of the round before."""
    for constant in group:
        names = [n for n in ast.walk(tree) if isinstance(n, ast.Name) and n.id in constant.targets]
        stores = [n.lineno for n in names if isinstance(n.ctx, ast.Store)]
        loads = [n.lineno for n in names if isinstance(n.ctx, ast.Load)]
        if loads and min(loads) <= min(stores):
            first = code_of(constant.statement).splitlines()[0]
            raise EditError(f"'{first}' is read in the loop before it is computed")


# -- functions that keep their results ------------------------------------------------------------------------------------------


def _cached_in_function(place: SourcePlace, purity: Purity) -> str:
    function = place.function
    name = function.name.value if function is not None else ""
    known = purity.function(name)
    if function is None or known is None or not any(s is function for s in place.module.body):
        raise EditError("")
    if function.decorators or function.asynchronous is not None:
        raise EditError(f"'{name}' is decorated already")
    if known.args.vararg or known.args.kwarg or m.findall(function.body, m.Yield()):
        raise EditError(f"'{name}' takes or gives any number of things")
    if not _is_called_only(purity.tree, name):
        raise EditError(f"'{name}' is handed on to something else that calls it")
    for variable in sorted(purity.of_function(name).globals):
        if not purity.is_constant(variable):
            raise EditError(f"'{variable}', which '{name}' reads, is written to")
    if not m.findall(function.body, m.Return()):
        raise EditError(f"'{name}' returns nothing")
    _check_arguments(place.module, name)
    if _takes_texts(known) and _is_only_read(purity.tree, name):
        decorator, module = "functools.cache", with_import(place.module, "functools")
    else:
        decorator, module = "memoise", with_import(place.module, "flatout", "memoise")
    [old] = [s for s in module.body if isinstance(s, cst.FunctionDef) and s.name.value == name]
    new = old.with_changes(decorators=[cst.Decorator(decorator=expression(decorator))])
    return with_changes(module, {old: [new]}).code


def _check_arguments(module: cst.Module, name: str) -> None:
    """Raise EditError where a function gets what models return, or a backward begins from what it returns."""
    models = names_of_models(module)
    computed: set[str] = set()
    results: list[set[str]] = []
    for node in nodes_of(cst.Assign, module):
        called = {code_of(call.func) for call in nodes_of(cst.Call, node.value)}
        if called & models:
            computed |= assigned_in(node)
        if name in called:
            results.append(assigned_in(node))
    is_backward = m.Call(func=m.Attribute(attr=m.Name("backward")))
    lost = {root_name(cst.ensure_type(c, cst.Call).func) for c in m.findall(module, is_backward)}
    calls = [call for call in nodes_of(cst.Call, module) if code_of(call.func) == name]
    gets_outputs = [
        bool(names_in(call.args) & computed or {code_of(c.func) for c in nodes_of(cst.Call, call)} & models)
        for call in calls
    ]
    if (calls and all(gets_outputs)) or any(names & lost for names in results):
        raise EditError(f"'{name}' gets what a model has computed, which is another thing after each update")


def _cached_of_arguments(place: SourcePlace, purity: Purity) -> str:
    """An assignment in a function, whose value is made of arguments that nothing writes to, calls a memoised function."""
    function, statement = place.function, place.statement
    is_assignment = m.matches(statement, m.SimpleStatementLine(body=[m.Assign(targets=[m.AssignTarget()])]))
    if function is None or not is_assignment:
        raise EditError("")
    assignment = cst.ensure_type(cst.ensure_type(statement, cst.SimpleStatementLine).body[0], cst.Assign)
    value = assignment.value
    reads = purity.reads(value)
    tree = _as_ast([function])
    arguments = [a.arg for node in tree.body if isinstance(node, ast.FunctionDef) for a in node.args.args]
    changed = written_names(tree) | {
        n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
    }
    names = [a for a in arguments if a in reads.names]
    outside = sorted((reads.names | reads.globals) - set(names))
    if not names or reads.attributes or not has_work(value) or changed & set(names):
        raise EditError("")
    _check_arguments(place.module, function.name.value)
    if any(name in _locals(function) or not purity.is_constant(name) for name in outside):
        raise EditError("")
    module = with_import(place.module, "flatout", "memoise")
    cached = fresh_name(module, f"_{function.name.value.strip('_')}_of_{'_and_'.join(names)}")
    [head] = statements(f"@memoise\ndef {cached}({', '.join(names)}):\n    return {{value}}\n", value=value)
    around = next(s for s in module.body if any(node is function for node in nodes_of(cst.FunctionDef, s)))
    call = expression(f"{cached}({', '.join(names)})")
    return with_changes(module, {around: [head, with_expression(around, value, call)]}).code


def _takes_texts(function: ast.FunctionDef) -> bool:
    """Whether all arguments are texts or numbers, by their annotations or by what is done with them."""
    used = {
        n.func.value.id
        for n in ast.walk(function)
        if isinstance(n, ast.Call)
        and isinstance(n.func, ast.Attribute)
        and n.func.attr in _TEXT_METHODS
        and isinstance(n.func.value, ast.Name)
    }
    arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    return all(
        ast.unparse(a.annotation) in _TEXT_KINDS if a.annotation is not None else a.arg in used for a in arguments
    )


def _is_called_only(tree: ast.Module, name: str) -> bool:
    """Whether every use of the function in the file is a call: a collate function, say, never meets one batch twice."""
    called = {id(n.func) for n in ast.walk(tree) if isinstance(n, ast.Call)}
    return all(id(n) in called for n in ast.walk(tree) if isinstance(n, ast.Name) and n.id == name)


def _is_only_read(tree: ast.Module, name: str) -> bool:
    """Whether no caller in the file can write to what the function returned: each hands it to something that reads it."""
    parents = {id(child): node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    uses = [n for n in ast.walk(tree) if isinstance(n, ast.Name) and n.id == name and isinstance(n.ctx, ast.Load)]
    for use in uses:
        call = parents[id(use)]
        if not isinstance(call, ast.Call) or call.func is not use:
            return False
        outer = parents[id(call)]
        is_iterated = isinstance(outer, (ast.For, ast.comprehension)) and outer.iter is call
        is_argument = isinstance(outer, ast.Call) and call in outer.args and _is_reader(outer.func)
        if not (is_iterated or is_argument or isinstance(outer, (ast.Compare, ast.BinOp, ast.FormattedValue))):
            return False
    return bool(uses)


def _is_reader(node: ast.expr) -> bool:
    if isinstance(node, ast.Name):
        return node.id in _READING_FUNCTIONS
    return isinstance(node, ast.Attribute) and (
        node.attr in _READERS or ast.unparse(node) in ("torch.tensor", "np.array", "np.stack", "np.concatenate")
    )


# -- the tree -------------------------------------------------------------------------------------------------------------------


def _as_ast(found: Sequence[cst.CSTNode]) -> ast.Module:
    """Statements as Python's own syntax tree."""
    return ast.parse(cst.Module(body=found).code)  # type: ignore[arg-type]


def _locals(function: cst.FunctionDef) -> set[str]:
    tree = _as_ast([function])
    stored = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    return stored | {n.arg for n in ast.walk(tree) if isinstance(n, ast.arg)}


def _attribute_name(cls: cst.ClassDef, wanted: str) -> str:
    """A name that no attribute or method of the class has."""
    used = {code_of(a.attr) for a in nodes_of(cst.Attribute, cls)} | _TAKEN
    used |= {s.name.value for s in cls.body.body if isinstance(s, cst.FunctionDef)}
    used |= {code_of(call.args[0].value).strip("\"'") for call in calls_ending(cls, "register_buffer")}
    return free_name(wanted, used)


LEVER = source_lever(
    __name__,
    edit,
    title="Constants computed once",
    else_because="nothing was seen that comes out the same in every step",
    findings=_around,
)
