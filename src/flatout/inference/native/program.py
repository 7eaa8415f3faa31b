"""An exported model, its carried state, and the C that it becomes."""

from __future__ import annotations

import copy
import inspect
import io
import json
import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import Node
from torch.utils import _pytree as pytree

from flatout.errors import NativeError, UsageError
from flatout.inference.native import decompositions, emit, plan
from flatout.inference.native.demand import shape_of
from flatout.inference.native.emit import StateLayout
from flatout.inference.native.generated import Generated
from flatout.inference.native.lowering import Lowering
from flatout.inference.native.places import dtype_name, told_at
from flatout.inference.native.rings import Window, ring, seen_again, window_of
from flatout.inference.native.shelf import SHELF
from flatout.inference.native.statements import Map, Product, Turn
from flatout.inference.native.values import Buffer, Const, View, whole
from flatout.records.native import NativeLayer, Port

_NAME: Final = re.compile(r"[a-z][a-z0-9_]{0,40}\Z")


class Program:
    """A model as a graph of core ATen operators. `state` names the forward parameters whose values are carried."""

    def __init__(self, exported: ExportedProgram, state: tuple[str, ...], name: str = "model") -> None:
        if not _NAME.match(name):
            raise UsageError(f"name '{name}' cannot be part of a C identifier; give small letters, digits and _")
        self.exported, self.state, self.name = exported, state, name
        self._graph = exported.graph
        self._signature = exported.graph_signature

    @classmethod
    def of(
        cls, model: nn.Module, example_inputs: Sequence[Any], state: str | Sequence[str] = (), name: str = "model"
    ) -> Program:
        """Export a model in eval mode. Raises NativeError when torch.export cannot, UsageError when the state does not fit."""
        names = (state,) if isinstance(state, str) else tuple(state)
        known = list(inspect.signature(model.forward).parameters)
        for one in names:
            if one not in known[: len(example_inputs)]:
                raise UsageError(
                    f"state '{one}' is no parameter of forward, which takes {', '.join(known)}; name one of these"
                )
        try:
            own = copy.deepcopy(model).eval()  # what becomes of the model later does not change the program
            with warnings.catch_warnings(), torch.no_grad():
                warnings.simplefilter("ignore")
                exported = torch.export.export(own, tuple(example_inputs), strict=False)
                exported = exported.run_decompositions(decompositions.table())
        except Exception as e:
            raise NativeError(
                f"torch.export cannot take this model: {str(e)[:1500]}; what it needs is in torch's guide to export"
            ) from e
        return cls(exported, names, name)

    def save(self, path: Path) -> None:
        """As a file of torch.export, with the state's names in it."""
        buffer = io.BytesIO()
        torch.export.save(self.exported, buffer, extra_files={"flatout.json": json.dumps([self.name, self.state])})
        path.write_bytes(buffer.getvalue())

    @classmethod
    def load(cls, path: Path) -> Program:
        """What `save` wrote."""
        extra = {"flatout.json": ""}
        exported = torch.export.load(path, extra_files=extra)
        name, state = json.loads(extra["flatout.json"])
        return cls(exported, tuple(state), name)

    def generated(self, *, precision: Mapping[str, str] | None = None) -> Generated:
        """The C, and the weights as it reads them. `precision` says "int8" of parameters whose products are to be in 8 bits.

        Raises NativeError with the operator and the line of the model for what has no native code.
        """
        return _Generation(self, _int8(precision)).run()

    def packed(self, state_dict: Mapping[str, Tensor], *, precision: Mapping[str, str] | None = None) -> bytes:
        """The block of weights for other numbers. Raises UsageError when names or shapes are not the model's."""
        known = self.tensors()
        unknown, missing = sorted(set(state_dict) - set(known)), sorted(set(known) - set(state_dict))
        if unknown or missing:
            told = f"has {unknown}, which the model has not" if unknown else f"lacks {missing}"
            raise UsageError(f"the state dict {told}; give the model's own names")
        for name, tensor in state_dict.items():
            own = known[name]
            if tensor.shape != own.shape or tensor.dtype != own.dtype:
                raise UsageError(
                    f"'{name}' is {tuple(tensor.shape)} of {tensor.dtype}, the model's {tuple(own.shape)} of {own.dtype};"
                    " give one of that shape"
                )
        generation = _Generation(self, _int8(precision))
        generation.run()
        return generation.low.block.packed(generation.folded({**self.constants(), **state_dict}))

    def products(self) -> list[tuple[str, Product]]:
        """Each product with a weight, by the parameter's name."""
        generation = _Generation(self, frozenset())
        generation.run()
        names = {node.name: name for node, name in generation._names().items()}
        return [(generation._weight_name(source, names), p) for source, p in generation.low.layers]

    def tensors(self) -> dict[str, Tensor]:
        """Parameters and persistent buffers that are not carried."""
        return {n: t.detach().cpu() for n, t in self.exported.state_dict.items() if n not in self.carried_buffers()}

    def constants(self) -> dict[str, Tensor]:
        """What the graph holds besides."""
        return {n: t.detach().cpu() for n, t in self.exported.constants.items() if isinstance(t, Tensor)}

    def carried_buffers(self) -> set[str]:
        """Buffers that an event changes."""
        return set(self._signature.buffers_to_mutate.values())

    def flat_inputs(self) -> list[tuple[str, Node, str]]:
        """(forward parameter, placeholder, its own name) of each tensor that goes in, in order."""
        nodes = {n.name: n for n in self._graph.nodes if n.op == "placeholder"}
        given = [
            s.arg.name for s in self._signature.input_specs if s.kind is InputKind.USER_INPUT and hasattr(s.arg, "name")
        ]
        spec = self.exported.call_spec.in_spec
        args, _ = pytree.tree_unflatten(list(range(spec.num_leaves)), spec)
        parameters = self._parameters(len(args))
        owner: dict[int, str] = {}
        for parameter, arg in zip(parameters, args, strict=True):
            owner.update(dict.fromkeys(pytree.tree_leaves(arg), parameter))
        return [(owner[i], nodes[name], name) for i, name in enumerate(given)]

    def _parameters(self, count: int) -> list[str]:
        names = self.exported.module_call_graph[0].signature
        found = list(getattr(names, "forward_arg_names", None) or [])
        return found[:count] if len(found) >= count else [f"arg{i}" for i in range(count)]


