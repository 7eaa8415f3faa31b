"""Expectations about regions: some of each kind that hold, and some of each that fail with the operator and the line."""

from __future__ import annotations

import inspect
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import profile
from torch.utils.data import DataLoader

from flatout.core.errors import ExpectationFailed, UsageError
from flatout.core.runtime.patches import Patches
from flatout.tune.verify.expect.api import expect

HERE = Path(__file__).name
INDUCTORS_OWN = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # when it is imported


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))


def line_of(text: str) -> str:
    """'test_api.py:123' of the line in the calling test that holds this text."""
    frame = inspect.currentframe()
    assert frame is not None and frame.f_back is not None
    lines, first = inspect.getsourcelines(frame.f_back.f_code)
    found = [number for number, line in enumerate(lines, start=first) if text in line and "line_of" not in line]
    assert len(found) == 1
    return f"{HERE}:{found[0]}: "


@pytest.fixture(autouse=True)
def dynamo_is_fresh() -> None:
    torch._dynamo.reset()


# -- expectations that hold -----------------------------------------------------------------------------------------------------


def test_a_step_that_runs_as_many_kernels_as_expected_passes() -> None:
    model, x = mlp(), torch.randn(4, 8)

    with expect(forward_kernels=4, backward_kernels=7) as observed:
        model(x).sum().backward()

    assert (observed.forward_kernels, observed.backward_kernels) == (4, 7)
    assert [launch.name for launch in observed.launches if not launch.is_backward] == [
        "aten::addmm", "aten::relu", "aten::addmm", "aten::sum",
    ]  # fmt: skip


def test_views_and_new_memory_are_no_kernels() -> None:
    x = torch.randn(4, 8)

    with expect(forward_kernels=0) as observed:
        x.view(8, 4).t()[:2].unsqueeze(0).expand(3, 2, 8).permute(2, 0, 1)
        torch.empty(100).reshape(10, 10).contiguous().detach()
        torch.empty_like(x).to(torch.float32)

    assert observed.forward_kernels == 0


def test_what_a_composite_operator_is_composed_of_counts() -> None:
    a, b = torch.randn(2, 4, 5), torch.randn(2, 5, 3)

    with expect(forward_kernels=3) as observed:
        torch.einsum("bij,bjk->bik", a, b)
        a.transpose(1, 2).reshape(-1)
        a.transpose(1, 2).contiguous()

    assert [launch.name for launch in observed.launches] == ["aten::bmm", "aten::clone", "aten::clone"]


def test_inference_mode_counts_as_no_grad_does() -> None:
    model, x = mlp(), torch.randn(4, 8)

    with torch.no_grad(), expect() as plain:
        model(x)
    with torch.inference_mode(), expect(forward_kernels=3, backward_kernels=0) as observed:
        model(x)

    assert [launch.name for launch in observed.launches] == [launch.name for launch in plain.launches]


def test_memory_of_before_does_not_count_and_memory_given_back_makes_room() -> None:
    existing = torch.zeros(1 << 18)

    with expect(peak_bytes=(2 << 20) + 1024) as observed:
        a = existing + 1
        del existing
        b = a + 1
        del a
        b + 1

    assert observed.peak_bytes >= 2 << 20


def test_an_optimizers_own_counters_are_no_host_wait() -> None:
    model, x = mlp(), torch.randn(4, 8)
    optimizer = torch.optim.Adam(model.parameters())

    with expect(host_waits=0) as observed:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.where(loss > 0, loss, 0.0)

    assert observed.host_waits == 0
    assert observed.forward_kernels > 4


def test_a_function_that_is_one_graph_has_no_break() -> None:
    compiled = torch.compile(lambda x: (x.sin() + 1).cos(), backend="eager")

    with expect(graph_breaks=0, recompilations=0) as cold:
        compiled(torch.ones(4))
    with expect(graph_breaks=0, recompilations=0) as warm:
        compiled(torch.zeros(4))

    assert (cold.compilations, warm.compilations) == (1, 0)


def test_what_compiles_in_the_region_is_not_its_own_work() -> None:
    compiled = torch.compile(lambda x: (x.sin() + 1).cos().sum(), backend="aot_eager")
    x = torch.ones(4, requires_grad=True)

    with expect() as cold:
        compiled(x).backward()
    x.grad = None
    with expect(forward_kernels=cold.forward_kernels, backward_kernels=cold.backward_kernels) as warm:
        compiled(x).backward()

    assert (warm.forward_kernels, warm.backward_kernels) == (cold.forward_kernels, cold.backward_kernels)
    assert warm.peak_bytes == cold.peak_bytes


