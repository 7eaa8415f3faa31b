"""A model as torch.export sees it: an ATen graph over named parameters, in float64, in eval mode."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.export.graph_signature import ConstantArgument, InputKind
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from flatout.errors import PlanError


class Graph(NamedTuple):
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


def in_float64(model: nn.Module) -> nn.Module:
    """A copy in float64 and in eval mode."""
    return copy.deepcopy(model).double().eval()


def to_float64(inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Floating inputs in float64, the others as they are."""
    return tuple(x.detach().double() if x.is_floating_point() else x.detach() for x in inputs)


def exported(model: nn.Module, inputs: Sequence[Tensor]) -> Graph:
    """The graph of a float64 copy of the model on these inputs.

    Raises PlanError where torch.export cannot follow the model's code.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what torch.export warns of is either harmless here or found by running
        try:
            program = torch.export.export(in_float64(model), to_float64(inputs), strict=False)
        except (RuntimeError, TypeError, ValueError, AssertionError, NotImplementedError, AttributeError) as e:
            first = str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__
            raise PlanError(
                f"{type(model).__name__} cannot be exported ({first}); what is pruned is found on its exported graph, "
                "so give a module whose forward torch.export can follow"
            ) from e
    named: dict[str, str] = {}
    constants: dict[str, object] = {}
    given: list[str] = []
    for spec in program.graph_signature.input_specs:
        if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER) and spec.target is not None:
            named[spec.arg.name] = spec.target
        elif spec.kind == InputKind.CONSTANT_TENSOR and spec.target is not None:
            constants[spec.arg.name] = program.constants[spec.target]
        elif spec.kind == InputKind.USER_INPUT and not isinstance(spec.arg, ConstantArgument):
            given.append(spec.arg.name)
    module = program.graph_module
    num_outputs = len([s for s in program.graph_signature.output_specs if s.kind.name == "USER_OUTPUT"])
    returned = next(iter(reversed(module.graph.nodes))).args[0]
    assert isinstance(returned, (tuple, list))
    last = list(returned)[len(returned) - num_outputs :]
    return Graph(module, named, constants, tuple(given), tuple(n if isinstance(n, Node) else None for n in last))


def flat_outputs(outputs: object) -> list[object]:
    """What a model gave, as a flat list."""
    return list(pytree.tree_leaves(outputs))


def line_of(node: Node) -> str:
    """The line of the model's own code that made the node: "file.py:12"; empty where it is not known."""
    trace = node.meta.get("stack_trace") or ""
    found = re.findall(r'File "([^"]+)", line (\d+)', trace)
    own = [(file, line) for file, line in found if "/torch/" not in file.replace("\\", "/")]
    if not own:
        return ""
    file, line = own[-1]
    return f"{file.rsplit('/', 1)[-1]}:{line}"


def owner_of(node: Node) -> str:
    """The path of the module whose forward made the node; empty for the root."""
    stack = node.meta.get("nn_module_stack") or {}
    paths = [path for path, _ in stack.values()]
    return str(paths[-1]) if paths else ""


def owners_of(node: Node) -> list[str]:
    """The paths of all modules on the way to the node, the root first."""
    stack = node.meta.get("nn_module_stack") or {}
    return [str(path) for path, _ in stack.values()]
