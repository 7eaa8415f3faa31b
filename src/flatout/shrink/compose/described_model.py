"""A model as data that loads without running code: its tree of modules and their attributes as JSON, its tensors as safetensors.

What a pickle does by calling whatever it names, this does for few things: plain values, containers of them, tensors, torch's own
layers, some of flatout's, functions of torch that take tensors, and classes that the caller passes.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FunctionType
from typing import Any, Final, Literal, NoReturn

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor, nn

from flatout.core.errors import CheckpointError, FlatoutError, UsageError
from flatout.core.records.record import Record, from_json, to_json

Kind = Literal[
    "value",
    "float",
    "dict",
    "ordered-dict",
    "list",
    "tuple",
    "set",
    "size",
    "tensor",
    "parameter",
    "dtype",
    "device",
    "function",
    "class",
    "object",
]
Layout = Literal["contiguous", "channels-last", "channels-last-3d"]
_FORMATS: Final[dict[Layout, torch.memory_format]] = {
    "contiguous": torch.contiguous_format,
    "channels-last": torch.channels_last,
    "channels-last-3d": torch.channels_last_3d,
}
_MODULE: Final = nn.Module()
_FIXED: Final[Mapping[str, Callable[..., Any]]] = {"tuple": tuple, "size": torch.Size, "set": set}
"""Kinds that cannot be filled later; a set could be, and its items have to be hashable first."""
_TABLES: Final = {"_parameters": nn.Parameter, "_buffers": Tensor, "_modules": nn.Module}
_REDUCE: Final = ("__reduce__", "__reduce_ex__")
_NOT_BY_ATTRIBUTES: Final = (
    dict,
    list,
    tuple,
    set,
    frozenset,
    str,
    bytes,
    bytearray,
    int,
    float,
    complex,
    FunctionType,
)
"""What is not all in its attributes, a class that is derived from it neither."""
_DTYPES: Final = {str(one): one for one in vars(torch).values() if isinstance(one, torch.dtype)}
_HOOKS: Final = tuple(name for name in vars(_MODULE) if name.endswith("_hooks") or "_hooks_" in name)


class DescribedPart(Record, frozen=True, kw_only=True, omit_defaults=True):
    """One thing of a described model; `keys` and `items` are indices of other nodes."""

    kind: Kind
    value: bool | int | float | str | None = None
    name: str = ""
    """Of a tensor in the file beside, a dtype, a device, a function, a class, or the class of an object."""
    keys: tuple[int, ...] = ()
    items: tuple[int, ...] = ()
    requires_grad: bool = False
    device: str = "cpu"
    layout: Layout = "contiguous"


class DescribedModel(Record, frozen=True, kw_only=True):
    """A value and all that it is made of; the first node is the value itself."""

    nodes: tuple[DescribedPart, ...]


def describe_model(value: Any, *names: str) -> tuple[bytes, bytes]:
    """A model, or a nest of them and of tensors, as JSON and as safetensors; `names` are for a tuple's items in messages.

    Raises UsageError where a part of it is code, or of a kind that cannot be described; the message says where.
    """
    writer = _Writer()
    try:
        writer.add(value, "the model", names)
        return to_json(DescribedModel(nodes=tuple(writer.nodes))), save_tensors(writer.tensors)
    except RecursionError as e:
        raise UsageError("the model is nested too deep to be described") from e
    except (
        SafetensorError,
        KeyError,
        ValueError,
        OverflowError,
    ) as e:  # a dtype or a number that the formats do not have
        raise UsageError(f"the model cannot be described: {e}") from e


def model_of_description(text: bytes, tensors: bytes, classes: Iterable[type] = ()) -> Any:
    """What `describe_model` wrote, built from torch's layers, flatout's and objects of these classes, none of which is called.

    Raises CheckpointError where the files are damaged, or have an object of another class.
    """
    try:
        nodes = from_json(text, DescribedModel).nodes
        return _Reader(nodes, load_tensors(tensors), classes).value()
    except CheckpointError:
        raise
    except (FlatoutError, SafetensorError, RecursionError) as e:
        raise CheckpointError(f"the description of a model cannot be read: {e}") from e
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError) as e:
        raise CheckpointError(f"the description of a model is damaged: {type(e).__name__}: {e}") from e


def unknown_classes(text: bytes) -> list[str]:
    """The names of a description's classes that are neither torch's nor flatout's, and have to be passed to load it.

    Raises RecordError where it cannot be read.
    """
    nodes = from_json(text, DescribedModel).nodes
    return sorted({n.name for n in nodes if n.kind in ("object", "class") and n.name not in _known_classes()})


# -- what may stand in a description -------------------------------------------------------------------------------------------


def class_path(thing: type | Callable[..., Any]) -> str:
    """Module and name of a class or a function."""
    return f"{thing.__module__}.{thing.__qualname__}"


@functools.cache
def _known_classes() -> Mapping[str, type]:
    """Torch's layers, and those of flatout's that are plain data or check what they are filled with."""
    from flatout.blocks.inference.rolling_encoder import RollingEncoder
    from flatout.shrink.quantise.layers import FewBits, FewBitsCell, FewBitsConv, FewBitsLayers
    from flatout.shrink.quantise.torch_layers import Bf16, Fp8

    ours: tuple[type, ...] = (FewBits, FewBitsCell, FewBitsConv, FewBitsLayers, Bf16, Fp8, RollingEncoder)
    layers = (one for one in vars(nn).values() if isinstance(one, type) and issubclass(one, nn.Module))
    inner = (nn.modules.linear.NonDynamicallyQuantizableLinear,)
    return {class_path(one): one for one in (*layers, *inner, *ours)}


@functools.cache
def _known_functions() -> Mapping[str, Callable[..., Any]]:
    """Functions on tensors, such as activations, by name: those that torch lets a subclass of Tensor override, and no others."""
    allowed = torch.overrides.get_overridable_functions()
    found: dict[str, Callable[..., Any]] = {}
    for space in (torch, nn.functional):
        takes_tensors = {id(function) for function in allowed[space]}
        found |= {f"{space.__name__}.{name}": one for name, one in vars(space).items() if id(one) in takes_tensors}
    return found


@functools.cache
def _function_names() -> Mapping[int, str]:
    return {id(function): name for name, function in _known_functions().items()}


# -- writing -------------------------------------------------------------------------------------------------------------------


class _Writer:
    """Goes through a model and writes a node for each thing, once."""

    def __init__(self) -> None:
        self.nodes: list[DescribedPart] = []
        self.tensors: dict[str, Tensor] = {}
        self._indices: dict[object, int] = {}
        self._alive: list[Any] = []

    def add(self, value: Any, where: str, names: Sequence[str] = ()) -> int:
        """The index of the value's node; `where` and `names`, of the value and of its items, are for messages."""
        key = (type(value), value) if value is None or isinstance(value, bool | int | str) else id(value)
        if key in self._indices:
            return self._indices[key]
        index = self._indices[key] = len(self.nodes)
        self._alive.append(value)  # so that its identity stays its own
        self.nodes.append(DescribedPart(kind="value"))
        self.nodes[index] = self._node(value, where, names)
        return index

    def _node(self, value: Any, where: str, names: Sequence[str]) -> DescribedPart:
        kind = type(value)
        if kind is int and not -(2**63) < value < 2**63:
            _refuse(where, f"the number {value}")
        if kind in (bool, int, str, type(None)):
            return DescribedPart(kind="value", value=value)
        if kind is float:
            return DescribedPart(kind="float", name=repr(value))
        if kind in (dict, OrderedDict):
            keys = tuple(self.add(key, f"a key of {where}") for key in value)
            items = tuple(self.add(item, f"{where}[{key!r}]") for key, item in value.items())
            return DescribedPart(kind="dict" if kind is dict else "ordered-dict", keys=keys, items=items)
        if kind in (list, tuple, set, torch.Size):
            name: Any = "size" if kind is torch.Size else kind.__name__
            return DescribedPart(kind=name, items=self._items(value, where, names))
        if isinstance(value, torch.dtype | torch.device):
            return DescribedPart(kind="dtype" if isinstance(value, torch.dtype) else "device", name=str(value))
        if isinstance(value, Tensor):
            return self._tensor(value, where)
        if isinstance(value, type):
            return DescribedPart(kind="class", name=self._class_name(value, where))
        if id(value) in _function_names():
            return DescribedPart(kind="function", name=_function_names()[id(value)])
        return self._object(value, where)

    def _items(self, values: Iterable[Any], where: str, names: Sequence[str]) -> tuple[int, ...]:
        return tuple(self.add(item, names[i] if names else f"{where}[{i}]") for i, item in enumerate(values))

    def _tensor(self, value: Tensor, where: str) -> DescribedPart:
        if (
            type(value) not in (Tensor, nn.Parameter)
            or value.layout is not torch.strided
            or value.is_quantized
            or value.device.type == "meta"
        ):
            _refuse(where, f"a {type(value).__name__} of layout {value.layout} on {value.device}")
        name = f"t{len(self.tensors)}"
        layouts: list[Layout] = [layout for layout, one in _FORMATS.items() if _has_format(value, one)]
        self.tensors[name] = value.detach().cpu().contiguous().clone()
        return DescribedPart(
            kind="parameter" if isinstance(value, nn.Parameter) else "tensor",
            name=name,
            requires_grad=value.requires_grad and (value.is_leaf or isinstance(value, nn.Parameter)),
            device=str(value.device),
            layout=layouts[0] if layouts else "contiguous",
        )

    def _object(self, value: Any, where: str) -> DescribedPart:
        kind = type(value)
        if isinstance(value, _NOT_BY_ATTRIBUTES) or any(getattr(kind, n) is not getattr(object, n) for n in _REDUCE):
            _refuse(where, f"the {kind.__name__} {getattr(value, '__qualname__', '')}".rstrip())
        name = self._class_name(kind, where)
        try:
            state = value.__getstate__() or {}
        except (
            RuntimeError,
            TypeError,
            ValueError,
            AttributeError,
        ) as e:  # the class's own word, as parametrized layers have it
            _refuse(where, f"a {kind.__name__}, whose attributes cannot be taken ({str(e)[:120]})")
        if not isinstance(state, dict):
            _refuse(where, f"a {kind.__name__} without plain attributes")
        if isinstance(value, nn.Module):
            state = _without_hooks(state, where, is_ours=kind.__module__.startswith("flatout."))
        keys = tuple(self.add(key, where) for key in state)
        items = tuple(self.add(item, f"{where}.{key}") for key, item in state.items())
        return DescribedPart(kind="object", name=name, keys=keys, items=items)

    @staticmethod
    def _class_name(kind: type, where: str) -> str:
        if "<locals>" in kind.__qualname__ or kind.__module__ == "builtins":
            _refuse(where, f"an object of the class {kind.__qualname__}")
        return class_path(kind)


