from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from flatout.blocks.training import rows_as_read
from flatout.blocks.training.rows_as_read import compute_rows_as_read, reads_rows
from flatout.core.errors import UsageError

Read = Callable[[Tensor], Tensor]


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of the inputs of all products so far."""
    shapes: list[tuple[int, ...]] = []
    original = rows_as_read.F.linear

    def linear(source: Tensor, *rest: Any) -> Tensor:
        shapes.append(tuple(source.shape))
        return original(source, *rest)

    monkeypatch.setattr(rows_as_read, "F", type("F", (), {"linear": staticmethod(linear)}))
    return shapes


@pytest.fixture
def layer() -> Iterator[nn.Linear]:
    torch.manual_seed(0)
    linear = nn.Linear(6, 5)
    undo = compute_rows_as_read(linear)
    yield linear
    undo()
    assert type(linear(torch.zeros(2, 6))) is Tensor


def gradients(layer: Callable[[Tensor], Tensor], weights: nn.Linear, read: Read) -> list[Tensor]:
    x = torch.linspace(-1, 1, 3 * 8 * 6).view(3, 8, 6).requires_grad_()
    result = read(layer(x))
    return [result.detach(), *torch.autograd.grad(result.float().square().sum(), [x, *weights.parameters()])]


def plain(weights: nn.Linear) -> Callable[[Tensor], Tensor]:
    return lambda x: torch.nn.functional.linear(x, weights.weight, weights.bias)


@pytest.mark.parametrize(
    ("read", "shapes"),
    [
        (lambda y: y[:, 4:].contiguous().view(-1, 5), [(3, 4, 6)]),
        (lambda y: y.contiguous()[:, -1], [(3, 6)]),
        (lambda y: y[torch.tensor([[True] + 7 * [False]] * 3)], [(3, 6)]),
        (lambda y: y[..., -1, :], [(3, 6)]),
        (lambda y: torch.stack([y[:, 0], y[:, 1]]), [(3, 6), (3, 6)]),
        (lambda y: torch.stack([y[:, t] for t in range(8)]), [(3, 6), (3, 6), (3, 8, 6)]),
        (lambda y: y.relu() + y, [(3, 8, 6)]),
        (lambda y: y[..., 2], [(3, 8, 6)]),
        (lambda y: y.view(-1, 5)[3:], [(3, 8, 6)]),
    ],
    ids=["second half", "last", "mask", "ellipsis", "two reads", "each row", "operators", "an output", "another shape"],
)
def test_rows_that_are_read_are_computed_and_all_is_as_before(
    layer: nn.Linear, computed: list[tuple[int, ...]], read: Read, shapes: list[tuple[int, ...]]
) -> None:
    found = gradients(layer, layer, read)
    assert computed == shapes
    for one, other in zip(found, gradients(plain(layer), layer, read), strict=True):
        torch.testing.assert_close(one, other)


def test_what_is_known_without_computing_is_answered_without(layer: nn.Linear, computed: list[tuple[int, ...]]) -> None:
    rows = layer(torch.zeros(3, 8, 6))
    assert isinstance(rows, Tensor)
    assert (rows.shape, rows.dim(), rows.size(1), rows.dtype, len(rows), rows.requires_grad) == (
        *((3, 8, 5), 3, 8, torch.float32, 3, True),
    )
    assert not computed


def test_rows_read_after_the_optimizers_step_have_the_weights_from_before(layer: nn.Linear) -> None:
    x = torch.randn(3, 8, 6)
    expected = plain(layer)(x).detach().clone()
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    rows = layer(x)
    rows[:, 4:].sum().backward()
    optimizer.step()
    torch.testing.assert_close(rows.detach(), expected)
    torch.testing.assert_close(layer(x)[:, 1].detach(), plain(layer)(x)[:, 1].detach())


def test_autocast_and_no_grad_are_those_of_the_call(layer: nn.Linear) -> None:
    x = torch.randn(3, 8, 6)
    with torch.autocast("cpu", torch.bfloat16):
        rows = layer(x)
    assert rows.dtype == rows[:, 1].dtype == torch.bfloat16
    with torch.no_grad():
        rows = layer(x)
    assert not rows[:, 1].requires_grad and not rows.requires_grad


class Doubled(torch.autograd.Function):
    """Reads its input behind the back of __torch_function__."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


def test_what_would_lose_gradients_or_read_changed_inputs_is_an_error(layer: nn.Linear) -> None:
    with pytest.raises(UsageError, match="never read by an index"):
        Doubled.apply(layer(torch.zeros(2, 6))).sum().backward()  # type: ignore[no-untyped-call]
    x = torch.zeros(2, 6)
    rows = layer(x)
    x.add_(1)
    with pytest.raises(UsageError, match="changed in place"):
        rows[0]
    with pytest.raises(UsageError, match=r"ReLU is no nn\.Linear"):
        compute_rows_as_read(nn.ReLU())  # type: ignore[arg-type]


INDICES = st.lists(
    st.one_of(st.just(slice(None)), st.just(slice(1, 3)), st.integers(0, 1), st.just(...)), min_size=1, max_size=4
).map(tuple)


@given(INDICES)
def test_an_index_that_reads_rows_gives_whole_rows(index: tuple[Any, ...]) -> None:
    numbers = torch.arange(3 * 4 * 5).view(3, 4, 5)
    if index.count(...) > 1 or len(index) - index.count(...) > 3 or not reads_rows(index, 3):
        return
    rows = torch.arange(3 * 4).view(3, 4, 1).expand(3, 4, 5)
    assert torch.equal(numbers[index], rows[index] * 5 + torch.arange(5))


def test_a_copy_of_the_model_computes_with_its_own_weights_and_can_be_saved() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    compute_rows_as_read(model[1])
    averaged = copy.deepcopy(model)
    loaded = pickle.loads(pickle.dumps(model))
    for one in (averaged, loaded):
        nn.init.zeros_(one[1].weight)
        nn.init.ones_(one[1].bias)
        torch.testing.assert_close(one(torch.randn(2, 4))[0], torch.ones(3))
    assert not torch.equal(model(torch.randn(2, 4))[0], torch.ones(3))
