from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
from tests.evidence_builder import EvidenceBuilder
from tests.lever_tools import edited, pulled, ran
from torch import nn

from flatout.core.errors import EditError
from flatout.core.records.lever import Candidate, Refusal
from flatout.tune.levers.parallelism.fused_optimizer import LEVER


def test_a_loop_over_parameters_is_to_be_fused() -> None:
    run = EvidenceBuilder()
    run.optimizer(run.line("train.py", 9, "optimizer.step()"))
    [candidate] = LEVER.propose(run.build(), ())
    assert isinstance(candidate, Candidate)
    assert candidate.saved_s[1] > 0


@pytest.mark.parametrize(("made_in", "files"), [("parts/optim.py", ("parts/optim.py",)), ("train.py", None)])
def test_a_plan_names_the_files_that_construct_optimizers(
    tmp_path: Path, made_in: str, files: tuple[str, ...] | None
) -> None:
    path = tmp_path / made_in
    path.parent.mkdir(exist_ok=True)
    path.write_text("import torch\n\ndef made(net):\n    return torch.optim.Adam(net.parameters())\n")
    run = EvidenceBuilder()
    run.optimizer(constructed=run.line(made_in, 4, "return torch.optim.Adam(net.parameters())"))
    evidence = run.build()
    workload = msgspec.structs.replace(evidence.workload, command=("python", "train.py"), cwd=str(tmp_path))
    sources = tuple(msgspec.structs.replace(source, file=str(path)) for source in evidence.sources)
    [candidate] = LEVER.propose(msgspec.structs.replace(evidence, workload=workload, sources=sources), ())
    assert isinstance(candidate, Candidate)
    assert candidate.parameters.get("files") == files


@pytest.mark.parametrize(("name", "is_fused"), [("Adam", True), ("RMSprop", False)])
def test_what_is_saved_is_that_of_all_updates_of_a_step(name: str, is_fused: bool) -> None:
    """In reinforcement learning a step of the loop may be a rollout and hundreds of updates."""
    saved = []
    for calls in (1.0, 300.0):
        run = EvidenceBuilder()
        run.optimizer(
            run.line("train.py", 9, "optimizer.step()"), name=name, step_s=1e-4, calls=calls, fused_supported=is_fused
        )
        [candidate] = LEVER.propose(run.build(), ())
        assert isinstance(candidate, Candidate)
        saved.append(candidate.saved_s[1])
    assert saved[1] == pytest.approx(300 * saved[0])


def test_without_an_optimizer_that_can_be_fused_it_says_why() -> None:
    run = EvidenceBuilder()
    run.optimizer(run.line("train.py", 9, "optimizer.step()"), variant="fused")
    [refusal] = LEVER.propose(run.build(), ())
    assert isinstance(refusal, Refusal)
    assert "fused" in refusal.because


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, torch.optim.Adagrad])
def test_optimizers_are_made_fused_and_afterwards_as_before(kind: type[torch.optim.Optimizer]) -> None:
    net = nn.Linear(3, 2)
    original = kind.__init__
    with pulled(LEVER) as hooks:
        optimizer = kind(net.parameters(), lr=0.1)  # type: ignore[call-arg]
        groups = kind([{"params": [net.weight]}, {"params": [net.bias], "lr": 0.2}], lr=0.1)  # type: ignore[call-arg]
    assert hooks.done == [LEVER.id]
    assert optimizer.defaults["fused"] is True
    assert [g["lr"] for g in groups.param_groups] == [0.1, 0.2]
    assert kind.__init__ is original
    assert not kind(net.parameters(), lr=0.1).defaults["fused"]  # type: ignore[call-arg]


def test_what_cannot_be_fused_is_left_alone() -> None:
    with pulled(LEVER) as hooks:
        optimizer = torch.optim.SGD([torch.zeros(2, dtype=torch.complex64, requires_grad=True)], lr=0.1)
    assert not optimizer.defaults["fused"]
    assert not hooks.done


