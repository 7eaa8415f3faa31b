from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from tests.evidence_builder import EvidenceBuilder
from tests.lever_tools import found, pulled
from torch import Tensor, nn

from flatout.core.records.lever import Candidate, Refusal
from flatout.tune.levers.graph.reuse_result import LEVER


class Net(nn.Module):
    """Counts how often it really runs."""

    def __init__(self, extra: nn.Module | None = None) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.extra = extra if extra is not None else nn.Identity()
        self.num = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num += 1
        return self.extra(self.layer(x))  # type: ignore[no-any-return]


def step(net: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> tuple[float, float]:
    loss = net(x).square().mean()
    with torch.no_grad():
        score = float(net(x.clone()).sum())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item(), score


def trained() -> tuple[list[tuple[float, float]], Tensor, int]:
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    x = torch.randn(4, 3)
    told = [step(net, optimizer, x) for _ in range(5)]
    return told, net.layer.weight.detach().clone(), net.num


def test_loss_and_score_of_one_batch_take_one_call_and_are_the_same_bit_for_bit() -> None:
    told, weight, num = trained()
    with pulled(LEVER, module="Net") as hooks:
        told_now, weight_now, num_now = trained()
        assert hooks.done == [LEVER.id]
    assert told_now == told and torch.equal(weight, weight_now)
    assert (num, num_now) == (10, 5)
    assert "forward" in vars(Net) and Net.forward.__qualname__ == "Net.forward"


def test_gradients_of_two_uses_are_the_sum() -> None:
    class Pair(nn.Module):
        def __init__(self, shared: Net, *, sign: float) -> None:
            super().__init__()
            self.shared = shared
            self.head = nn.Linear(2, 1)
            self.sign = sign

        def forward(self, x: Tensor) -> Tensor:
            return self.sign * self.head(self.shared(x)).square().sum()  # type: ignore[no-any-return]

    def gradient() -> tuple[Tensor, int]:
        torch.manual_seed(0)
        shared = Net().double()
        actor, critic = Pair(shared, sign=1.0).double(), Pair(shared, sign=-0.5).double()
        x = torch.randn(4, 3, dtype=torch.float64)
        (actor(x) + critic(x)).backward()
        assert shared.layer.weight.grad is not None
        return shared.layer.weight.grad, shared.num

    expected, num = gradient()
    with pulled(LEVER, module="Pair.shared"):
        now, num_now = gradient()
    torch.testing.assert_close(now, expected, rtol=1e-12, atol=1e-12)
    assert (num, num_now) == (2, 1)


def set_through_data(net: Net, x: Tensor) -> None:
    net.layer.weight.data.add_(1)


def set_weight(net: Net, x: Tensor) -> None:
    with torch.no_grad():
        net.layer.bias.fill_(3)


def set_layer(net: Net, x: Tensor) -> None:
    net.layer = nn.Linear(3, 2)


def set_input(net: Net, x: Tensor) -> None:
    x.mul_(2)


def set_memory_of_input(net: Net, x: Tensor) -> None:
    x.numpy()[:] = 5


def set_mode(net: Net, x: Tensor) -> None:
    net.eval()


@pytest.mark.parametrize(
    "change",
    [set_through_data, set_weight, set_layer, set_input, set_memory_of_input, set_mode],
    ids=lambda c: c.__name__,
)
def test_what_changed_is_computed_anew(change: Callable[[Net, Tensor], None]) -> None:
    with pulled(LEVER, module="Net"):
        net, x = Net(), torch.ones(4, 3)
        net(x)
        change(net, x)
        now = net(x)
        assert net.num == 2
        assert torch.equal(now, net.layer(x))


def test_a_result_that_was_written_to_is_not_handed_out() -> None:
    with pulled(LEVER, module="Net"), torch.no_grad():
        net, x = Net(), torch.ones(4, 3)
        net(x).zero_()
        assert torch.equal(net(x), net.layer(x))


def test_a_graph_that_a_backward_used_up_is_not_handed_out() -> None:
    with pulled(LEVER, module="Net"):
        net, x = Net(), torch.ones(4, 3)
        net(x).sum().backward()
        net(x).sum().backward()
        assert net.num == 2


@pytest.mark.parametrize("extra", [nn.Dropout(0.5), nn.BatchNorm1d(2)], ids=["random", "buffers"])
def test_modules_with_chance_or_effects_run_each_time(extra: nn.Module) -> None:
    with pulled(LEVER, module="Net") as hooks:
        net, x = Net(extra), torch.randn(8, 3)
        for _ in range(3):
            net(x)
        assert net.num == 3 and not hooks.done
        net.eval()
        net(x), net(x)
        assert net.num == 4


def test_modules_with_hooks_run_each_time() -> None:
    with pulled(LEVER, module="Net"):
        net, x = Net(), torch.randn(8, 3)
        seen: list[object] = []
        net.layer.register_forward_hook(lambda *given: seen.append(given))
        net(x), net(x)
        assert len(seen) == 2


def test_a_copy_of_the_model_is_a_model_of_its_own() -> None:
    with pulled(LEVER, module="Net"):
        net, x = Net(), torch.randn(8, 3)
        net(x)
        other = copy.deepcopy(net)
        with torch.no_grad():
            other.layer.weight.zero_()
        assert not torch.equal(other(x), net(x))


def test_it_is_offered_for_the_module_that_was_found_and_refused_without() -> None:
    import msgspec

    finding = msgspec.structs.replace(found(0.01), module="Actor.encoder")
    [candidate] = LEVER.propose(EvidenceBuilder().build(), [finding, finding])
    assert isinstance(candidate, Candidate) and candidate.parameters == {"module": "Actor.encoder"}
    [refusal] = LEVER.propose(EvidenceBuilder().build(), [])
    assert isinstance(refusal, Refusal)