def _without_hooks(state: dict[str, Any], where: str, *, is_ours: bool) -> dict[str, Any]:
    """A module's attributes without its hooks, which are functions. Raises UsageError where there are any of the user's."""
    hooks = next((name for name in _HOOKS if state.get(name)), None)
    if hooks is not None and not is_ours:
        _refuse(f"{where}.{hooks}", "hooks")
    return {name: value for name, value in state.items() if name not in _HOOKS}


def _has_format(value: Tensor, memory_format: torch.memory_format) -> bool:
    if memory_format is not torch.contiguous_format and value.dim() != (
        4 if memory_format is torch.channels_last else 5
    ):
        return False
    return value.is_contiguous(memory_format=memory_format)


def _refuse(where: str, what: str) -> NoReturn:
    raise UsageError(f"{where} holds {what}, which cannot be described without a pickle")


# -- reading -------------------------------------------------------------------------------------------------------------------


class _Reader:
    """Builds what the nodes describe: first what needs nothing else, then tuples, then what is filled, children first."""

    def __init__(self, nodes: Sequence[DescribedPart], tensors: Mapping[str, Tensor], classes: Iterable[type]) -> None:
        self._nodes = nodes
        self._tensors = tensors
        passed = [*classes]
        self._classes = {**_known_classes(), **{class_path(one): one for one in passed}}
        self._by_name = {one.__qualname__: one for one in passed}
        self._values: dict[int, Any] = {}

    def value(self) -> Any:
        if not self._nodes:
            raise CheckpointError("the description of a model is empty")
        for index, node in enumerate(self._nodes):
            if node.kind not in _FIXED:
                self._values[index] = self._begun(node)
        self._build_fixed([i for i, node in enumerate(self._nodes) if node.kind in _FIXED])
        for index, node in enumerate(self._nodes):
            if node.kind in ("dict", "ordered-dict"):
                self._values[index].update(self._table(node))
            elif node.kind == "list":
                self._values[index].extend(self._values[i] for i in node.items)
        for index in reversed(range(len(self._nodes))):
            if self._nodes[index].kind == "object":
                _fill(self._values[index], self._table(self._nodes[index]))
        return self._values[0]

    def _begun(self, node: DescribedPart) -> Any:
        """A value that needs no other, or an empty one that is filled later."""
        match node.kind:
            case "value":
                return node.value
            case "float":
                return float(node.name)
            case "dict":
                return {}
            case "ordered-dict":
                return OrderedDict()
            case "list":
                return []
            case "dtype":
                return _DTYPES[node.name]
            case "device":
                return torch.device(node.name)
            case "function":
                return _known_functions()[node.name]
            case "class":
                return self._class(node.name)
            case "object":
                kind: Any = self._class(node.name)
                return kind.__new__(kind)
            case "tensor" | "parameter":
                return self._tensor(node)
        raise CheckpointError(f"a node is of the kind '{node.kind}'")

    def _class(self, name: str) -> type:
        found = self._classes.get(name) or self._by_name.get(name.rpartition(".")[2])
        if found is None:
            raise CheckpointError(
                f"it has objects of the class {name}, which is neither torch's nor flatout's; "
                f"pass it if it is yours: classes=[{name.rpartition('.')[2]}]"
            )
        return found

    def _tensor(self, node: DescribedPart) -> Tensor:
        device = torch.device(node.device)
        if device.type == "cuda" and not torch.cuda.is_available():
            device = torch.device("cpu")
        value = self._tensors[node.name].to(device, copy=False)
        if node.layout != "contiguous":
            value = value.contiguous(memory_format=_FORMATS[node.layout])
        if node.kind == "parameter":
            return nn.Parameter(value, requires_grad=node.requires_grad)
        return value.requires_grad_(node.requires_grad)

    def _build_fixed(self, indices: Sequence[int]) -> None:
        """Tuples, sizes and sets: each once its items are there, whatever the order; none can hold itself."""
        missing = {index: {i for i in self._nodes[index].items if i not in self._values} for index in indices}
        users: dict[int, list[int]] = {}
        for index, items in missing.items():
            for item in items:
                users.setdefault(item, []).append(index)
        ready = [index for index, items in missing.items() if not items]
        while ready:
            index = ready.pop()
            del missing[index]
            node = self._nodes[index]
            self._values[index] = _FIXED[node.kind](self._values[i] for i in node.items)
            for user in users.get(index, ()):
                missing[user].discard(index)
                if not missing[user]:
                    ready.append(user)
        if missing:
            raise CheckpointError("a tuple in the description of a model holds itself, or what is not there")

    def _table(self, node: DescribedPart) -> dict[Any, Any]:
        if len(node.keys) != len(node.items):
            raise CheckpointError("a table in the description of a model has more keys than items, or fewer")
        return {self._values[key]: self._values[item] for key, item in zip(node.keys, node.items, strict=True)}


def _fill(thing: Any, state: dict[Any, Any]) -> None:
    """Set the attributes, as unpickling would: by the class's own method where it has one."""
    if not all(isinstance(key, str) for key in state):
        raise CheckpointError("attributes of an object in the description of a model have no names")
    if isinstance(thing, nn.Module):
        fresh = {**vars(nn.Module()), **{name: value for name, value in state.items() if name not in _HOOKS}}
        for name, kind in _TABLES.items():
            if not _is_table(fresh[name], kind):
                raise CheckpointError(f"{name} of a {type(thing).__name__} holds something else")
        thing.__setstate__(fresh)
    elif hasattr(thing, "__setstate__"):
        thing.__setstate__(state)
    else:
        thing.__dict__.update(state)


def _is_table(value: object, kind: type) -> bool:
    return isinstance(value, dict) and all(
        isinstance(name, str) and (one is None or isinstance(one, kind)) for name, one in value.items()
    )