def test_a_compiled_function_that_keeps_its_bits_is_equal() -> None:
    model = mlp()
    compiled = torch.compile(model, backend="aot_eager")

    @expect(equal="bitwise")
    def step(x: Tensor) -> Tensor:
        out: Tensor = compiled(x).square().sum()
        return out

    assert step(torch.randn(4, 8)).requires_grad


def test_another_order_of_a_sum_is_within_bounds() -> None:
    x, w = torch.randn(64, 256), torch.randn(256, 32, requires_grad=True)

    @expect(equal="bounded", eager=lambda a: a @ w)
    def in_parts(a: Tensor) -> Tensor:
        out = torch.zeros(64, 32)
        for start in range(0, 256, 64):
            out = out + a[:, start : start + 64] @ w[start : start + 64]
        return out

    in_parts(x)


def test_dropout_and_batch_norm_are_equal_when_recomputed() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))

    @expect(recomputed="equal")
    def forward(x: Tensor) -> Tensor:
        out: Tensor = model(x)
        return out

    forward(torch.randn(16, 8))


def test_a_function_with_a_backward_of_its_own_is_equal_when_recomputed() -> None:
    model = mlp()

    @expect(recomputed="equal")
    def loss_of(x: Tensor) -> float:
        loss = model(x).square().mean()
        loss.backward()
        return float(loss.detach())

    loss_of(torch.randn(4, 8))
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    loss_of(torch.zeros(4, 8))

    assert len(expected) == 4  # gradients add up once a call, not once a run
    assert any(
        not torch.equal(p.grad, e) for p, e in zip(model.parameters(), expected, strict=True) if p.grad is not None
    )


# -- expectations that fail ---------------------------------------------------------------------------------------------------


def test_one_kernel_too_many_is_reported_with_its_line() -> None:
    x = torch.randn(4, 8)

    with pytest.raises(ExpectationFailed) as failure, expect(forward_kernels=1):
        y = x * 2
        y.exp()

    text = str(failure.value)
    assert "forward_kernels=1: 2 ran" in text
    assert f"1 x aten::exp  tests/tune/verify/expect/{line_of('y.exp()')}y.exp()" in text


def test_a_kernel_of_the_backward_is_reported_with_the_line_of_its_forward() -> None:
    x = torch.randn(4, 8, requires_grad=True)

    with pytest.raises(ExpectationFailed, match="backward_kernels=2") as failure, expect(backward_kernels=2):
        y = x.sin()
        y.sum().backward()

    assert f"1 x aten::cos  tests/tune/verify/expect/{line_of('y = x.sin()')}" in str(failure.value)


@pytest.mark.slow
def test_a_matrix_of_all_pairs_is_reported_with_its_bytes_and_line() -> None:
    q = torch.randn(512, 8)

    with pytest.raises(ExpectationFailed, match=r"peak_bytes=1000000: 10\d{5}") as failure, expect(peak_bytes=10**6):
        scores = q @ q.T
        scores.sum()

    assert f"1.0 MiB  aten::mm  tests/tune/verify/expect/{line_of('scores = q @ q.T')}" in str(failure.value)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Converting a tensor")
