"""What a step costs with a method, before anything is changed."""

from __future__ import annotations

import pytest
import torch
from tests.plain_models import PLAIN, plain
from torch import Tensor, nn

from flatout.core.errors import UsageError
from flatout.core.records.adapt import BitFit, Bottleneck, Freeze, Lora, Method, Prefix, Prompt
from flatout.machine.measure.timer import HostClock
from flatout.shrink.adapt.adapted_model import adapt
from flatout.shrink.adapt.prediction import mean_square_loss, predict_step

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
    fitting: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        fitting[tensor.untyped_storage().data_ptr()] = tensor.detach()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        mean_square_loss(model(*inputs))
    return sum(t.untyped_storage().nbytes() for key, t in fitting.items() if key not in held)


class ManualClock(HostClock):
    """Every call takes a second."""

    def elapsed_s(self, fn: object, num_calls: int) -> float:
        return float(num_calls)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "method"), ALL)
def test_what_is_saved_and_trained_is_said_exactly(name: str, method: str) -> None:
    model, inputs, _ = plain(name)
    (found,) = predict_step(model, inputs, METHODS[method], max_time_s=0.0, clock=ManualClock())
    adapted = adapt(model, METHODS[method])
    assert found.adapted.saved_bytes == saved_bytes(model, inputs)
    assert found.adapted.trained_parameters == adapted.trained.parameters


def test_a_prediction_leaves_the_model_gradients_and_random_state_alone() -> None:
    model, inputs, _ = plain("cnn")
    before = {name: t.clone() for name, t in model.state_dict().items()}
    random = torch.get_rng_state()
    predict_step(model, inputs, Lora(rank=2), clock=ManualClock())
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(model.state_dict()[name], t) for name, t in before.items())
    assert list(model.state_dict()) == list(before)
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


def test_bytes_of_gradients_and_state_are_those_of_the_optimizer() -> None:
    model, inputs, _ = plain("mlp")
    for optimizer, states in {"adamw": 2, "momentum": 1, "sgd": 0}.items():
        (found,) = predict_step(model, inputs, Freeze(last=1), optimizer=optimizer, clock=ManualClock())
        assert found.adapted.gradient_bytes == 4 * found.adapted.trained_parameters == 4 * 650
        steps = 8 if optimizer == "adamw" else 0  # a counter for each of two tensors
        assert found.adapted.state_bytes == states * 4 * 650 + steps
        assert found.plain.trained_parameters == sum(p.numel() for p in model.parameters())


def test_training_all_is_predicted_as_the_plain_step() -> None:
    model, inputs, _ = plain("mlp")
    (found,) = predict_step(model, inputs, Freeze(keep=("*",)), clock=ManualClock())
    assert found.step_ratio == 1
    assert found.adapted == found.plain


def test_models_that_look_at_values_are_measured_too() -> None:
    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) if x.sum().item() > 0 else x

    (found,) = predict_step(Looks(), (torch.ones(2, 4),), BitFit(), clock=ManualClock())
    assert found.adapted.trained_parameters == 4


def test_a_loss_that_nothing_trained_reaches_is_refused() -> None:
    with pytest.raises(UsageError, match="does not depend"):
        predict_step(
            nn.Linear(8, 8), (torch.ones(2, 8),), BitFit(), loss=lambda y: y.detach().sum(), clock=ManualClock()
        )


def test_an_unknown_optimizer_is_refused() -> None:
    with pytest.raises(UsageError, match="none of adamw"):
        predict_step(plain("mlp").module, plain("mlp").inputs, Lora(), optimizer="adamx")


@pytest.mark.slow
def test_a_loss_of_the_callers_own_is_recorded() -> None:
    model, inputs, _ = plain("transformer")
    targets = torch.zeros(inputs[0].numel(), dtype=torch.long)
    loss = lambda out: nn.functional.cross_entropy(out.flatten(0, 1), targets)  # noqa: E731
    (found,) = predict_step(model, inputs, Lora(rank=2), loss=loss, max_time_s=0.5)
    assert found.step_ratio_low <= found.step_ratio <= found.step_ratio_high
    assert found.num_rounds >= 1 and found.adapted.step_s > 0