class _Generation:
    """One lowering of a program."""

    def __init__(self, program: Program, int8: frozenset[str]) -> None:
        self.program, self.int8 = program, int8
        self.nodes: list[Node] = list(program._graph.nodes)
        self.named = {n.name: n for n in self.nodes}
        self.inputs: list[tuple[Node, Buffer]] = []
        self.states: list[StateLayout] = []
        self.new_states: list[Node] = []
        self.outputs: list[tuple[Node, Buffer]] = []
        self.kept: dict[Node, View] = {}
        self.windows: dict[Node, tuple[Window, Buffer]] = {}

    def run(self) -> Generated:
        self._refuse_dynamic()
        self._ports()
        weights = {**self.program.tensors(), **self.program.constants()}
        tensors = self.folded(weights)
        constants = {node: Const(t, True) for node, t in tensors.items()}
        plain = self._without_weights(tensors)
        constants |= {node: Const(tensors[node], False) for node in plain}
        ends = [node for node, _ in self.outputs] + self.new_states
        self.low = low = Lowering(self.nodes, ends, constants, self.kept, SHELF)
        low.windows = self.windows
        names = {node.name: name for node, name in self._names().items()}
        low.int8 = frozenset(n.name for n in tensors if self._weight_name(n.name, names) in self.int8)
        for node, buffer in self.outputs:
            if node.op == "call_function" and node not in low.wanted:
                low.wanted[node] = whole(buffer, shape_of(node))
        low.run()
        self._finish(low)
        return self._generated(low, names)

    # ------------------------------------------------------------------------------------------------ inputs, outputs, state

    def _refuse_dynamic(self) -> None:
        for node in self.nodes:
            if node.op in ("output", "get_attr"):
                continue
            value = node.meta.get("val")
            for tensor in value if isinstance(value, (tuple, list)) else [value]:
                if isinstance(tensor, (torch.SymInt, torch.SymFloat, torch.SymBool)):
                    raise NativeError(
                        f"operator {node.target} takes a number out of a tensor{told_at(node)}, and what it decides must"
                        " be known when the model is built; index by a tensor of one dimension instead"
                    )
                if isinstance(tensor, Tensor) and not all(isinstance(n, int) for n in tensor.shape):
                    raise NativeError(
                        f"'{node.name}' has the shape {tuple(tensor.shape)}, which changes{told_at(node)};"
                        " native code has fixed sizes: pad"
                    )

    def _ports(self) -> None:
        flat = self.program.flat_inputs()
        lost = sorted(set(self.program.state) - {parameter for parameter, _, _ in flat})
        if lost:
            raise NativeError(
                f"state '{lost[0]}' is no tensor that goes into the exported model; pass it as a tensor by position"
            )
        carried = [(name, node) for parameter, node, name in flat if parameter in self.program.state]
        outs = self.program._signature.output_specs
        users = [
            self.named[s.arg.name]
            for s in outs
            if s.kind is OutputKind.USER_OUTPUT and getattr(s.arg, "name", None) in self.named
        ]
        if len(users) < len(carried) + (0 if self.program.carried_buffers() else 1):
            raise UsageError(
                f"the model gives {len(users)} tensors, and {len(carried)} are carried; return what goes out, then each"
                " new state in the order of the parameters"
            )
        given, new = users[: len(users) - len(carried)], users[len(users) - len(carried) :]
        examples = self._examples()
        at = 0
        for name, node in carried:
            at = self._add_state(name, node, new[len(self.new_states)], examples.get(name), at)
        for spec in outs:
            if spec.kind is OutputKind.BUFFER_MUTATION:
                source: Any = next(s for s in self.program._signature.input_specs if s.target == spec.target)
                tensor = self.program.exported.state_dict.get(
                    spec.target, self.program.exported.constants.get(spec.target)
                )
                old, new_value = self.named[source.arg.name], self.named[spec.arg.name]
                at = self._add_state(str(spec.target), old, new_value, tensor, at)
            elif spec.kind not in (OutputKind.USER_OUTPUT, OutputKind.BUFFER_MUTATION):
                raise NativeError(
                    f"the model changes what is given to it ({spec.target}); return the new value instead"
                )
        for number, layout in enumerate(self.states):  # cursors lie behind all numbers
            if layout.buffer.kind == "ring":
                self.states[number], at = layout._replace(cursor=at), at + 4
        for parameter, node, name in flat:
            if parameter not in self.program.state:
                self._check(node, f"input '{name}'")
                buffer = Buffer(
                    f"x{len(self.inputs)}", "in", dtype_name(node.meta["val"].dtype), node.meta["val"].numel()
                )
                self.inputs.append((node, buffer))
                self.kept[node] = whole(buffer, shape_of(node))
        for node in given:
            self._check(node, "an output")
            buffer = Buffer(
                f"y{len(self.outputs)}", "out", dtype_name(node.meta["val"].dtype), node.meta["val"].numel()
            )
            self.outputs.append((node, buffer))

    def _check(self, node: Node, what: str) -> None:
        try:
            dtype_name(node.meta["val"].dtype)
        except NotImplementedError as e:
            raise NativeError(f"{what} has {e}{told_at(node)}") from e
        if node.meta["val"].numel() == 0:
            raise NativeError(f"{what} is empty{told_at(node)}")

    def _examples(self) -> dict[str, Tensor]:
        example = self.program.exported.example_inputs
        flat = pytree.tree_leaves(example) if example is not None else []
        given = self.program.flat_inputs()
        return {name: t for (_, _, name), t in zip(given, flat, strict=False) if isinstance(t, Tensor)}

    def _add_state(self, name: str, node: Node, new: Node, initial: Tensor | None, at: int) -> int:
        self._check(node, f"state '{name}'")
        old, made = node.meta["val"], new.meta["val"]
        if old.shape != made.shape or old.dtype != made.dtype:
            raise UsageError(
                f"state '{name}' is {tuple(old.shape)} of {old.dtype}, and its new value {tuple(made.shape)} of"
                f" {made.dtype}; return one of the same shape"
            )
        if not old.is_contiguous():
            raise NativeError(f"state '{name}' has strides {old.stride()}; carry one that is contiguous")
        window = window_of(node, new)
        dtype = dtype_name(old.dtype)
        name_of = f"s{len(self.states)}"
        if window is not None and dtype == "float32":
            buffer, view = ring(name_of, dtype, tuple(old.shape), window.dim, at)
            for each in (window, *seen_again(window, node)):
                self.windows[each.joined] = (each, buffer)
        else:
            buffer = Buffer(name_of, "state", dtype, old.numel(), at)
            view = whole(buffer, shape_of(node))
        first = b"" if initial is None or not bool(initial.any()) else initial.detach().numpy().tobytes()
        port = Port(name=name, dtype=buffer.dtype, shape=tuple(old.shape))
        self.states.append(StateLayout(port, buffer, first, view))
        self.new_states.append(new)
        self.kept[node] = view
        return at + plan.num_bytes(buffer)

    # ---------------------------------------------------------------------------------------------------------- constants

    def _names(self) -> dict[Node, str]:
        """Of placeholders that hold parameters, buffers and constants: what they are called in the state dict."""
        kinds = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)
        specs = self.program._signature.input_specs
        return {
            self.named[s.arg.name]: str(s.target)
            for s in specs
            if s.kind in kinds and str(s.target) not in self.program.carried_buffers()
        }

    def folded(self, tensors: Mapping[str, Tensor]) -> dict[Node, Tensor]:
        """All that follows from weights alone, computed."""
        found: dict[Node, Tensor] = {}
        for node, name in self._names().items():
            found[node] = tensors[name].detach().cpu()
        with torch.no_grad():
            for node in self.nodes:
                if node.op != "call_function" or not isinstance(node.meta.get("val"), Tensor) or _is_random(node):
                    continue
                if all(source in found for source in node.all_input_nodes):
                    args, options = pytree.tree_map_only(Node, found.__getitem__, (node.args, node.kwargs))
                    made = node.target(*args, **options)  # type: ignore[operator]
                    if isinstance(made, Tensor):
                        found[node] = made
        return found

    def _without_weights(self, tensors: dict[Node, Tensor]) -> set[Node]:
        plain: set[Node] = set()
        for node in self.nodes:
            if node in tensors and node.op == "call_function" and all(s in plain for s in node.all_input_nodes):
                plain.add(node)
        return plain

    # ---------------------------------------------------------------------------------------------------------------- the end

    def _finish(self, low: Lowering) -> None:
        """Outputs and new states get their values; states last, when nobody reads the old ones any more."""
        for node, buffer in self.outputs:
            dst = whole(buffer, shape_of(node))
            value = low.values[node]
            if isinstance(value, View) and value.buffer is buffer:
                continue
            low.body.statements.append(Map(dst, low.expression(node, None, dst.shape), "goes out"))
        moved = []
        turns = [Turn(layout.buffer, "a window moves on") for layout in self.states if layout.buffer.kind == "ring"]
        for layout, node in zip(self.states, self.new_states, strict=True):
            if layout.buffer.kind == "ring":
                continue
            expr = low.expression(node, None, layout.view.shape)
            if isinstance(expr, View) and expr.buffer.kind in ("state", "ring"):
                if expr == layout.view:
                    continue
                expr = low.materialised(expr)
            moved.append(Map(layout.view, expr, "is carried"))
        low.body.statements += [*moved, *turns]

    def _generated(self, low: Lowering, names: dict[str, str]) -> Generated:
        inputs = [Port(name=n.name, dtype=b.dtype, shape=shape_of(n)) for n, b in self.inputs]
        outputs = [
            Port(name=f"y{i}" if len(self.outputs) > 1 else "y", dtype=b.dtype, shape=shape_of(n))
            for i, (n, b) in enumerate(self.outputs)
        ]
        weights = low.block.packed(low.block._constants)
        given, out = [b for _, b in self.inputs], [b for _, b in self.outputs]
        ports = inputs, outputs
        made = emit.source(self.program.name, low.body, given, out, self.states, len(weights), ports)
        layers = [
            NativeLayer(
                name=self._weight_name(source, names),
                rows=p.dst.shape[0],
                inputs=p.k,
                outputs=p.n,
                weight_bytes=plan.num_bytes(p.w.buffer),
                precision="int8" if p.scales is not None else "float32",
            )
            for source, p in low.layers
        ]
        taken = tuple(inputs), tuple(outputs), tuple(s.port for s in self.states)
        return Generated(self.program.name, made.code, made.header, weights, *taken, tuple(layers))

    def _weight_name(self, source: str, names: dict[str, str]) -> str:
        """The parameter that a folded constant comes from."""
        node = self.named[source]
        while node.name not in names and node.all_input_nodes:
            node = node.all_input_nodes[0]
        return names.get(node.name, source)


def _int8(precision: Mapping[str, str] | None) -> frozenset[str]:
    return frozenset(name for name, kind in (precision or {}).items() if kind == "int8")


def _is_random(node: Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
