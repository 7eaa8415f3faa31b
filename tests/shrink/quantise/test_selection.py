"""quantise_where_faster: what it takes within the budget, and what it reverts; times are scripted, so that no machine matters."""

from __future__ import annotations

import shutil
from collections.abc import Callable

import pytest
import torch
from tests.plain_models import plain
from torch import nn

from flatout.core.errors import UsageError
from flatout.core.records.quantise import LayerOutcome, QuantisingReport
from flatout.core.records.record import from_json, to_json
from flatout.shrink.quantise import QuantisationResult, quantise_where_faster
from flatout.shrink.quantise.layers import FewBits

pytestmark = pytest.mark.skipif(
    not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="the kernel is compiled here: no C compiler"
)


class Scripted:
    """A clock that counts seconds of the layers that ran: float Linear and few-bit ones as told, by outputs."""

    def __init__(self, float_s: float = 4.0, few_s: float = 1.0, *, whole_s: float | None = None) -> None:
        self._float_s, self._few_s, self._whole_s = float_s, few_s, whole_s

    def elapsed_s(self, fn: Callable[[], object], num_calls: int) -> float:
        spent: list[float] = []

        def on_call(module: nn.Module, *_: object) -> None:
            if isinstance(module, nn.Linear):
                spent.append(self._float_s)
            elif isinstance(module, FewBits):
                spent.append(self._few_s / 2 if module.terms == 1 else self._few_s)
            else:
                spent.append(0.01)

        with torch.nn.modules.module.register_module_forward_hook(on_call):
            fn()
        is_whole = len(spent) > 1
        has_few = any(s < self._float_s and s != 0.01 for s in spent)
        if is_whole and has_few and self._whole_s is not None:
            return self._whole_s
        return sum(spent)


def model() -> tuple[nn.Sequential, tuple[torch.Tensor, ...]]:
    layers = plain("mlp")
    assert isinstance(layers.module, nn.Sequential)
    return layers.module.eval(), layers.inputs


def chosen(budget: float = 0.02, clock: Scripted | None = None, **how: object) -> QuantisationResult:
    net, inputs = model()
    how.setdefault("schemes", ("int8", "int8-dynamic"))
    return quantise_where_faster(net, inputs, budget=budget, clock=clock or Scripted(), **how)  # type: ignore[arg-type]


def test_all_layers_are_taken_when_all_are_faster_and_the_budget_is_wide() -> None:
    found = chosen(0.1)
    assert found.quantised.schemes == dict.fromkeys(("0", "3", "5"), "int8-dynamic")
    assert found.report.ratio_high < 1


def test_a_tight_budget_takes_the_closer_scheme_or_fewer_layers() -> None:
    wide, tight = chosen(0.1), chosen(0.006)
    assert tight.report.cost <= 0.006 < wide.report.cost
    assert tight.quantised.schemes
    assert tight.quantised.schemes != wide.quantised.schemes


def test_no_budget_takes_nothing_and_the_model_is_as_it_was() -> None:
    found = chosen(0.0)
    net, inputs = model()
    with torch.inference_mode():
        assert torch.equal(found(*inputs), net(*inputs))
    assert found.quantised.schemes == {}
    assert (found.report.ratio, found.report.cost) == (1.0, found.report.cost_before)
    assert found.report.after_s == found.report.before_s


def test_layers_that_are_slower_are_left() -> None:
    found = chosen(0.1, Scripted(few_s=9.0), schemes=("int8",))
    assert found.quantised.schemes == {}
    assert all(layer.why == "nothing was faster" for layer in found.report.layers)
    assert all(trial.why == "slower" for layer in found.report.layers for trial in layer.trials)


def test_layers_are_given_back_until_the_whole_model_is_faster() -> None:
    found = chosen(0.1, Scripted(whole_s=99.0))
    assert found.quantised.schemes == {}
    assert len(found.report.backed_off) == 3
    assert all("not faster for certain" in told for told in found.report.backed_off)
    assert all("reverted" in layer.why for layer in found.report.layers)


def test_a_gain_that_is_gone_when_it_is_measured_again_is_none() -> None:
    class Fleeting(Scripted):
        num_whole = 0

        def elapsed_s(self, fn: Callable[[], object], num_calls: int) -> float:
            found = super().elapsed_s(fn, num_calls)
            if found == 6.0:  # the whole model with few bits: fast for a while
                self.num_whole += 1
            return 99.0 if found == 6.0 and self.num_whole > 2 else found  # a warm-up and a round

    found = chosen(0.1, Fleeting(whole_s=6.0))
    assert found.quantised.schemes == {}


