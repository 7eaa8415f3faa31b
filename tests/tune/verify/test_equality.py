"""Recordings compared, built by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from flatout.tune.verify.equality import FACTOR, compare_bounded, compare_exact, is_close, with_names_of
from flatout.tune.verify.recording import Step
from flatout.tune.verify.tensor_digests import digest_of

EPS = torch.finfo(torch.float32).eps


def exact_steps(num: int = 3) -> list[dict[str, Tensor]]:
    """Gradients of two tensors in float64, of some steps."""
    generator = torch.Generator().manual_seed(0)
    return [
        {
            "Net.weight": torch.randn(64, 64, generator=generator, dtype=torch.float64),
            "Net.bias": torch.randn(64, generator=generator, dtype=torch.float64),
        }
        for _ in range(num)
    ]


def recorded(steps: list[dict[str, Tensor]]) -> list[Step]:
    return [{"gradient": {n: digest_of(t) for n, t in step.items()}} for step in steps]


def off(steps: list[dict[str, Tensor]], error: float, *, seed: int, only: str = "") -> list[dict[str, Tensor]]:
    """The same with a relative error, in all tensors or in one."""
    generator = torch.Generator().manual_seed(seed)
    changed = []
    for step in steps:
        noise = {n: torch.randn(t.shape, generator=generator, dtype=torch.float64) for n, t in step.items()}
        changed.append(
            {
                n: t + error * t.norm() / noise[n].norm() * noise[n] if only in ("", n) else t.clone()
                for n, t in step.items()
            }
        )
    return changed


def judged(before: float, after: float, *, only: str = "") -> tuple[bool | None, str]:
    """Is a change kept, with these relative errors before and after it; and the tensor that is named."""
    exact = exact_steps()
    one, two = recorded(off(exact, before, seed=1)), recorded(off(exact, after, seed=2, only=only))
    equality = compare_bounded(one, two, recorded(exact), eps=EPS)
    return equality.holds, equality.first.tensor if equality.first is not None else ""


def test_the_same_bits_are_exactly_equal() -> None:
    steps = recorded(exact_steps())
    equality = compare_exact(steps, steps)
    assert (equality.holds, equality.num_steps, equality.num_tensors, equality.worst) == (True, 3, 6, 0.0)


def test_the_first_tensor_with_other_bits_is_named() -> None:
    steps = exact_steps()
    other = [*steps[:1], *off(steps[1:], 1e-15, seed=3, only="Net.bias")]
    equality = compare_exact(recorded(steps), recorded(other))
    assert equality.first is not None
    assert (equality.holds, equality.first.step, equality.first.tensor) == (False, 2, "Net.bias")


@pytest.mark.parametrize(("times", "holds"), [(0.5, True), (1.0, True), (0.8 * FACTOR, True), (1.5 * FACTOR, False)])
def test_rounding_may_be_a_few_times_as_large_as_before(times: float, holds: bool) -> None:
    assert judged(1e-5, times * 1e-5)[0] is holds


def test_errors_of_a_few_units_in_the_last_place_are_none() -> None:
    assert judged(0.0, 2 * EPS) == (True, "")
    assert judged(0.0, 40 * EPS)[0] is False


def test_one_wrong_tensor_that_hardly_shows_in_the_whole_is_named() -> None:
    """A bias has a sixty-fourth of the weight's numbers: 0.1 % of it are 0.01 % of all gradients."""
    assert judged(1e-4, 2.5e-3, only="Net.bias") == (False, "Net.bias")


def test_nan_is_never_kept() -> None:
    exact = exact_steps()
    broken = off(exact, 1e-6, seed=2)
    broken[1]["Net.weight"][0, 0] = math.nan
    equality = compare_bounded(recorded(off(exact, 1e-6, seed=1)), recorded(broken), recorded(exact), eps=EPS)
    assert equality.holds is False
    assert equality.first is not None and equality.first.step == 2


def test_a_missing_tensor_and_another_shape_are_differences() -> None:
    exact = exact_steps()
    fewer = [{n: t for n, t in s.items() if n != "Net.bias"} for s in exact]
    wider = [s | {"Net.bias": torch.zeros(65)} for s in exact]
    for other, why in ((fewer, "missing"), (wider, "shape")):
        equality = compare_bounded(recorded(exact), recorded(other), recorded(exact), eps=EPS)
        assert equality.holds is False
        assert equality.first is not None
        assert equality.first.tensor == "Net.bias" and why in equality.first.because


def test_fewer_steps_are_a_difference() -> None:
    steps = recorded(exact_steps())
    equality = compare_exact(steps, steps[:2])
    assert equality.holds is False
    assert equality.first is not None and equality.first.what == "step"


def test_without_steps_nothing_can_be_told() -> None:
    assert compare_exact([], []).holds is None
    assert compare_bounded([], [], [], eps=EPS).holds is None


def test_tensors_of_a_renamed_class_are_compared_in_order() -> None:
    exact = exact_steps()
    renamed = [{n.replace("Net", "Fast"): t for n, t in s.items()} for s in exact]
    steps = recorded(exact)
    assert compare_exact(steps, recorded(renamed)).holds is False
    assert compare_exact(steps, with_names_of(steps, recorded(renamed))).holds is True


def test_a_reference_that_computes_something_else_is_none() -> None:
    """Random masks drawn for another dtype, say: then whatever the change does would look no worse."""
    assert judged(0.3, 0.3) == (None, "")


