"""An exported model, its carried state, and the C that it becomes."""

from __future__ import annotations

import copy
import inspect
import io
import json
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import Node

from flatout.blocks.inference.native import emit
from flatout.blocks.inference.native.event import StateLayout
from flatout.blocks.inference.native.library import Generated
from flatout.blocks.inference.native.lowering import Lowering, StateWindow, other_windows, ring, shift_window
from flatout.blocks.inference.native.nodes import native_dtype_name, shape_of, source_line
from flatout.blocks.inference.native.operator_table import decompositions
from flatout.blocks.inference.native.statements import AdvanceRing, Map, MatrixProduct
from flatout.blocks.inference.native.values import Buffer, Const, Kind, View, whole
from flatout.core.errors import NativeError, UsageError
from flatout.core.records.native import NAME, NativeLayer, Port
from flatout.core.tensors import nests as pytree


class Program:
    """A model as a graph of core ATen operators. `state` names the forward parameters whose values are carried."""

    def __init__(self, exported: ExportedProgram, state: tuple[str, ...], name: str = "model") -> None:
        if not NAME.match(name):
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
        table = decompositions()
        try:
            own = copy.deepcopy(model).eval()  # what becomes of the model later does not change the program
            with warnings.catch_warnings(), torch.no_grad():
                warnings.simplefilter("ignore")
                exported = torch.export.export(own, tuple(example_inputs), strict=False)
                exported = exported.run_decompositions(table)
        except Exception as e:
            raise NativeError(
                f"torch.export cannot take this model: {str(e)[:1500]}; what it needs is in torch's guide to export"
            ) from e
        return cls(exported, names, name)

    def save(self, path: Path) -> None:
        """Write a file of torch.export, with the state's names in it."""
        buffer = io.BytesIO()
        torch.export.save(self.exported, buffer, extra_files={"flatout.json": json.dumps([self.name, self.state])})
        path.write_bytes(buffer.getvalue())

    @classmethod
    def load(cls, path: Path) -> Program:
        """Read a program that `save` wrote."""
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
            problem = f"has {unknown}, which the model has not" if unknown else f"lacks {missing}"
            raise UsageError(f"the state dict {problem}; give the model's own names")
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

    def products(self) -> list[tuple[str, MatrixProduct]]:
        """Each product with a weight, by the parameter's name."""
        generation = _Generation(self, frozenset())
        generation.run()
        return generation.products()

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
        names = [
            s.arg.name for s in self._signature.input_specs if s.kind is InputKind.USER_INPUT and hasattr(s.arg, "name")
        ]
        spec = self.exported.call_spec.in_spec
        args, _ = pytree.tree_unflatten(list(range(spec.num_leaves)), spec)
        parameters = self._parameters(len(args))
        owner: dict[int, str] = {}
        for parameter, arg in zip(parameters, args, strict=True):
            owner.update(dict.fromkeys(pytree.tree_leaves(arg), parameter))
        return [(owner[i], nodes[name], name) for i, name in enumerate(names)]

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
        self.initial: dict[Node, View] = {}
        self.windows: dict[Node, tuple[StateWindow, Buffer]] = {}
        kinds = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)
        self.names = {
            str(s.arg.name): str(s.target)
            for s in program._signature.input_specs
            if s.kind in kinds and str(s.target) not in program.carried_buffers()
        }
        """Of placeholders that hold parameters, buffers and constants: what they are called in the state dict."""

    def run(self) -> Generated:
        self._refuse_dynamic()
        self._ports()
        tensors = self.folded({**self.program.tensors(), **self.program.constants()})
        plain = self._without_weights(tensors)
        constants = {node: Const(t, is_weight=node not in plain) for node, t in tensors.items()}
        ends = [node for node, _ in self.outputs] + self.new_states
        self.low = low = Lowering(self.nodes, ends, constants, self.initial)
        low.windows = self.windows
        low.int8 = frozenset(n.name for n in tensors if self._weight_name(n.name) in self.int8)
        for node, buffer in self.outputs:
            if node.op == "call_function" and node not in low.wanted:
                low.wanted[node] = whole(buffer, shape_of(node))
        low.run()
        self._finish(low)
        return self._generated(low)

    def products(self) -> list[tuple[str, MatrixProduct]]:
        """Each product with a weight, by the parameter's name."""
        return [(self._weight_name(source), product) for source, product in self.low.layers]

    # ------------------------------------------------------------------------------------------------ inputs, outputs, state

    def _refuse_dynamic(self) -> None:
        for node in self.nodes:
            if node.op in ("output", "get_attr"):
                continue
            value = node.meta.get("val")
            for tensor in value if isinstance(value, (tuple, list)) else [value]:
                if isinstance(tensor, (torch.SymInt, torch.SymFloat, torch.SymBool)):
                    raise NativeError(
                        f"operator {node.target} takes a number out of a tensor{source_line(node)}, and what it decides must"
                        " be known when the model is built; index by a tensor of one dimension instead"
                    )
                if isinstance(tensor, Tensor) and not all(isinstance(n, int) for n in tensor.shape):
                    raise NativeError(
                        f"'{node.name}' has the shape {tuple(tensor.shape)}, which changes{source_line(node)};"
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
        results, new = users[: len(users) - len(carried)], users[len(users) - len(carried) :]
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
                buffer = _buffer(node, f"input '{name}'", f"x{len(self.inputs)}", "in")
                self.inputs.append((node, buffer))
                self.initial[node] = whole(buffer, shape_of(node))
        self.outputs = [(node, _buffer(node, "an output", f"y{i}", "out")) for i, node in enumerate(results)]

    def _examples(self) -> dict[str, Tensor]:
        example = self.program.exported.example_inputs
        flat = pytree.tree_leaves(example) if example is not None else []
        inputs = self.program.flat_inputs()
        return {name: t for (_, _, name), t in zip(inputs, flat, strict=False) if isinstance(t, Tensor)}

    def _add_state(self, name: str, node: Node, new: Node, initial: Tensor | None, at: int) -> int:
        buffer = _buffer(node, f"state '{name}'", f"s{len(self.states)}", "state", at)
        old, after = node.meta["val"], new.meta["val"]
        if old.shape != after.shape or old.dtype != after.dtype:
            raise UsageError(
                f"state '{name}' is {tuple(old.shape)} of {old.dtype}, and its new value {tuple(after.shape)} of"
                f" {after.dtype}; return one of the same shape"
            )
        if not old.is_contiguous():
            raise NativeError(f"state '{name}' has strides {old.stride()}; carry one that is contiguous")
        window = shift_window(node, new)
        view = whole(buffer, shape_of(node))
        if window is not None and buffer.dtype == "float32":
            buffer, view = ring(buffer.name, buffer.dtype, tuple(old.shape), window.dim, at)
            for each in (window, *other_windows(window, node)):
                self.windows[each.joined] = (each, buffer)
        first = b"" if initial is None or not bool(initial.any()) else initial.detach().numpy().tobytes()
        port = Port(name=name, dtype=buffer.dtype, shape=tuple(old.shape))
        self.states.append(StateLayout(port, buffer, first, view))
        self.new_states.append(new)
        self.initial[node] = view
        return at + buffer.num_bytes

    # ---------------------------------------------------------------------------------------------------------- constants

    def folded(self, tensors: Mapping[str, Tensor]) -> dict[Node, Tensor]:
        """All that follows from weights alone, computed."""
        found = {self.named[node]: tensors[name].detach().cpu() for node, name in self.names.items()}
        with torch.no_grad():
            for node in self.nodes:
                if node.op != "call_function" or not isinstance(node.meta.get("val"), Tensor) or _is_random(node):
                    continue
                if all(source in found for source in node.all_input_nodes):
                    args, options = pytree.tree_map_only(Node, found.__getitem__, (node.args, node.kwargs))
                    result = node.target(*args, **options)  # type: ignore[operator]
                    if isinstance(result, Tensor):
                        found[node] = result
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
        advances = [
            AdvanceRing(layout.buffer, "a window moves on") for layout in self.states if layout.buffer.kind == "ring"
        ]
        for layout, node in zip(self.states, self.new_states, strict=True):
            if layout.buffer.kind == "ring":
                continue
            expr = low.expression(node, None, layout.view.shape)
            if isinstance(expr, View) and expr.buffer.kind in ("state", "ring"):
                if expr == layout.view:
                    continue
                expr = low.materialised(expr)
            moved.append(Map(layout.view, expr, "is carried"))
        low.body.statements += [*moved, *advances]

    def _generated(self, low: Lowering) -> Generated:
        inputs = [Port(name=n.name, dtype=b.dtype, shape=shape_of(n)) for n, b in self.inputs]
        outputs = [
            Port(name=f"y{i}" if len(self.outputs) > 1 else "y", dtype=b.dtype, shape=shape_of(n))
            for i, (n, b) in enumerate(self.outputs)
        ]
        weights = low.block.packed(low.block._constants)
        input_buffers, out = [b for _, b in self.inputs], [b for _, b in self.outputs]
        ports = inputs, outputs
        code, header = emit.source(self.program.name, low.body, input_buffers, out, self.states, len(weights), ports)
        layers = [
            NativeLayer(
                name=name,
                rows=p.dst.shape[0],
                inputs=p.k,
                outputs=p.n,
                weight_bytes=p.w.buffer.num_bytes,
                precision="int8" if p.scales is not None else "float32",
            )
            for name, p in self.products()
        ]
        taken = tuple(inputs), tuple(outputs), tuple(s.port for s in self.states)
        return Generated(self.program.name, code, header, weights, *taken, tuple(layers))

    def _weight_name(self, source: str) -> str:
        """The parameter that a folded constant comes from."""
        node = self.named[source]
        while node.name not in self.names and node.all_input_nodes:
            node = node.all_input_nodes[0]
        return self.names.get(node.name, source)


def _buffer(node: Node, what: str, name: str, kind: Kind, offset: int = 0) -> Buffer:
    """Memory for an input, an output or a state. Raises NativeError for what native code does not take."""
    value = node.meta["val"]
    try:
        dtype = native_dtype_name(value.dtype)
    except NotImplementedError as e:
        raise NativeError(f"{what} has {e}{source_line(node)}") from e
    if value.numel() == 0:
        raise NativeError(f"{what} is empty{source_line(node)}")
    return Buffer(name, kind, dtype, value.numel(), offset)


def _int8(precision: Mapping[str, str] | None) -> frozenset[str]:
    return frozenset(name for name, kind in (precision or {}).items() if kind == "int8")


def _is_random(node: Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
