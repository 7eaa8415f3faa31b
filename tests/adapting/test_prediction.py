"""What a step is said to cost before anything is changed."""

from __future__ import annotations

import pytest
import torch
from tests.plain_models import PLAIN, plain
from torch import Tensor, nn

from flatout.adapting.adapted import adapt
from flatout.adapting.ledger import recorded, squares, without_graph
from flatout.adapting.prediction import predicted
from flatout.errors import UsageError
from flatout.measure.timer import HostClock
from flatout.records.adapting import BitFit, Bottleneck, Freeze, Lora, Method, Prefix, Prompt

METHODS: dict[str, Method] = {
    "lora": Lora(rank=2),
    "dora": Lora(rank=2, is_dora=True),
    "bottleneck": Bottleneck(width=4),
    "bitfit": BitFit(),
    "freeze": Freeze(last=2),
}
ALL = [(name, method) for name in PLAIN for method in METHODS]
ALL += [("transformer", "prompt"), ("encoder", "prefix")]
METHODS |= {"prompt": Prompt(before="blocks"), "prefix": Prefix(num_vectors=3)}


def saved_bytes(model: nn.Module, inputs: tuple[Tensor, ...]) -> int:
    """What autograd really keeps, each storage once, weights and inputs left out."""
    held = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers(), *inputs)}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.detach()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        squares(model(*inputs))
    return sum(t.untyped_storage().nbytes() for key, t in kept.items() if key not in held)


class ManualClock(HostClock):
    """Every call takes a second."""

    def elapsed_s(self, fn: object, num_calls: int) -> float:
        return float(num_calls)


@pytest.mark.parametrize(("name", "method"), ALL)
def test_what_is_saved_and_trained_is_said_exactly(name: str, method: str) -> None:
    model, inputs, _ = plain(name)
    ledger = recorded(model, inputs, squares, lambda bare: adapt(bare, METHODS[method]))
    adapted = adapt(model, METHODS[method])
    assert ledger.saved_bytes == saved_bytes(model, inputs)
    assert sorted(like.shape for like in ledger.trained) == sorted(tuple(p.shape) for p in adapted.parameters())


def test_a_prediction_leaves_the_model_gradients_and_random_state_alone() -> None:
    model, inputs, _ = plain("cnn")
    before = {name: t.clone() for name, t in model.state_dict().items()}
    random = torch.get_rng_state()
    predicted(model, inputs, Lora(rank=2), clock=ManualClock())
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(model.state_dict()[name], t) for name, t in before.items())
    assert list(model.state_dict()) == list(before)
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


def test_bytes_of_gradients_and_state_are_those_of_the_optimizer() -> None:
    model, inputs, _ = plain("mlp")
    for optimizer, states in {"adamw": 2, "momentum": 1, "sgd": 0}.items():
        (found,) = predicted(model, inputs, Freeze(last=1), optimizer=optimizer, clock=ManualClock())
        assert found.adapted.gradient_bytes == 4 * found.adapted.trained_parameters == 4 * 650
        steps = 8 if optimizer == "adamw" else 0  # a counter for each of two tensors
        assert found.adapted.state_bytes == states * 4 * 650 + steps
        assert found.plain.trained_parameters == sum(p.numel() for p in model.parameters())


def test_training_all_is_predicted_as_the_plain_step() -> None:
    model, inputs, _ = plain("mlp")
    (found,) = predicted(model, inputs, Freeze(keep=("*",)), clock=ManualClock())
    assert found.step_ratio == 1
    assert found.adapted == found.plain


def test_a_frozen_front_has_no_backward() -> None:
    model, inputs, _ = plain("transformer")
    whole = recorded(model, inputs, squares)
    head = recorded(model, inputs, squares, lambda bare: adapt(bare, Freeze(last=1)))
    assert head.forward == whole.forward
    assert sum(head.backward.values()) < sum(whole.backward.values()) / 5
    assert not any("attention" in str(call.operator) for call in head.backward)


def test_a_frozen_recurrent_layer_runs_other_operators_than_a_trained_one() -> None:
    model, inputs = plain("gru", width=8).module, (torch.randn(2, 5, 16),)
    bare = without_graph(model, inputs, squares)
    trained = recorded(model, inputs, squares).forward
    frozen = recorded(model, inputs, squares, lambda copied: adapt(copied, Freeze(last=1))).forward
    assert sum(bare.values()) == sum(frozen.values()) < sum(trained.values())
    assert bare == frozen


def test_models_that_look_at_values_are_refused() -> None:
    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) if x.sum().item() > 0 else x

    with pytest.raises(UsageError, match="without data"):
        predicted(Looks(), (torch.ones(2, 4),), Lora(rank=1), clock=ManualClock())


def test_a_loss_that_nothing_trained_reaches_is_refused() -> None:
    with pytest.raises(UsageError, match="does not depend"):
        recorded(nn.Linear(8, 8), (torch.ones(2, 8),), lambda y: y.detach().sum())


def test_an_unknown_optimizer_is_refused() -> None:
    with pytest.raises(UsageError, match="none of adamw"):
        predicted(plain("mlp").module, plain("mlp").inputs, Lora(), optimizer="adamx")


def test_a_loss_of_the_callers_own_is_recorded() -> None:
    model, inputs, _ = plain("transformer")
    targets = torch.zeros(inputs[0].numel(), dtype=torch.long)
    loss = lambda out: nn.functional.cross_entropy(out.flatten(0, 1), targets)  # noqa: E731
    (found,) = predicted(model, inputs, Lora(rank=2), loss=loss, max_time_s=0.5)
    assert found.step_ratio_low <= found.step_ratio <= found.step_ratio_high
    assert found.num_rounds >= 1 and found.adapted.step_s > 0