def trained(error: float, *, seed: int, gradient_error: float | None = None) -> list[Step]:
    """Steps with a loss of 2, gradients and parameters of norm 8, all off by so much, gradients of the last step by more."""
    generator, noise = torch.Generator().manual_seed(0), torch.Generator().manual_seed(seed)
    steps: list[Step] = []
    for number in range(3):
        step: Step = {
            "loss": {"loss 1": digest_of(torch.tensor(2.0 + 2 * error * (seed % 2) * number, dtype=torch.float64))}
        }
        for what in ("gradient", "parameter"):
            exact = torch.randn(64, generator=generator, dtype=torch.float64)
            other = torch.randn(64, generator=noise, dtype=torch.float64)
            size = gradient_error if gradient_error is not None and what == "gradient" and number == 2 else error
            step[what] = {"Net.weight": digest_of(exact + size * exact.norm() / other.norm() * other)}  # type: ignore[index]
        steps.append(step)
    return steps


def test_what_parameters_are_off_may_show_in_the_next_loss() -> None:
    """The loss before happens to be exact; by its slope of 8 an error of 8e-5 in parameters may move it by 6.4e-4."""
    exact, one = trained(0.0, seed=2), trained(1e-5, seed=2)
    assert compare_bounded(one, trained(1e-5, seed=1), exact, eps=EPS).holds is True
    far = trained(1e-5, seed=1)
    far[1]["loss"] = {"loss 1": digest_of(torch.tensor(2.01, dtype=torch.float64))}
    wrong = compare_bounded(one, far, exact, eps=EPS)
    assert wrong.first is not None and (wrong.first.step, wrong.first.what) == (2, "loss")


def test_gradients_may_be_magnified_as_they_were_before_and_no_more() -> None:
    exact, one = trained(0.0, seed=2), trained(1e-6, seed=2, gradient_error=1e-4)
    assert compare_bounded(one, trained(2e-6, seed=4, gradient_error=5e-4), exact, eps=EPS).holds is True
    assert compare_bounded(one, trained(2e-6, seed=4, gradient_error=2e-3), exact, eps=EPS).holds is False
    plain = trained(1e-6, seed=2)
    assert compare_bounded(plain, trained(2e-6, seed=4, gradient_error=5e-4), exact, eps=EPS).holds is False


def test_a_reference_that_plain_float32_comes_close_to_is_trusted_however_coarse_the_script_is() -> None:
    exact = exact_steps()
    coarse, changed = recorded(off(exact, 0.2, seed=1)), recorded(off(exact, 0.3, seed=2))
    assert compare_bounded(coarse, changed, recorded(exact), eps=EPS).holds is None
    assert is_close(recorded(off(exact, 1e-5, seed=3)), recorded(exact))
    assert not is_close(coarse, recorded(exact))
    assert compare_bounded(coarse, changed, recorded(exact), eps=EPS, is_trusted=True).holds is True
    kinked = trained(0.0, seed=2)
    kinked[0]["gradient"] = trained(5e-3, seed=2)[0]["gradient"]
    assert is_close(kinked, trained(0.0, seed=2))
    lost = recorded(off(exact, 1.1, seed=2))
    assert compare_bounded(coarse, lost, recorded(exact), eps=EPS, is_trusted=True).holds is False


def test_gradients_that_rounding_has_lost_may_be_as_lost_after_the_change_and_no_more() -> None:
    """A deep network with ReLU in TF32: after some steps its gradient points elsewhere than in float64, and so may another's."""
    exact = trained(0.0, seed=2)
    lost, other, worse = (trained(1e-4, seed=s, gradient_error=e) for s, e in ((2, 0.9), (4, 1.2), (4, 1.6)))
    found = compare_bounded(lost, other, exact, eps=EPS, is_trusted=True)
    assert found.holds is True and "from step 3 on" in found.because
    assert compare_bounded(lost, worse, exact, eps=EPS, is_trusted=True).holds is False
    near = trained(1e-4, seed=2, gradient_error=0.4)
    assert compare_bounded(near, other, exact, eps=EPS, is_trusted=True).holds is False


@pytest.mark.parametrize("is_wrong", [False, True])
def test_outputs_that_a_graph_hides_are_compared_with_no_others(is_wrong: bool) -> None:
    outputs = [torch.randn(4, generator=torch.Generator().manual_seed(n), dtype=torch.float64) for n in range(3)]

    def step(named: dict[str, Tensor], loss: float) -> list[Step]:
        return [
            {
                "loss": {"loss 1": digest_of(torch.tensor([loss], dtype=torch.float64))},
                "output": {name: digest_of(tensor) for name, tensor in named.items()},
            }
        ]

    every = {f"output {n + 1}": tensor for n, tensor in enumerate(outputs)} | {"action 1": outputs[0]}
    hidden = {"output 1": outputs[0], "output 2": outputs[2], "action 1": outputs[1] if is_wrong else outputs[0]}
    before, exact, after = step(every, 1 + 1e-7), step(every, 1.0), step(hidden, 1 + 1e-7)
    equality = compare_bounded(before, after, exact, eps=EPS)
    assert equality.holds is not is_wrong
    assert (equality.first.tensor if equality.first is not None else "") == ("all together" if is_wrong else "")
