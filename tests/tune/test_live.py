"""A plan's levers on objects that exist: pulled, told when they cannot be, undone."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, SequentialSampler, TensorDataset

import flatout
from flatout.core.errors import PlanError
from flatout.core.records.lever import Parameter, PlannedLever
from flatout.core.records.plan import Circumstances, Plan, to_toml


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Conv2d(3, 8, 3)
        self.head = nn.Linear(8, 1)

    def forward(self, images: Tensor) -> Tensor:
        result: Tensor = self.head(self.body(images).mean((2, 3)))
        return result


def plan(*levers: tuple[str, dict[str, Parameter]]) -> Plan:
    return Plan(lever=tuple(PlannedLever(id=id, guarantee="bounded", parameters=p) for id, p in levers))


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def images(seed: int = 1) -> Tensor:
    return torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, *, steps: int) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        model(images(step)).square().mean().backward()
        optimizer.step()


FUSED = ("parallelism.fused-optimizer", {})


def test_an_optimizer_stays_itself_with_its_state_and_is_fused_until_the_end() -> None:
    model = net()
    groups = [{"params": [model.head.weight], "lr": 0.3}, {"params": [model.body.weight]}]
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    twin, reference = copy.deepcopy((model, optimizer))
    trained(model, optimizer, steps=2)
    schedule.step()
    with flatout.apply(plan(FUSED), model=model, optimizer=optimizer) as live:
        assert live.optimizer is optimizer
        assert all(group["fused"] for group in optimizer.param_groups)
        assert [group["lr"] for group in optimizer.param_groups] == [0.15, 0.05]
        trained(model, optimizer, steps=2)
        schedule.step()
    assert not any(group["fused"] for group in optimizer.param_groups)
    assert not optimizer.defaults["fused"]
    assert [group["lr"] for group in optimizer.param_groups] == [0.075, 0.025]
    assert optimizer.state[model.head.weight]["step"] == 4
    trained(model, optimizer, steps=1)

    trained(twin, reference, steps=2)
    for rates in ((0.15, 0.05), (0.075, 0.025)):
        for group, rate in zip(reference.param_groups, rates, strict=True):
            group["lr"] = rate
        trained(twin, reference, steps=2 if rates[0] == 0.15 else 1)
    torch.testing.assert_close(model.head.weight, twin.head.weight)
    torch.testing.assert_close(model.body.weight, twin.body.weight)


def test_a_model_is_frozen_converted_and_compiled_and_afterwards_as_before() -> None:
    model = net()
    expected = model(images()).detach()
    levers = plan(
        ("workload.freeze", {"modules": ("Net.body",)}),
        ("memory.channels-last", {}),
        ("graph.compile", {"backend": "eager"}),
    )
    live = flatout.apply(levers, model=model)
    assert live.applied == ("workload.freeze", "memory.channels-last", "graph.compile")
    assert not model.body.weight.requires_grad and model.head.weight.requires_grad
    assert model.body.weight.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(live.model(images()), expected)
    live.undo()
    live.undo()
    assert model.body.weight.requires_grad and model.body.weight.is_contiguous()
    assert model._compiled_call_impl is None
    assert torch.equal(model(images()), expected)


def test_calls_of_the_model_go_through_a_context_and_copies_do_not() -> None:
    model = net()
    twin = net()
    with flatout.apply(plan(("graph.inference-mode", {})), model=model):
        assert model(images()).requires_grad
        model.eval()
        assert not model(images()).requires_grad
        assert copy.deepcopy(model)(images()).requires_grad
        assert pickle.loads(pickle.dumps(model))(images()).requires_grad
        assert twin.eval()(images()).requires_grad
    assert model(images()).requires_grad


def test_mixed_precision_wraps_the_model_and_gives_float32_out() -> None:
    model = net()
    seen: list[torch.dtype] = []
    model.body.register_forward_hook(lambda _, __, output: seen.append(output.dtype))
    with flatout.apply(plan(("workload.mixed-precision", {"dtype": "bfloat16"})), model=model):
        assert model(images()).dtype is torch.float32
    model(images())
    assert seen == [torch.bfloat16, torch.float32]


class Odd(SequentialSampler):
    pass


DATA = TensorDataset(torch.arange(23), torch.randn(23, 2, generator=torch.Generator().manual_seed(0)))


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 5},
        {"batch_size": 5, "shuffle": True, "drop_last": True},
        {"batch_size": 5, "sampler": Odd(DATA)},
        {"batch_sampler": [[1, 2], [3, 22]]},
        {"batch_size": 4, "shuffle": True, "generator": torch.Generator()},
    ],
)
def test_a_loader_is_made_anew_with_the_same_batches(options: dict[str, Any]) -> None:
    def drawn(loader: DataLoader[Any] | None) -> list[Any]:
        assert loader is not None
        torch.manual_seed(3)
        if loader.generator is not None:
            loader.generator.manual_seed(4)
        return [batch for _ in range(2) for batch in loader]

    loader = DataLoader(DATA, **options)
    expected = drawn(loader)
    live = flatout.apply(plan(("communication.prepare-in-memory", {})), loader=loader)
    assert live.loader is not loader
    found = drawn(live.loader)
    live.undo()
    assert live.loader is loader
    assert len(found) == len(expected)
    assert all(
        torch.equal(a, b) for one, two in zip(found, expected, strict=True) for a, b in zip(one, two, strict=True)
    )


def test_workers_of_a_loader_live_on() -> None:
    loader = DataLoader(DATA, 5, num_workers=1, prefetch_factor=3)
    with flatout.apply(plan(("communication.persistent-workers", {})), loader=loader) as live:
        assert live.loader is not None
        assert (live.loader.persistent_workers, live.loader.prefetch_factor, loader.persistent_workers) == (
            True,
            3,
            False,
        )


def test_settings_of_the_process_hold_until_the_end() -> None:
    before = torch.get_num_threads()
    with flatout.apply(plan(("parallelism.thread-count", {"num_threads": before + 1}))) as live:
        assert torch.get_num_threads() == before + 1
        assert live.applied == ("parallelism.thread-count",)
    assert torch.get_num_threads() == before


def test_what_cannot_be_pulled_on_objects_is_named_with_the_reason() -> None:
    place: dict[str, Parameter] = {"file": "train.py", "function": "main", "code": "x = 1"}
    levers = plan(
        ("memory.gather-once", place),
        ("memory.allocator-settings", {"kept_bytes": 1 << 30}),
        ("communication.persistent-workers", {}),
        FUSED,
    )
    odd = torch.optim.LBFGS(net().parameters())
    live = flatout.apply(levers, optimizer=odd)
    assert not live.applied
    reasons = dict(live.not_applied)
    assert "flatout edit" in reasons["memory.gather-once"]
    assert "MALLOC_TRIM_THRESHOLD_" in reasons["memory.allocator-settings"]
    assert "in the optimizer" in reasons["communication.persistent-workers"]
    assert "in the optimizer" in reasons["parallelism.fused-optimizer"]


def test_a_plan_can_be_a_file_and_must_fit(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_bytes(to_toml(Plan(proved_on=Circumstances(device="NVIDIA H200"))))
    with pytest.raises(PlanError, match="H200"):
        flatout.apply(str(path), model=net())
    path.write_bytes(to_toml(Plan(proved_on=Circumstances(models=(7,)))))
    with pytest.raises(PlanError, match="parameters of the model: 7 there"):
        flatout.apply(str(path), model=net())


def test_a_lever_that_fails_leaves_nothing_behind() -> None:
    model = net()
    levers = plan(("memory.channels-last", {}), ("parallelism.thread-count", {"num_threads": "many"}))
    with pytest.raises(PlanError, match="num_threads"):
        flatout.apply(levers, model=model)
    assert model.body.weight.is_contiguous()
    assert model._compiled_call_impl is None
