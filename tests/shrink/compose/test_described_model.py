"""Models as data: written and read back the same, and files of a stranger that want more than that refused."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from tests.plain_models import PLAIN, plain
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from flatout.core.errors import CheckpointError, UsageError
from flatout.shrink.compose.described_model import describe_model, model_of_description, unknown_classes
from flatout.shrink.quantise import kernel
from flatout.shrink.quantise.layers import FewBits, FewBitsLayers

needs_kernel = pytest.mark.skipif(kernel.refusal() is not None, reason=str(kernel.refusal()))


def classes_of(model: nn.Module) -> list[type]:
    return [type(one) for one in model.modules()]


def read_back(value: Any, *classes: type) -> Any:
    return model_of_description(*describe_model(value), classes)


@pytest.mark.parametrize("name", PLAIN)
def test_a_model_comes_back_the_same_in_mode_names_and_every_bit(name: str) -> None:
    made = plain(name)
    made.module.eval()
    made.module.get_parameter(next(n for n, _ in made.module.named_parameters())).requires_grad_(False)

    found = read_back(made.module, *classes_of(made.module))

    assert type(found) is type(made.module)
    assert not found.training
    assert vars(found).keys() == vars(made.module).keys()
    assert [p.requires_grad for p in found.parameters()] == [p.requires_grad for p in made.module.parameters()]
    assert all(map(torch.equal, found.state_dict().values(), made.module.state_dict().values()))
    one, two = made.module(*made.inputs), found(*made.inputs)
    pairs = [(one, two)] if isinstance(one, Tensor) else [*zip(one, two, strict=True)]
    assert all(torch.equal(a, b) for a, b in pairs)


class Tied(nn.Module):
    """Shared parameters, functions, a table of settings and another memory format, as models have them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.activation = F.gelu
        self.kind = nn.LayerNorm
        self.settings = {
            "sizes": (1, 2.5, float("inf")),
            "dtype": torch.bfloat16,
            3: [None, {True}, torch.Size((2, 3))],
        }
        self.ordered = OrderedDict(b=1, a=2)
        self.image = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.register_buffer("steps", torch.arange(4), persistent=False)
        self.itself = [self.settings]

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.activation(self.first(x)))


def test_what_is_shared_stays_shared_and_settings_keep_their_types() -> None:
    model, x = Tied(), torch.randn(2, 6)
    found = read_back(model, Tied)
    assert torch.equal(found(x), model(x))
    assert found.second.weight is found.first.weight
    assert found.itself[0] is found.settings
    assert found.settings == model.settings and type(found.settings[3][2]) is torch.Size
    assert type(found.ordered) is OrderedDict and list(found.ordered) == ["b", "a"]
    assert (found.activation, found.kind) == (F.gelu, nn.LayerNorm)
    assert found.image.weight.stride() == model.image.weight.stride()
    assert "steps" not in found.state_dict() and torch.equal(found.steps, model.steps)
    found.first.weight.data.zero_()
    assert model.first.weight.any()


PLAIN_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.tuples(inner, inner) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=20,
)


@given(PLAIN_VALUES)
def test_plain_values_come_back_equal_and_of_their_types(value: Any) -> None:
    found = read_back([value])[0]
    assert found == value
    assert repr(found) == repr(value)  # 1, 1.0 and True, which are equal


@needs_kernel
@pytest.mark.parametrize("bits", [4, 8])
def test_layers_in_few_bits_come_back(bits: Any) -> None:
    model = nn.Sequential(FewBits(torch.randn(20, 70), torch.randn(20), bits=bits, terms=2)).eval()
    x = torch.randn(3, 70)
    expected = model(x)  # which leaves addresses in the layer
    found = read_back(model)
    assert torch.equal(found(x), expected)
    other = nn.Sequential(FewBits(torch.randn(20, 70), torch.randn(20), bits=bits, terms=2))
    found.load_state_dict(other.state_dict())
    assert torch.equal(found(x), other(x))


def without_hooks_or_names() -> nn.Module:
    model = nn.Linear(2, 2)
    model.register_forward_hook(lambda *_: None)
    return model


