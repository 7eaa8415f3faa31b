"""Facts about modules, masks and values from real loops, and what of a step is of use to nobody."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flatout.check.capture import Capture
from flatout.check.observe.steps.schedule import Schedule
from flatout.check.rules.compute.unused_output import RULE as UNUSED
from flatout.core.records.evidence import Evidence
from flatout.core.records.usage import ModuleFact


def observe(loop: Callable[[], object]) -> Evidence:
    schedule = Schedule(trials_budget_s=0.0)
    capture = Capture(command=("test",), cwd=".", schedule=schedule, machine=None, propose=lambda _: ())
    capture.start()
    try:
        loop()
    finally:
        evidence = capture.finish(exit="finished", exit_code=0)
    assert not evidence.notes, evidence.notes
    return evidence


def facts(evidence: Evidence, name: str) -> list[ModuleFact]:
    return [f for f in evidence.module_facts if f.name == name]


def text_of(evidence: Evidence, fact: ModuleFact) -> str:
    source = evidence.source_of(fact.source)
    return source.text if source is not None else ""


def network(dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 2))


@pytest.mark.parametrize(("dropout", "expected"), [(0.0, ["_ = net(x)  # again"]), (0.5, [])])
def test_a_repeated_call_is_found_unless_it_draws_random_numbers(dropout: float, expected: list[str]) -> None:
    def loop() -> None:
        net = network(dropout)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(20):
            x = torch.randn(4, 8)
            loss = net(x).mean()
            _ = net(x)  # again
            net(x * 2)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    evidence = observe(loop)

    assert [text_of(evidence, f) for f in facts(evidence, "double-forward")] == expected


def test_a_call_after_the_update_is_no_repeat() -> None:
    def loop() -> None:
        net = network()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        x = torch.randn(4, 8)
        for _ in range(20):
            optimizer.zero_grad()
            net(x).mean().backward()
            optimizer.step()

    assert not facts(observe(loop), "double-forward")


def test_dropout_left_on_in_evaluation_is_found_and_eval_is_not() -> None:
    def loop() -> None:
        net = network(0.5)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(20):
            optimizer.zero_grad()
            net(torch.randn(4, 8)).mean().backward()
            optimizer.step()
            with torch.no_grad():
                net(torch.randn(4, 8))  # left on
                net.eval()
                net(torch.randn(4, 8))
                net.train()

    evidence = observe(loop)

    assert [text_of(evidence, f) for f in facts(evidence, "train-in-eval")] == ["net(torch.randn(4, 8))  # left on"]


def test_parameters_without_gradient_and_with_a_rate_of_zero_are_distinguished() -> None:
    def loop() -> None:
        net = network()
        spare = nn.Linear(8, 8)
        body = {"params": net[0].parameters(), "lr": 0.0}
        optimizer = torch.optim.SGD([body, {"params": [*net[3].parameters(), *spare.parameters()]}], lr=0.1)
        for _ in range(20):
            optimizer.zero_grad()
            net(torch.randn(4, 8)).mean().backward()
            optimizer.step()

    evidence = observe(loop)

    assert [(f.module, f.value) for f in facts(evidence, "zero-rate")] == [("Sequential.0", 8 * 16 + 16)]
    assert [f.value for f in facts(evidence, "no-gradient")] == [8 * 8 + 8]
    (shapes,) = facts(evidence, "parameter-shapes")
    assert "16x8" in shapes.text.split(",")


def masks() -> dict[str, Tensor]:
    document = torch.arange(32) // 8
    same = document[:, None] == document[None, :]
    return {
        "causal": torch.ones(32, 32).tril().bool(),
        "all-true": torch.ones(32, 32).bool(),
        "padding": (torch.arange(32) < 20).expand(32, 32),
        "documents": same.tril(),
        "window": torch.ones(32, 32).tril().triu(-5).bool(),
        "bias": -torch.arange(32.0).expand(32, 32),
        "other": torch.rand(32, 32, generator=torch.Generator().manual_seed(0)) < 0.5,
    }


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(masks()))
def test_a_dense_mask_is_recognised(kind: str) -> None:
    mask = masks()[kind]

    def loop() -> None:
        net = nn.Linear(8, 8)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(20):
            q = net(torch.randn(2, 1, 32, 8))
            F.scaled_dot_product_attention(q, q, q, attn_mask=mask).mean().backward()
            optimizer.step()

    assert [f.kind for f in facts(observe(loop), "attention-mask")] == [kind]


def test_subnormal_results_are_reported_by_line() -> None:
    def loop() -> None:
        net = network()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(20):
            tiny = torch.full((64, 8), 1e-20) * 1e-20  # too small
            net(tiny + torch.randn(64, 8)).mean().backward()
            optimizer.step()

    evidence = observe(loop)

    (fact,) = facts(evidence, "subnormal")
    assert text_of(evidence, fact).endswith("# too small")
    assert fact.value == 1.0


def test_memory_that_nothing_was_written_to_holds_no_numbers() -> None:
    """What lies there before dropout draws into it may be anything."""

    def loop() -> None:
        net = network()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(20):
            junk = torch.full((64, 8), 1e-40)
            del junk  # its memory is handed out again
            out = torch.empty(64, 8).normal_()
            net(out).mean().backward()
            optimizer.step()

    assert not [f for f in facts(observe(loop), "subnormal") if f.kind.startswith("aten.empty")]


def test_only_what_nobody_uses_counts_as_unused() -> None:
    stored: list[Tensor] = []
    handed_out: list[object] = []

    def loop() -> None:
        net, side = network(), nn.Linear(8, 8)
        optimizer = torch.optim.SGD([*net.parameters(), *side.parameters()], lr=0.1)
        running = torch.zeros(())
        carried = torch.zeros(4, 8)
        for _ in range(20):
            x = torch.randn(4, 8)
            loss = net(x + 0.1 * carried).mean()
            dead = side(x)  # dead
            stored.append((x * 3).sum())  # stored
            handed_out.append((x * 4).numpy())  # handed out
            handed_out.append(pickle.dumps(x * 5))  # pickled
            handed_out.append(float((x * 6).sum()))  # read
            running += (x * 7).sum()  # accumulated
            carried = x * 8  # used in the next step
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            del dead

    evidence = observe(loop)
    operators = {i for finding in UNUSED.check(evidence) for i in finding.operators}
    lines = {evidence.sources[evidence.operators[i].source].text for i in operators}

    assert lines <= {"dead = side(x)  # dead"}
    trace = evidence.trace
    assert trace.escapes is not None
    outcome = {  # by what the trace says, not by time: these operators take next to none
        evidence.sources[evidence.operators[row].source].text: c in trace.escapes
        for c, row in enumerate(trace.operator)
        if evidence.operators[row].op in ("aten.addmm", "aten.mul", "aten.sum") and evidence.operators[row].source >= 0
    }
    assert outcome == {
        "loss = net(x + 0.1 * carried).mean()": False,
        "dead = side(x)  # dead": False,
        "stored.append((x * 3).sum())  # stored": True,
        "handed_out.append((x * 4).numpy())  # handed out": True,
        "handed_out.append(pickle.dumps(x * 5))  # pickled": True,
        "handed_out.append(float((x * 6).sum()))  # read": False,
        "running += (x * 7).sum()  # accumulated": False,
        "carried = x * 8  # used in the next step": True,
    }


def test_gradients_scaled_in_place_by_a_list_function_are_of_use() -> None:
    """clip_grad_norm_ returns a norm that nobody reads; what it does to the gradients reaches the update."""

    def loop() -> None:
        net, shared = network(), torch.nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([*net.parameters(), shared], lr=0.1)
        for _ in range(20):
            loss = (net(torch.randn(4, 8)) * shared).mean() + (net(torch.randn(4, 8)) * shared).mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_([*net.parameters(), shared], 0.1, foreach=True)
            optimizer.step()

    evidence = observe(loop)

    scaled = [i for i, o in enumerate(evidence.operators) if o.op == "aten._foreach_mul_"]
    assert scaled
    dead = {i for finding in UNUSED.check(evidence) for i in finding.operators}
    assert not dead.intersection(scaled)


def test_a_teacher_and_its_student_differ_by_name() -> None:
    def loop() -> None:
        student, teacher = network(), network()
        optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
        for _ in range(20):
            x = torch.randn(4, 8)
            loss = (student(x) - teacher(x)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    evidence = observe(loop)

    assert {m.name for m in evidence.models} == {"Sequential", "Sequential (2)"}
    [unused] = evidence.unused_gradients
    assert unused.is_whole
    assert all(m.startswith("Sequential (2)") for m in unused.modules)
    source = evidence.source_of(unused.source)
    assert source is not None
    assert "teacher(x)" in source.text


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("both in one backward", ("double-forward", "")),
        ("only looked at", ("double-forward", "detach")),
        ("first without a graph", ("double-forward", "no-graph")),
        ("a backward each", ("double-forward-freed", "freed")),
    ],
)
def test_how_the_first_result_can_be_used_again_is_known(kind: str, expected: tuple[str, str]) -> None:
    def loop() -> None:
        net = network()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(20):
            x = torch.randn(4, 8)
            optimizer.zero_grad()
            if kind == "first without a graph":
                with torch.no_grad():
                    net(x).mean()
            else:
                first = net(x).mean()
                if kind != "both in one backward":
                    first.backward()
            second = net(x).square().mean()  # again
            if kind == "both in one backward":
                (first + second).backward()
            elif kind != "only looked at":
                second.backward()
            optimizer.step()

    [fact] = [f for f in observe(loop).module_facts if f.name.startswith("double-forward")]

    assert (fact.name, fact.text, fact.value) == (*expected, 1.0)
