"""Observing real loops in this process: what is found, and that nothing is changed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from flatout.check.capture import Capture
from flatout.check.observe import accelerator
from flatout.check.observe.evidence import accounts
from flatout.check.observe.operators import recorder
from flatout.check.observe.steps.schedule import Schedule
from flatout.core.records.evidence import Evidence

FAST = Schedule(trials_budget_s=0.0)


def observe(loop: Callable[[], object], schedule: Schedule = FAST) -> Evidence:
    capture = Capture(command=("test",), cwd=".", schedule=schedule, machine=None, propose=lambda _: ())
    capture.start()
    try:
        loop()
    finally:
        evidence = capture.finish(exit="finished", exit_code=0)
    return evidence


def model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1))


def train(net: nn.Module, steps: int = 20, optimizer: torch.optim.Optimizer | None = None) -> None:
    optimizer = optimizer or torch.optim.Adam(net.parameters(), lr=1e-2)
    for _ in range(steps):
        loss = net(torch.randn(4, 8)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def test_weights_and_random_stream_are_bitwise_those_of_the_plain_run() -> None:
    plain, observed = model(), model()
    torch.manual_seed(1)
    train(plain)
    after_plain = torch.rand(3)
    torch.manual_seed(1)

    observe(lambda: train(observed))

    assert torch.equal(torch.rand(3), after_plain)
    for a, b in zip(plain.parameters(), observed.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_step_of_more_operators_than_are_recorded_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "MAX_CALLS", 12)
    monkeypatch.setattr(accounts, "MAX_CALLS", 12)
    evidence = observe(lambda: train(model()))
    assert sum("a step runs more than 12 operators" in note for note in evidence.notes) == 1
    assert evidence.trace.truncated and "backward" not in {o.phase for o in evidence.operators}
    monkeypatch.undo()
    assert not observe(lambda: train(model())).trace.truncated


def test_every_patch_is_undone() -> None:
    owners: list[tuple[Any, str]] = [
        (nn.Module, "__call__"),
        (torch.optim.Optimizer, "__init__"),
        (torch.autograd, "backward"),
        (torch.autograd, "grad"),
        (torch, "use_deterministic_algorithms"),
        (torch.utils.data.dataloader._BaseDataLoaderIter, "__next__"),
        (torch.utils.data._utils.worker, "_worker_loop"),
        (Tensor, "item"),
        (Tensor, "tolist"),
    ]
    before = [getattr(owner, name) for owner, name in owners]
    own_before = "item" in vars(Tensor)

    observe(lambda: train(model()))

    assert [getattr(owner, name) for owner, name in owners] == before
    assert ("item" in vars(Tensor)) == own_before


def test_a_training_loop_has_its_steps_phases_and_operators() -> None:
    evidence = observe(lambda: train(model(), steps=25))

    assert evidence.steps.kind == "training"
    assert evidence.steps.num_observed >= 23
    assert {"forward", "backward", "optimizer"} <= set(evidence.steps.phases)
    assert sum(evidence.steps.phases.values()) == pytest.approx(evidence.steps.step_s, rel=0.3)
    assert {"aten.addmm", "aten.relu"} <= {o.op for o in evidence.operators}


def test_a_backward_operator_is_named_by_the_line_of_its_forward() -> None:
    def loop() -> None:
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(20):
            hidden = net(torch.randn(4, 8))
            loss = torch.tanh(hidden).mean()  # the line of the tanh
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    evidence = observe(loop)

    backward = next(o for o in evidence.operators if o.op == "aten.tanh_backward")
    source = evidence.source_of(backward.source)
    assert source is not None
    assert source.text.endswith("# the line of the tanh")
    assert backward.phase == "backward"


def test_flop_of_a_linear_layer_is_counted_forward_and_backward() -> None:
    def loop() -> None:
        net = nn.Linear(32, 64, bias=False)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        x = torch.randn(16, 32, requires_grad=True)
        for _ in range(20):
            net(x).sum().backward()
            optimizer.step()

    evidence = observe(loop)

    forward = 2 * 16 * 32 * 64
    flop = sum(o.flop * o.num_calls for o in evidence.operators if o.op in ("aten.mm", "aten.addmm"))
    assert flop == pytest.approx(3 * forward)


def test_gradient_accumulation_counts_one_step_for_several_backwards() -> None:
    def loop() -> None:
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(15):
            for _ in range(4):
                net(torch.randn(4, 8)).mean().backward()
            optimizer.step()

    evidence = observe(loop)

    assert evidence.steps.num_observed == pytest.approx(14, abs=1)


@pytest.mark.long
def test_derivatives_inside_a_step_do_not_end_it() -> None:
    def loop() -> None:
        net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))
        optimizer = torch.optim.Adam(net.parameters())
        for _ in range(15):
            x = torch.randn(8, 2, requires_grad=True)
            loss = torch.zeros(())
            for _ in range(120):  # as many as a solver of differential equations makes
                (slope,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
                loss = loss + slope.square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    evidence = observe(loop)

    assert evidence.steps.kind == "training"
    assert evidence.steps.num_observed == pytest.approx(14, abs=1)
    assert [o.name for o in evidence.optimizers] == ["Adam"]


class HiddenAndLogits(nn.Module):
    """Returns its logits first and what the loss takes second."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.body(x)
        return self.head(hidden), hidden