def with_attribute(value: Any) -> nn.Module:
    model = nn.Linear(2, 2)
    model.extra = value
    return model


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (lambda: with_attribute(lambda x: x), r"extra holds the function .*lambda"),
        (without_hooks_or_names, "holds hooks"),
        (lambda: with_attribute(torch.load), "extra holds the function load"),
        (lambda: with_attribute(torch.eye(2).to_sparse()), "layout torch.sparse_coo"),
        (lambda: with_attribute(torch.empty(2, device="meta")), "on meta"),
        (lambda: with_attribute(2**80), "cannot be described"),
        (lambda: with_attribute(iter([1])), "extra holds the list_iterator"),
        (lambda: parametrizations.weight_norm(nn.Linear(2, 2)), "whose attributes cannot be taken"),
    ],
)
def test_what_is_code_is_refused_with_its_place(model: Callable[[], nn.Module], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        describe_model(model())


# -- files of a stranger -------------------------------------------------------------------------------------------------------


def changed(model: Any, change: Callable[[list[dict[str, Any]]], None]) -> Any:
    """The model read back after the nodes of its description were changed."""
    text, tensors = describe_model(model)
    tree = json.loads(text)
    change(tree["nodes"])
    return model_of_description(json.dumps(tree).encode(), tensors)


def node_named(nodes: list[dict[str, Any]], name: str) -> dict[str, Any]:
    return next(node for node in nodes if node.get("name", "").endswith(name))


@pytest.mark.parametrize(
    "name", ["posix.system", "subprocess.Popen", "builtins.eval", "pathlib.Path", "torch.nn.Module.load"]
)
@pytest.mark.parametrize("kind", ["object", "class"])
def test_a_class_that_was_not_passed_is_not_looked_for(name: str, kind: str) -> None:
    def change(nodes: list[dict[str, Any]]) -> None:
        node_named(nodes, "Linear").update(name=name, kind=kind)

    with pytest.raises(CheckpointError, match=r"neither torch's nor flatout's"):
        changed(nn.Linear(2, 2), change)


@pytest.mark.parametrize(
    "name", ["torch.load", "torch.save", "torch.hub.load", "torch.compile", "os.system", "torch.from_file"]
)
def test_functions_that_do_more_than_compute_are_none(name: str) -> None:
    with pytest.raises(CheckpointError, match="damaged"):
        changed(with_attribute(F.relu), lambda nodes: node_named(nodes, ".relu").update(name=name))


def test_a_class_of_the_users_is_found_by_its_name_alone_and_named_when_it_is_missing() -> None:
    text, tensors = describe_model(Tied())
    assert unknown_classes(text) == [f"{__name__}.Tied"]
    with pytest.raises(CheckpointError, match=r"pass it if it is yours: classes=\[Tied\]"):
        model_of_description(text, tensors)
    elsewhere = text.replace(f"{__name__}.Tied".encode(), b"__main__.Tied")
    assert type(model_of_description(elsewhere, tensors, [Tied])) is Tied


def set_attribute(name: str, value: Any) -> Callable[[list[dict[str, Any]]], None]:
    """Set a plain attribute of the first layer."""

    def change(nodes: list[dict[str, Any]]) -> None:
        layer = next(n for n in nodes if n["kind"] == "object" and n["name"].endswith(("FewBits", "FewBitsLayers")))
        nodes += [{"kind": "value", "value": name}, {"kind": "value", "value": value}]
        layer["keys"].append(len(nodes) - 2)
        layer["items"].append(len(nodes) - 1)

    return change


@needs_kernel
@pytest.mark.parametrize(
    ("name", "value"),
    [("num_inputs", 4096), ("num_outputs", 4096), ("num_outputs", -16), ("group", 64), ("group", 8), ("terms", 9)],
)
def test_sizes_by_which_native_code_reads_are_those_of_the_tensors(name: str, value: int) -> None:
    model = FewBits(torch.randn(20, 70), None, bits=8, terms=2)
    found = changed(model, set_attribute(name, value))
    with pytest.raises(UsageError, match=r"few bits|few-bit"):
        found(torch.zeros(1, found.num_inputs))


@needs_kernel
def test_addresses_in_a_file_are_forgotten() -> None:
    model = FewBits(torch.randn(20, 70), None, bits=8, terms=2)
    found = changed(model, set_attribute("_call", 4096))
    assert torch.equal(found(torch.ones(1, 70)), model(torch.ones(1, 70)))


@needs_kernel
@pytest.mark.parametrize(("name", "value"), [("num_state", 64), ("_has_cell", False)])
def test_recurrent_layers_whose_matrices_do_not_fit_are_refused(name: str, value: Any) -> None:
    found = changed(FewBitsLayers(nn.LSTM(5, 8), terms=2), set_attribute(name, value))
    with pytest.raises(UsageError, match="do not fit"):
        found(torch.zeros(3, 1, 5))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda nodes: nodes.clear(), "is empty"),
        (lambda nodes: nodes.__setitem__(0, {"kind": "tuple", "items": [0]}), "holds itself"),
        (lambda nodes: nodes.__setitem__(0, {"kind": "tuple", "items": [10**6]}), "not there"),
        (lambda nodes: nodes[0]["items"].pop(), "more keys than items"),
        (lambda nodes: nodes[0]["items"].__setitem__(0, -1), "."),
        (lambda nodes: node_named(nodes, "Linear").update(keys=[0], items=[0]), "."),
        (lambda nodes: node_named(nodes, "t0").update(device="cuda:nonsense"), "."),
        (lambda nodes: node_named(nodes, "t0").update(name="t9"), "damaged"),
        (lambda nodes: node_named(nodes, "t0").update(kind="dtype", name="torch.load"), "damaged"),
    ],
)
def test_damage_is_an_error_of_ours(change: Callable[[list[dict[str, Any]]], None], why: str) -> None:
    with pytest.raises(CheckpointError, match=why):
        changed(nn.Linear(2, 2), change)


def test_a_table_of_parameters_holds_parameters() -> None:
    def change(nodes: list[dict[str, Any]]) -> None:
        for node in nodes:
            if node["kind"] == "parameter":
                node["kind"] = "tensor"

    with pytest.raises(CheckpointError, match="_parameters of a Linear holds something else"):
        changed(nn.Linear(2, 2), change)


@pytest.mark.slow
@pytest.mark.long
def test_a_long_chain_of_tuples_is_read_in_a_moment() -> None:
    nodes = [{"kind": "tuple", "items": [i + 1]} for i in range(200_000)] + [{"kind": "value", "value": 1}]
    text, tensors = json.dumps({"nodes": nodes}).encode(), describe_model([])[1]
    found = model_of_description(text, tensors)
    for _ in range(200_000):
        (found,) = found
    assert found == 1
