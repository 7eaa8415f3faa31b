"""A model as torch.export sees it: an ATen graph over named parameters, in float64, in eval mode."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.export.graph_signature import ConstantArgument, InputKind
from torch.fx import GraphModule, Node

from flatout.core.errors import PlanError
from flatout.shrink.float64_reference import float64_copy, to_float64

_NAMED = (InputKind.PARAMETER, InputKind.BUFFER)


class ExportedGraph(NamedTuple):
    """`named` gives the parameter or buffer behind a placeholder, `inputs` the placeholders of the model's inputs in order."""

    module: GraphModule
    named: dict[str, str]
    constants: dict[str, object]
    inputs: tuple[str, ...]
    outputs: tuple[Node | None, ...]
    """Of the model's outputs, flat; None for one that is no tensor."""

    @property
    def nodes(self) -> Sequence[Node]:
        return list(self.module.graph.nodes)


def exported(model: nn.Module, inputs: Sequence[Tensor]) -> ExportedGraph:
    """The graph of a float64 copy of the model on these inputs.

    Raises PlanError where torch.export cannot follow the model's code.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what torch.export warns of is either harmless here or found by running
        try:
            program = torch.export.export(float64_copy(model), to_float64(tuple(inputs)), strict=False)
        except (RuntimeError, TypeError, ValueError, AssertionError, NotImplementedError, AttributeError) as e:
            first = str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__
            raise PlanError(
                f"{type(model).__name__} cannot be exported ({first}); what is pruned is found on its exported graph, "
                "so give a module whose forward torch.export can follow"
            ) from e
    specs = [spec for spec in program.graph_signature.input_specs if not isinstance(spec.arg, ConstantArgument)]
    by_kind = {kind: {s.arg.name: s.target for s in specs if s.kind == kind} for kind in InputKind}
    named = {n: str(target) for kind in _NAMED for n, target in by_kind[kind].items()}
    constants = {n: program.constants[str(target)] for n, target in by_kind[InputKind.CONSTANT_TENSOR].items()}
    module = program.graph_module
    num_outputs = len([s for s in program.graph_signature.output_specs if s.kind.name == "USER_OUTPUT"])
    returned = next(iter(reversed(module.graph.nodes))).args[0]
    assert isinstance(returned, (tuple, list))
    last = list(returned)[len(returned) - num_outputs :]
    outputs = tuple(node if isinstance(node, Node) else None for node in last)
    return ExportedGraph(module, named, constants, tuple(by_kind[InputKind.USER_INPUT]), outputs)


def line_of(node: Node) -> str:
    """The line of the model's own code that made the node: "file.py:12"; empty where it is not known."""
    trace = node.meta.get("stack_trace") or ""
    found = re.findall(r'File "([^"]+)", line (\d+)', trace)
    own = [(file, line) for file, line in found if "/torch/" not in file.replace("\\", "/")]
    if not own:
        return ""
    file, line = own[-1]
    return f"{file.rsplit('/', 1)[-1]}:{line}"


def owners_of(node: Node) -> list[str]:
    """The paths of all modules on the way to the node, the root first, last the one whose forward made it."""
    stack = node.meta.get("nn_module_stack") or {}
    return [str(path) for path, _ in stack.values()]