def test_a_model_whose_second_output_is_trained_counts_as_trained() -> None:
    def loop() -> None:
        net = HiddenAndLogits()
        optimizer = torch.optim.SGD(net.body.parameters(), lr=0.1)
        for _ in range(20):
            _, hidden = net(torch.randn(4, 8))
            hidden.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    (model_used,) = observe(loop).models

    assert model_used.num_graphs_built == pytest.approx(model_used.num_graphs_used, abs=1)
    assert model_used.num_graphs_used > 0


def test_two_alternating_optimizers_make_one_step() -> None:
    def loop() -> None:
        first, second = model(0), model(1)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (first, second)]
        for _ in range(20):
            for net, optimizer in zip((first, second), optimizers, strict=True):
                net(torch.randn(4, 8)).mean().backward()
                optimizer.step()

    evidence = observe(loop)

    assert evidence.steps.num_observed == pytest.approx(19, abs=1)
    assert len(evidence.optimizers) == 2


def counting(net: nn.Module, num: int) -> Callable[[], object]:
    """A loop of inference."""

    def loop() -> None:
        with torch.inference_mode():
            for _ in range(num):
                net(torch.randn(4, 8))

    return loop


def updating_by_hand(net: nn.Module, num: int) -> Callable[[], object]:
    def loop() -> None:
        for _ in range(num):
            net(torch.randn(4, 8)).mean().backward()
            with torch.no_grad():
                for weight in net.parameters():
                    weight.sub_(0.1 * weight.grad)
                    weight.grad = None

    return loop


def alternating(num: int, *, together_from: int = 0) -> Callable[[], object]:
    """Two optimizers in turn; the second one only steps until the step `together_from`, if that is not 0."""

    def loop() -> None:
        first, second = model(0), model(1)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (first, second)]
        for step in range(num):
            for net, optimizer in zip((first, second), optimizers, strict=True):
                if net is first or not together_from or step < together_from:
                    net(torch.randn(4, 8)).mean().backward()
                    optimizer.step()

    return loop


@pytest.mark.parametrize(
    "loop",
    [
        lambda: train(model(), steps=200),
        alternating(200),
        counting(model().eval(), 200),
        updating_by_hand(model(), 200),
    ],
    ids=["one optimizer", "two optimizers", "inference", "by hand"],
)
@pytest.mark.slow
def test_most_short_steps_of_any_loop_go_by_unwatched_and_all_are_counted(loop: Callable[[], object]) -> None:
    capture = Capture(command=("test",), cwd=".", schedule=FAST, machine=None, propose=lambda _: ())
    capture.start()
    loop()
    evidence = capture.finish(exit="finished", exit_code=0)

    assert len(capture.observer.observation.blocks.durations_s) > 100
    assert evidence.steps.num_observed == pytest.approx(197, abs=4)
    assert evidence.steps.num_timed > 150
    assert evidence.notes == ()