def test_the_metric_is_measured_at_the_end_and_layers_are_given_back_for_it() -> None:
    net, inputs = model()

    def metric(candidate: nn.Module) -> float:
        num = sum(isinstance(m, FewBits) for m in candidate.modules())
        return 1.0 - (0.0 if num < 2 else 0.5)  # each layer alone is harmless, two together are not

    found = quantise_where_faster(net, inputs, metric=metric, budget=0.1, schemes=("int8",), clock=Scripted())
    assert len(found.quantised.schemes) == 1
    assert found.report.measure == "metric"
    assert found.report.cost == 0
    assert len(found.report.backed_off) == 2


def test_a_metric_that_grows_costs_nothing() -> None:
    found = chosen(0.0, metric=lambda m: float(sum(isinstance(part, FewBits) for part in m.modules())))
    assert len(found.quantised.schemes) == 3
    assert found.report.cost == -3


def test_a_layer_that_the_model_looks_at_is_left_with_the_reason() -> None:
    class Picky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.other = nn.Linear(32, 32), nn.Linear(32, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.other(self.inner(x)) + self.inner.weight.sum()

    found = quantise_where_faster(Picky().eval(), (torch.ones(1, 32),), schemes=("int8",), clock=Scripted())
    by_path = {layer.path: layer for layer in found.report.layers}
    assert set(found.quantised.schemes) == {"other"}
    assert by_path["inner"].why == "faster, but the model does not run with it"
    assert "weight" in by_path["inner"].trials[0].why


def test_layers_that_are_not_called_or_not_known_are_told() -> None:
    layers = plain("encoder")
    found = quantise_where_faster(layers.module.eval(), layers.inputs, schemes=("int8",), clock=Scripted())
    told = {layer.path: layer for layer in found.report.layers}
    assert "reads its layers' weights" in told["layers.layers.0.linear1"].why
    unused = quantise_where_faster(nn.Sequential(nn.Identity()).eval(), (torch.ones(1),), clock=Scripted())
    assert unused.report.layers == ()


def test_calls_of_a_layer_are_counted() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(32, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(11):
                x = self.layer(x)
            return x

    found = quantise_where_faster(Twice().eval(), (torch.ones(1, 32),), schemes=("int8",), clock=Scripted())
    assert found.report.layers[0].num_calls == 11
    assert found.report.layers[0].call_s == pytest.approx(44.0)


def test_choosing_leaves_the_model_random_order_and_hooks_as_they_were() -> None:
    net, inputs = model()
    before, state = {k: v.clone() for k, v in net.state_dict().items()}, torch.random.get_rng_state()
    quantise_where_faster(net, inputs, budget=0.1, clock=Scripted())
    assert torch.equal(state, torch.random.get_rng_state())
    assert all(torch.equal(before[k], v) for k, v in net.state_dict().items())
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in net.modules())


@pytest.mark.slow
def test_recurrent_models_are_chosen_for_with_the_real_clock() -> None:
    layers = plain("gru", width=16)
    found = quantise_where_faster(layers.module.eval(), layers.inputs, schemes=("int8",))
    assert found.report.cost <= found.report.budget or not found.quantised.schemes
    assert found.report.ratio_high <= 1


def test_static_scales_are_tried_with_batches_alone() -> None:
    net, inputs = model()
    without = quantise_where_faster(net, inputs, budget=0.1, schemes=("int8-static",), clock=Scripted())
    found = quantise_where_faster(
        net, inputs, budget=0.1, schemes=("int8-static",), calibrate=[inputs], clock=Scripted()
    )
    assert without.report.layers[0].trials[0].why == "it needs calibrate= batches"
    assert set(found.quantised.schemes.values()) == {"int8-static"}


def test_the_report_goes_to_json_and_back_and_its_text_names_each_layer() -> None:
    found = chosen(0.1)
    assert from_json(to_json(found.report), QuantisingReport) == found.report
    text = str(found)
    assert all(f"{layer.path}: {layer.kind}" in text for layer in found.report.layers)
    assert "int8-dynamic" in text
    assert isinstance(found.report.layers[0], LayerOutcome)


def test_a_model_in_training_a_budget_below_zero_and_a_metric_of_nan_are_refused() -> None:
    net, inputs = model()
    with pytest.raises(UsageError, match="budget -1"):
        quantise_where_faster(net, inputs, budget=-1)
    with pytest.raises(UsageError, match="NaN"):
        quantise_where_faster(net, inputs, metric=lambda _: float("nan"))
    with pytest.raises(UsageError, match="none of"):
        quantise_where_faster(net, inputs, schemes=("int3",))
    with pytest.raises(UsageError, match="eval"):
        quantise_where_faster(net.train(), inputs)