@pytest.mark.parametrize(
    ("read", "call"),
    [
        (lambda t: t.sum().item(), "item"),
        (lambda t: bool(t.sum() > 0), "item"),
        (lambda t: float(t.mean()), "item"),
        (lambda t: t.tolist(), "tolist"),
        (lambda t: t.numpy(), "numpy"),
        (str, "print"),
        (lambda t: f"{t.sum()}", "format"),
        (lambda t: t[t > 0], "index by a mask"),
        (torch.nonzero, "nonzero"),
        (torch.unique, "unique"),
        (lambda t: t.masked_select(t > 0), "masked_select"),
        (lambda t: torch.equal(t, t), "equal"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_number_that_python_reads_is_a_host_wait(read: Callable[[Tensor], Any], call: str) -> None:
    t = torch.randn(5)

    with pytest.raises(ExpectationFailed, match=r"host_waits=0: 1\n") as failure, expect(host_waits=0):
        read(t)

    assert f"1 x {call}  tests/tune/verify/expect/{HERE}:" in str(failure.value)


@pytest.mark.slow
def test_a_graph_break_is_reported_with_its_line_while_it_compiles_and_afterwards() -> None:
    @torch.compile(backend="eager")
    def failure(x: Tensor) -> Tensor:
        y = x.sin()
        torch._dynamo.graph_break()
        return y.cos()

    for _ in range(2):
        with pytest.raises(ExpectationFailed, match="graph_breaks=0: 1") as message, expect(graph_breaks=0):
            failure(torch.ones(3))

        assert f"tests/tune/verify/expect/{line_of('torch._dynamo.graph_break()')}" in str(message.value)


def test_a_break_before_a_rest_without_a_graph_is_reported_too() -> None:
    seen_by_host: list[float] = []

    @torch.compile(backend="eager")
    def failure(x: Tensor) -> Tensor:
        y = x.sin()
        seen_by_host.append(y.sum().item())
        return y

    for _ in range(2):
        with pytest.raises(ExpectationFailed, match="graph_breaks=0: 1"), expect(graph_breaks=0):
            failure(torch.ones(3))


def test_a_function_that_compiles_again_is_reported_with_the_reason() -> None:
    compiled = torch.compile(lambda x: x.sin() * 2, backend="eager", dynamic=False)
    compiled(torch.ones(3))

    with pytest.raises(ExpectationFailed, match=r"recompilations=0: 1\n.*size mismatch.*expected 3, actual 4"):  # noqa: SIM117
        with expect(recompilations=0):
            compiled(torch.ones(4))


@pytest.mark.parametrize("expectation", ["graph_breaks", "recompilations"])
def test_a_limit_on_graphs_that_were_never_built_fails(expectation: str) -> None:
    with pytest.raises(ExpectationFailed, match=f"{expectation}=0: nothing compiled ran in the region"):  # noqa: SIM117
        with expect(**{expectation: 0}):
            torch.ones(3).sin()


def in_half(graph: torch.fx.GraphModule, examples: list[Tensor]) -> Callable[..., Any]:
    """A compiler that rounds what comes out to half precision."""

    def run(*args: Tensor) -> Any:
        return [t.half().to(t.dtype) for t in graph(*args)]

    return run


@pytest.mark.parametrize(
    ("measure", "message"), [("bitwise", "result differs from its eager self"), ("bounded", "further from float64")]
)
def test_a_compiler_that_rounds_is_not_equal(measure: Any, message: str) -> None:
    compiled = torch.compile(lambda x: x.sin() * 2, backend=in_half)

    @expect(equal=measure)
    def step(x: Tensor) -> Tensor:
        out: Tensor = compiled(x)
        return out

    with pytest.raises(ExpectationFailed, match=message):
        step(torch.linspace(0, 1, 50))


def test_equality_with_itself_is_no_equality() -> None:
    @expect(equal="bitwise")
    def step(x: Tensor) -> Tensor:
        return x.sin()

    with pytest.raises(ExpectationFailed, match="nothing compiled ran in it: it would be compared with itself"):
        step(torch.ones(3))


def test_a_value_that_depends_on_how_often_it_was_computed_is_reported() -> None:
    calls: list[int] = []

    @expect(recomputed="equal")
    def step(x: Tensor) -> Tensor:
        calls.append(1)
        return x * len(calls)

    with pytest.raises(
        ExpectationFailed, match=r"run again, result is another: 2\.0 instead of the first run's 1\.0 at \[0\]"
    ):
        step(torch.ones(3))


def test_a_forward_that_the_backward_recomputes_otherwise_is_reported() -> None:
    """Equal when it is run again, but not where autograd runs it again: it asks for the switch that checkpointing sets."""

    @expect(recomputed="equal")
    def step(x: Tensor) -> Tensor:
        is_in_backward = torch._C._current_autograd_node() is not None
        return (x * (3 if is_in_backward else 2)).sin()

    with pytest.raises(ExpectationFailed, match=r"under torch.utils.checkpoint, gradient of args\[0\] is another"):
        step(torch.ones(3, requires_grad=True))


def contracted(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Compiled as clang and Triton do by default: a product and a sum are rounded once."""
    options = {"cpp.enable_floating_point_contract_flag": "fast"}
    compiled: Callable[..., Tensor] = torch.compile(function, options=options)
    return compiled


@pytest.mark.slow
@INDUCTORS_OWN
@pytest.mark.long
def test_a_fused_multiply_add_that_breaks_an_exact_cancellation_is_reported_with_its_line() -> None:
    """x * x - y * y is 0 for x = y; rounded once it is the rounding error of y * y, and the root of that NaN half of the time."""

    def distance(x: Tensor, y: Tensor) -> Tensor:
        return torch.sqrt(x * x - y * y)

    compiled = contracted(distance)

    @expect(recomputed="equal")
    def step(x: Tensor, y: Tensor) -> Tensor:
        return compiled(x, y)

    x = torch.rand(1000, generator=torch.Generator().manual_seed(0)) + 0.5

    with pytest.raises(ExpectationFailed, match=r"result is nan instead of eager's 0\.0") as failure:
        step(x, x.clone())
    here = line_of("return torch.sqrt(x * x - y * y)")
    assert f"aten::sub leaves exactly 0 in eager  tests/tune/verify/expect/{here}" in str(failure.value)
    step(x + 1, x)  # where nothing cancels, rounding otherwise is no breach


@pytest.mark.slow
@INDUCTORS_OWN
def test_the_same_difference_written_without_products_passes() -> None:
    compiled = contracted(lambda x, y: torch.sqrt((x - y) * (x + y)))

    @expect(recomputed="equal", equal="bounded", forward_kernels=1)
    def step(x: Tensor, y: Tensor) -> Tensor:
        return compiled(x, y)

    x = torch.rand(1000, generator=torch.Generator().manual_seed(0)) + 0.5

    assert not step(x, x.clone()).any()


@pytest.mark.slow
@INDUCTORS_OWN
def test_kernels_that_inductor_generates_count_in_forward_and_backward() -> None:
    compiled = torch.compile(lambda x: ((x.sin() + 1).relu() * 2).sum(1).exp())
    x = torch.randn(64, 64, requires_grad=True)

    with expect() as cold:
        compiled(x).sum().backward()
    with expect() as warm:
        compiled(x).sum().backward()

    for observed in (cold, warm):
        generated = [launch for launch in observed.launches if launch.ran == "generated kernel"]
        assert [launch.is_backward for launch in generated] == [False, True]
        assert all(launch.name.startswith("cpp_fused_") and launch.site >= 0 for launch in generated)
    assert warm.forward_kernels == cold.forward_kernels


# -- how regions behave ---------------------------------------------------------------------------------------------------------


def test_all_failed_expectations_are_reported_at_once() -> None:
    with pytest.raises(ExpectationFailed, match="failed 3 expectations"):  # noqa: SIM117
        with expect(forward_kernels=0, peak_bytes=0, host_waits=0):
            torch.ones(3).sum().item()


def test_a_regions_own_error_passes_unchanged_and_everything_is_put_back() -> None:
    before = (torch.autograd.backward, Tensor.tolist, threading.Thread.start, torch.compile)

    with pytest.raises(ZeroDivisionError), expect(forward_kernels=0):
        torch.ones(3).exp()
        _ = 1 / 0

    assert (torch.autograd.backward, Tensor.tolist, threading.Thread.start, torch.compile) == before
    assert not Patches._live
    with expect(forward_kernels=1):
        torch.ones(3)


def test_regions_lie_in_one_another() -> None:
    with expect(forward_kernels=4) as outer:
        x = torch.ones(3)
        with expect(forward_kernels=1) as inner:
            x.exp()
        with pytest.raises(ExpectationFailed), expect(forward_kernels=0):
            x.sin()
        x.cos()

    assert (inner.forward_kernels, outer.forward_kernels) == (1, 4)


def test_threads_that_a_region_starts_count() -> None:
    def work() -> float:
        return torch.ones(3).exp().sum().item()

    with expect() as observed, ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda _: work(), range(4)))

    assert observed.forward_kernels == 12
    assert observed.host_waits == 4


def test_a_loader_with_a_worker_runs_in_a_region() -> None:
    with expect() as observed:
        batches = list(DataLoader(list(torch.arange(8.0)), batch_size=4, num_workers=1))

    assert len(batches) == 2
    assert observed.backward_kernels == 0


def test_observing_changes_no_result_and_no_random_number() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.BatchNorm1d(8))
    x = torch.randn(4, 8)
    state = {k: v.clone() for k, v in model.state_dict().items()}

    def run(step: Callable[[], Tensor]) -> tuple[Tensor, Tensor, float, dict[str, Tensor]]:
        model.load_state_dict(state)
        torch.manual_seed(3)
        random.seed(3)
        return step(), torch.rand(3), random.random(), {k: v.clone() for k, v in model.state_dict().items()}

    plain = run(lambda: model(x))
    observed = run(expect(recomputed="equal", equal="bitwise", eager=lambda: model(x), host_waits=0)(lambda: model(x)))

    assert torch.equal(plain[0], observed[0])
    assert torch.equal(plain[1], observed[1])
    assert plain[2] == observed[2]
    assert all(torch.equal(plain[3][k], observed[3][k]) for k in state)


def test_a_graph_that_the_caller_keeps_survives_the_reruns() -> None:
    model, x = mlp(), torch.randn(4, 8)
    expected_call = expect(recomputed="equal")(lambda t: model(t).sum())

    model(x).sum().backward()
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    expected_call(x).backward()

    assert len(expected) == 4
    assert all(torch.equal(p.grad, e) for p, e in zip(model.parameters(), expected, strict=True) if p.grad is not None)


def test_a_method_and_an_argument_that_is_written_to_are_compared() -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("total", torch.zeros(3))

        @expect(recomputed="equal")
        def add(self, x: Tensor) -> None:
            self.total += x
            x.mul_(2)

    counter, x = Counter(), torch.ones(3)
    counter.add(x)

    assert torch.equal(counter.total, torch.ones(3))
    assert torch.equal(x, 2 * torch.ones(3))


def test_a_region_without_tensors_has_nothing_to_report() -> None:
    with expect(forward_kernels=0, backward_kernels=0, peak_bytes=0, host_waits=0) as observed:
        sum(range(10))

    assert (observed.forward_kernels, observed.peak_bytes, observed.graph_breaks, observed.recompilations) == (
        0,
        0,
        None,
        None,
    )


def test_what_was_seen_can_be_printed() -> None:
    with expect() as observed:
        torch.ones(1024)

    rows = dict(line.split(None, 1) for line in str(observed).splitlines())
    assert rows["forward_kernels"] == "1"
    assert rows["peak_bytes"] == "4096 (4.0 KiB, cpu)"
    assert rows["graph_breaks"] == "nothing was compiled"


# -- what is refused ------------------------------------------------------------------------------------------------------------


def test_what_was_seen_cannot_be_read_before_the_end() -> None:
    with expect() as observed, pytest.raises(UsageError, match="after the region"):
        _ = observed.forward_kernels


@pytest.mark.parametrize("limits", [{"forward_kernels": -1}, {"peak_bytes": 1.5}, {"host_waits": True}])
def test_a_limit_that_is_none_is_refused(limits: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="a limit is a whole number"):
        expect(**limits)


@pytest.mark.parametrize("expectation", [{"equal": "nearly"}, {"recomputed": True}, {"eager": mlp}])
def test_an_equality_that_is_none_is_refused(expectation: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        expect(**expectation)


@pytest.mark.parametrize("expectation", [{"equal": "bitwise"}, {"recomputed": "equal"}])
def test_equality_of_a_with_statement_is_refused(expectation: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="a with-statement runs once"):  # noqa: SIM117
        with expect(**expectation):
            pass


def test_a_step_of_an_optimizer_is_not_run_again() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @expect(recomputed="equal")
    def step(x: Tensor) -> None:
        model(x).sum().backward()
        optimizer.step()

    with pytest.raises(UsageError, match="takes a step of SGD"):
        step(torch.randn(4, 8))


def test_a_generator_is_refused() -> None:
    with pytest.raises(UsageError, match="does not run in the call"):

        @expect()
        def batches() -> Any:
            yield 1


def test_another_profiler_is_refused_and_goes_on() -> None:
    with profile() as other:
        with pytest.raises(UsageError, match="a profiler is running already"), expect():
            pass
        torch.ones(3)

    assert any(e.name == "aten::ones" for e in other.events() or ())


def test_two_threads_in_regions_at_once_are_refused() -> None:
    message: list[BaseException] = []

    def other() -> None:
        try:
            with expect():
                pass
        except UsageError as error:
            message.append(error)

    with expect():
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()

    assert "another thread is inside an expectation" in str(message[0])


def test_an_expectation_inside_compiled_code_is_refused() -> None:
    @expect(forward_kernels=1)
    def inner(x: Tensor) -> Tensor:
        return x.sin()

    with pytest.raises(Exception, match="inside compiled code"):
        torch.compile(inner, backend="eager", fullgraph=True)(torch.ones(3))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:flex_attention called without:UserWarning")
def test_an_operator_of_higher_order_runs_in_a_region() -> None:
    from torch.nn.attention.flex_attention import flex_attention

    q = torch.randn(1, 2, 16, 16)

    with torch.no_grad(), expect() as observed:
        flex_attention(q, q, q)

    assert observed.forward_kernels > 2
    assert all(launch.site >= 0 for launch in observed.launches)