def test_most_short_calls_of_a_step_function_go_by_unwatched() -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    capture = Capture(command=("test",), cwd=".", schedule=FAST, machine=None, propose=lambda _: ())
    capture.start()
    for _ in range(200):
        with capture.step():
            net(torch.randn(4, 8)).mean().backward()
            optimizer.step()
    evidence = capture.finish(exit="finished", exit_code=0)

    assert len(capture.observer.observation.blocks.durations_s) > 100
    assert evidence.steps.num_observed == pytest.approx(200, abs=2)


def test_steps_are_found_again_when_the_optimizer_that_ended_them_steps_no_more() -> None:
    evidence = observe(alternating(400, together_from=150))

    assert evidence.steps.kind == "training"
    assert evidence.steps.num_observed > 200


@pytest.mark.slow
def test_steps_of_inference_that_grow_are_looked_at_closely_once_more() -> None:
    net = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 64)).eval()

    def generate() -> None:
        text = torch.randn(1, 64)
        with torch.no_grad():
            for _ in range(300):
                out = net(text)
                text = torch.cat([text, out[-1:], torch.randn(15, 64)])

    evidence = observe(generate, Schedule(trials_budget_s=0.0, observe_s=0.4))

    assert evidence.steps.kind == "inference"
    rows = max(o.inputs[1].shape[0] for o in evidence.operators if o.op == "aten.addmm" and len(o.inputs) > 1)
    assert rows > 1000  # at the first looks some 200


def test_a_training_after_a_long_inference_is_found() -> None:
    def loop() -> None:
        counting(model().eval(), 150)()
        train(model(1), steps=40)

    evidence = observe(loop)

    assert evidence.steps.kind == "training"
    assert evidence.steps.num_observed > 30


def test_calls_of_modules_are_torchs_own_while_steps_go_by_unwatched() -> None:
    original = nn.Module.__call__
    found = []
    net = nn.Sequential(*(nn.Identity() for _ in range(60)), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def loop() -> None:
        for _ in range(120):
            net(torch.randn(4, 8)).mean().backward()
            optimizer.step()
            found.append(nn.Module.__call__ is original)

    observe(loop)

    assert 40 < sum(found) < 120
    assert nn.Module.__call__ is original


@pytest.mark.slow
def test_models_that_are_trained_in_turns_do_not_begin_the_observation_anew() -> None:
    nets = [model(seed) for seed in range(5)]
    optimizers = [torch.optim.SGD(net.parameters(), lr=1e-3) for net in nets]

    def folds() -> None:
        for _ in range(2):
            for net, optimizer in zip(nets, optimizers, strict=True):
                train(net, steps=40, optimizer=optimizer)

    evidence = observe(folds)

    assert evidence.steps.kind == "training"
    assert evidence.steps.num_observed > 200


def test_five_critic_steps_to_one_generator_step_make_one_step() -> None:
    def loop() -> None:
        critic, generator = model(0), model(1)
        slow, quick = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (generator, critic))
        for _ in range(15):
            for _ in range(5):
                critic(torch.randn(4, 8)).mean().backward()
                quick.step()
            generator(torch.randn(4, 8)).mean().backward()
            slow.step()

    evidence = observe(loop)

    assert evidence.steps.num_observed == pytest.approx(14, abs=1)


@pytest.mark.slow
def test_lbfgs_with_a_closure_keeps_forward_and_backward_separate_from_the_optimizer() -> None:
    def loop() -> None:
        net = model()
        optimizer = torch.optim.LBFGS(net.parameters(), max_iter=3)
        x = torch.randn(64, 8)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = net(x).square().mean()
            loss.backward()
            return loss

        for _ in range(15):
            optimizer.step(closure)

    evidence = observe(loop)

    assert evidence.steps.num_observed >= 13
    assert {"forward", "backward", "optimizer"} <= {name for name, s in evidence.steps.phases.items() if s > 0}


def test_a_loop_that_updates_by_hand_is_observed_by_its_backwards() -> None:
    def loop() -> None:
        net = model()
        for _ in range(20):
            net(torch.randn(4, 8)).mean().backward()
            with torch.no_grad():
                for weight in net.parameters():
                    weight.sub_(0.1 * weight.grad)
                    weight.grad = None

    evidence = observe(loop)

    assert evidence.steps.kind == "training"
    assert evidence.steps.num_observed >= 18