TRAIN = """
    import torch
    from torch.optim import AdamW

    torch.manual_seed(0)
    net = torch.nn.Linear(3, 2)
    optimizer = MADE
    net(torch.ones(1, 3)).square().sum().backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    "made",
    [
        "torch.optim.Adam(net.parameters())",
        "AdamW(net.parameters(), lr=0.1, foreach=True)",
        "torch.optim.SGD(\n    net.parameters(),\n    lr=0.1,\n    fused=False,\n)",
        "torch.optim.Adagrad(\n    net.parameters(),\n    lr=0.1,\n)",
    ],
)
def test_edited_the_update_is_fused_and_within_rounding(made: str) -> None:
    text = TRAIN.replace("MADE", made.replace("\n", "\n    "))
    before, after = ran(text), ran(edited(LEVER, text))
    assert after["optimizer"].defaults["fused"] is True
    torch.testing.assert_close(after["net"].weight, before["net"].weight)


@pytest.mark.parametrize("kind", [torch.optim.RMSprop, torch.optim.NAdam, torch.optim.Adadelta])
def test_those_without_a_fused_kernel_go_over_lists(kind: type[torch.optim.Optimizer]) -> None:
    run = EvidenceBuilder()
    run.optimizer(run.line("train.py", 9, "optimizer.step()"), name=kind.__name__, fused_supported=False)
    [candidate] = LEVER.propose(run.build(), ())
    assert isinstance(candidate, Candidate) and "one parameter after the other" in candidate.because
    net = nn.Linear(3, 2)
    with pulled(LEVER) as hooks:
        optimizer = kind(net.parameters(), lr=0.1)  # type: ignore[call-arg]
    assert hooks.done == [LEVER.id]
    assert optimizer.defaults["foreach"] is True
    text = TRAIN.replace("MADE", f"torch.optim.{kind.__name__}(net.parameters(), lr=0.1)")
    before, after = ran(text), ran(edited(LEVER, text))
    assert after["optimizer"].defaults["foreach"] is True
    torch.testing.assert_close(after["net"].weight, before["net"].weight)


def test_an_argument_is_added_in_the_layout_of_the_others() -> None:
    text = "from torch.optim import Adam\no = Adam(\n    ps,\n    lr=0.1,\n)\np = Adam(ps)\n"
    assert "    lr=0.1,\n    fused=True,\n)\np = Adam(ps, fused=True)" in edited(LEVER, text)


@pytest.mark.parametrize(
    "made", ["torch.optim.LBFGS(net.parameters())", "make(net)", "torch.optim.SGD(ps, fused=True)"]
)
def test_without_an_optimizer_to_fuse_nothing_is_edited(made: str) -> None:
    with pytest.raises(EditError, match="fused"):
        edited(LEVER, TRAIN.replace("MADE", made))


def test_options_from_elsewhere_are_not_edited() -> None:
    with pytest.raises(EditError, match="may hold"):
        edited(LEVER, TRAIN.replace("MADE", "torch.optim.SGD(net.parameters(), **options)"))


def test_groups_whose_parameters_come_from_generators_or_are_one_tensor_keep_them() -> None:
    one, two, alone = nn.Linear(3, 2), nn.Linear(2, 2), nn.Parameter(torch.ones(4))
    group = {"params": one.parameters(), "weight_decay": 0.1}
    with pulled(LEVER) as hooks:
        optimizer = torch.optim.Adam([group, {"params": two.parameters()}, {"params": alone}])
    assert hooks.done == [LEVER.id]
    expected = [list(one.parameters()), list(two.parameters()), [alone]]
    assert [[id(p) for p in g["params"]] for g in optimizer.param_groups] == [[id(p) for p in e] for e in expected]
    assert optimizer.param_groups[0] is group, "the user's own dict stays the optimizer's group"