def test_an_inference_loop_is_observed_by_its_calls() -> None:
    def loop() -> None:
        net = model().eval()
        with torch.inference_mode():
            for _ in range(20):
                net(torch.randn(4, 8))

    evidence = observe(loop)

    assert evidence.steps.kind == "inference"
    assert evidence.steps.num_observed >= 15


def test_the_wait_for_a_loader_is_a_phase_and_the_loader_is_described() -> None:
    data = TensorDataset(torch.randn(200, 8))

    def loop() -> None:
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for (x,) in DataLoader(data, batch_size=10, shuffle=True):
            net(x).mean().backward()
            optimizer.step()

    evidence = observe(loop)

    assert evidence.steps.phases["data"] > 0
    (loader,) = evidence.loaders
    assert (loader.dataset, loader.batch_size, loader.num_workers) == ("TensorDataset", 10, 0)


def test_host_reads_are_found_by_line_on_a_cpu() -> None:
    def loop() -> None:
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(20):
            loss = net(torch.randn(4, 8)).mean()
            loss.backward()
            optimizer.step()
            if loss > 1e9:  # reads the loss
                raise AssertionError
            loss.tolist()

    evidence = observe(loop)

    reads = {(evidence.sources[r.source].text, r.call) for r in evidence.host_reads}
    assert ("if loss > 1e9:  # reads the loss", "bool") in reads
    assert ("loss.tolist()", "tolist") in reads
    assert not any(r.on_device for r in evidence.host_reads)


def test_a_constant_is_found_and_what_depends_on_the_batch_is_not() -> None:
    def loop() -> None:
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(20):
            x = torch.randn(4, 8)
            mask = torch.ones(8, 8).tril()  # the constant
            own = torch.ones_like(x) * x.sign().abs()  # depends on the batch
            net((x * own) @ mask).mean().backward()
            optimizer.step()

    evidence = observe(loop)

    lines = {evidence.sources[c.source].text for c in evidence.constants}
    assert "mask = torch.ones(8, 8).tril()  # the constant" in lines
    assert "own = torch.ones_like(x) * x.sign().abs()  # depends on the batch" not in lines


def test_a_graph_that_no_backward_uses_is_distinguished_from_one_that_is_used_later() -> None:
    def loop() -> None:
        net, policy = model(0), model(1)
        optimizer = torch.optim.SGD([*net.parameters(), *policy.parameters()], lr=0.1)
        for _ in range(20):
            outputs = [policy(torch.randn(4, 8)) for _ in range(3)]
            loss = net(torch.randn(4, 8)).mean() + torch.stack(outputs).mean()
            net(torch.randn(4, 8)).mean()  # never used
            loss.backward()
            optimizer.step()

    evidence = observe(loop)

    unused = {evidence.sources[m.source].text for m in evidence.models if m.num_graphs_built and not m.num_graphs_used}
    assert unused == {"net(torch.randn(4, 8)).mean()  # never used"}


def test_padding_is_measured_and_brought_home_to_the_line_that_created_it() -> None:
    def loop() -> None:
        net = nn.Sequential(nn.Embedding(10, 4, padding_idx=0), nn.Linear(4, 1))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(20):
            tokens = torch.zeros(4, 16, dtype=torch.long)  # created here
            for row in range(4):
                tokens[row, : row + 2] = 3
            net(tokens).mean().backward()
            optimizer.step()

    evidence = observe(loop)

    (padding,) = evidence.paddings
    assert padding.padding_fraction == pytest.approx(1 - (2 + 3 + 4 + 5) / 64)
    assert evidence.sources[padding.source].text.endswith("# created here")
    assert "padding_idx" in padding.signs


def test_gradients_without_an_optimizer_are_found() -> None:
    def loop() -> None:
        body, head = nn.Linear(8, 16), nn.Linear(16, 1)
        net = nn.Sequential(body, nn.ReLU(), head)
        optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
        for _ in range(20):
            net(torch.randn(4, 8)).mean().backward()
            optimizer.step()

    evidence = observe(loop)

    (unused,) = evidence.unused_gradients
    assert unused.modules == ("Sequential.0",)
    assert unused.num_tensors == 2


def test_a_failing_observer_gives_up_and_the_loop_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object, **kwargs: object) -> None:
        raise ValueError("our own mistake")

    monkeypatch.setattr("flatout.check.observe.operators.deep.interception_cost", broken)
    net = model()

    evidence = observe(lambda: train(net, steps=20))

    assert any("our own mistake" in note for note in evidence.notes)
    assert evidence.steps.num_timed > 0


def test_a_loop_in_user_code_that_copies_and_pickles_modules_is_undisturbed() -> None:
    def loop() -> None:
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(20):
            net(torch.randn(4, 8)).mean().backward()
            optimizer.step()
            copy.deepcopy(net)

    assert observe(loop).steps.num_observed >= 18


@pytest.mark.slow
@pytest.mark.parametrize("by_keyword", [False, True])
def test_what_a_closure_does_inside_the_step_is_not_the_optimizers(by_keyword: bool) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
    results = []

    def loop() -> None:
        for _ in range(20):

            def closure() -> Tensor:
                optimizer.zero_grad()
                rows = torch.stack([torch.randn(8).sigmoid() for _ in range(32)])
                loss: Tensor = net(rows).square().mean()
                loss.backward()
                return loss

            results.append(optimizer.step(closure=closure) if by_keyword else optimizer.step(closure))

    evidence = observe(loop)

    assert len(results) == 20 and all(isinstance(r, Tensor) for r in results)
    assert {o.phase for o in evidence.operators if o.op == "aten.sigmoid"} == {"other"}
    assert {o.phase for o in evidence.operators if o.op == "aten.addmm"} == {"forward"}
    assert all(evidence.steps.phases[name] > 0 for name in ("other", "forward", "backward", "optimizer"))
    assert evidence.optimizers[0].step_s < evidence.steps.step_s / 2


def test_lbfgs_calls_its_closure_several_times_a_step_and_converges_as_without_us() -> None:
    def fit(net: nn.Module) -> None:
        optimizer = torch.optim.LBFGS(net.parameters(), max_iter=3)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = net(x).square().mean()
            loss.backward()
            return loss

        for _ in range(12):
            optimizer.step(closure)  # type: ignore[arg-type]

    torch.manual_seed(0)
    x = torch.randn(4, 8)
    plain, observed = nn.Linear(8, 1), nn.Linear(8, 1)
    observed.load_state_dict(plain.state_dict())
    fit(plain)

    evidence = observe(lambda: fit(observed))

    assert evidence.steps.num_observed == 11
    assert torch.equal(plain.weight, observed.weight)


def test_what_a_closure_raises_is_the_scripts_own() -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)

    def closure() -> Tensor:
        raise ZeroDivisionError("the script's own")

    def loop() -> None:
        train(net, 5, optimizer)
        with pytest.raises(ZeroDivisionError, match="the script's own"):
            optimizer.step(closure)  # type: ignore[arg-type]
        train(net, 10, optimizer)

    assert observe(loop).steps.num_observed >= 13


@pytest.mark.skipif(torch.cuda.is_available(), reason="nn.DataParallel would run the model on the GPU")
def test_a_wrapper_of_a_framework_does_not_show_in_module_paths() -> None:
    net = nn.DataParallel(model())

    evidence = observe(lambda: train(net))

    assert {m.name for m in evidence.models} == {"Sequential"}
    assert {o.module for o in evidence.operators if o.op == "aten.addmm"} == {"Sequential.0", "Sequential.3"}


def test_the_memory_of_a_constant_can_still_be_resized() -> None:
    def loop() -> None:
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(20):
            scale = torch.ones(8).cumsum(0)
            net(torch.randn(4, 8) * scale).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            scale.untyped_storage().resize_(0)  # as sharded parameters are freed

    evidence = observe(loop)

    assert evidence.observing.num_deep_steps == 3


@pytest.fixture
def cuda_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that says it has used a CUDA device before."""
    monkeypatch.setattr(accelerator, "uses_cuda", lambda: True)


@pytest.mark.usefixtures("cuda_in_use")
def test_a_loop_on_the_cpu_is_one_though_the_process_has_used_a_device() -> None:
    evidence = observe(lambda: train(model()))
    assert (evidence.notes, evidence.steps.device_s, evidence.workload.device) == ((), None, "cpu")


@pytest.mark.usefixtures("cuda_in_use")
def test_a_step_function_on_the_cpu_is_one_though_the_process_has_used_a_device() -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    capture = Capture(command=("test",), cwd=".", schedule=FAST, machine=None, propose=lambda _: ())
    capture.start()
    for _ in range(20):
        capture.observer.begin_call()
        train(net, steps=1, optimizer=optimizer)
        capture.observer.end_call()
    evidence = capture.finish(exit="finished", exit_code=0)
    assert (evidence.notes, evidence.steps.device_s, evidence.steps.kind) == ((), None, "call")


class Relations(nn.Module):
    """Edges of two types, picked out anew in every call."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, 4))

    def forward(self, graph: dict[str, Tensor]) -> Tensor:
        edges = (graph["type"] == 1).nonzero().squeeze(1)  # of the graph
        return self.weight[graph["to"][edges]].sum() + graph["features"].square().sum()  # of the features


@pytest.mark.parametrize("is_new", [False, True])
def test_what_follows_from_inputs_that_never_change_is_constant(is_new: bool) -> None:
    """A graph that is handed to the model in every step is no batch; its features here are new in some loops."""
    torch.manual_seed(0)
    net = Relations()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    graph = {"type": torch.arange(64) % 2, "to": torch.arange(64) % 8, "features": torch.rand(64)}

    def loop() -> None:
        for _ in range(20):
            loss = net(graph | {"features": torch.rand(64)} if is_new else graph)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    evidence = observe(loop)
    lines = {evidence.sources[c.source].text.partition("# ")[2] for c in evidence.constants}
    assert "of the graph" in lines
    rows = {evidence.operators[i].op for c in evidence.constants for i in c.operators}
    assert ("aten.pow" in rows) is not is_new


def test_composite_operators_are_decomposed_in_inference_mode_and_modules_are_reported() -> None:
    """Without autograd torch hands `aten.linear` out whole; rules know its parts."""
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    outputs = []

    def loop() -> None:
        with torch.inference_mode():
            for _ in range(20):
                outputs.append(net(torch.ones(4, 8)))

    evidence = observe(loop)
    rows = {(o.op, o.module) for o in evidence.operators}
    assert {("aten.addmm", "Sequential.0"), ("aten.addmm", "Sequential.2")} <= rows
    assert not {op for op, _ in rows} & {"aten.linear", "aten.to", "aten.reshape"}
    assert all(torch.equal(o, outputs[0]) for o in outputs)


@pytest.mark.slow
def test_an_error_of_ours_at_the_end_leaves_what_was_known_before(monkeypatch: pytest.MonkeyPatch) -> None:
    published: list[Evidence] = []
    schedule = Schedule(trials_budget_s=0.0, observe_s=0.05)
    capture = Capture(
        command=("test",), cwd=".", schedule=schedule, machine=None, propose=lambda _: (), publish=published.append
    )
    known = capture._evidence

    def evidence() -> Evidence:
        return known() if not capture.is_complete else 1 / 0  # type: ignore[return-value]

    monkeypatch.setattr(capture, "_evidence", evidence)
    capture.start()
    train(model(), steps=2000)

    assert published[0].steps.num_timed > 0
    assert any("ZeroDivisionError" in note for note in published[0].notes)


def test_a_sparse_product_counts_the_numbers_that_it_holds() -> None:
    edges = torch.stack([torch.arange(40), (torch.arange(40) * 7 + 3) % 64])
    graph = torch.sparse_coo_tensor(edges, torch.ones(40), (64, 64), check_invariants=True).coalesce()
    net = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def loop() -> None:
        for _ in range(20):
            loss = (graph @ net(torch.randn(64, 8))).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    products = [o for o in observe(loop).operators if o.op == "aten.mm" and o.inputs[0].shape == (64, 64)]

    assert products
    for product in products:
        assert product.flop == 2 * 40 * 8
        assert product.bytes < 64 * 64 * 4
