"""Compressed gradients: alike on all ranks, nothing lost, resumed exactly, and about as good as whole ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.blocks.parallel.forked import lines_of
from torch import nn

from flatout.blocks.parallel.gradient_compression import _packed, _unpacked, compress
from flatout.core.errors import UsageError

pytestmark = pytest.mark.slow

HEAD = """
    import copy, json
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    from flatout.core.errors import UsageError
    from flatout.blocks.parallel.gradient_compression import compress

    KINDS = ("bfloat16", "powersgd", "sign")

    def net(seed=0):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 41))

    def ranks(work):
        def begun():
            dist.init_process_group("gloo")
            work(dist.get_rank(), dist.get_world_size())
            dist.destroy_process_group()
        return begun
"""

NOTHING_LOST = """
    def left(state, name, like):
        # What all ranks keep of a gradient, as the mean over them.
        own, total = state["own"], torch.zeros_like(like)
        if name in own:
            total += own[name].full_tensor().mean(0).view_as(like)
        if f"sum/{name}" in own:
            total += own[f"sum/{name}"].full_tensor().flatten()[: like.numel()].view_as(like)
        return total

    def work(rank, num):
        for kind in KINDS:
            model, one = net(), net()
            # Buckets of few tensors, which torch makes anew after the first step.
            ddp = DistributedDataParallel(model, bucket_cap_mb=0.003)
            compressed = compress(ddp, kind, rank=2, start_after=1)
            began = {n: t.clone() for n, t in compressed.state_dict()["same"].items()}
            names = [name for name, _ in model.named_parameters()]
            applied = {n: torch.zeros_like(p) for n, p in model.named_parameters()}
            whole = {n: torch.zeros_like(p) for n, p in model.named_parameters()}
            for step in range(5):
                x = torch.randn(num, 5, 40, generator=torch.Generator().manual_seed(step))
                ddp(x[rank]).square().mean().backward()
                one(x).square().mean().backward()
                flat = torch.cat([p.grad.flatten() for p in model.parameters()])
                others = [torch.empty_like(flat) for _ in range(num)]
                dist.all_gather(others, flat)
                assert all(torch.equal(other, flat) for other in others), "ranks differ"
                if step == 0:
                    assert all(torch.allclose(p.grad, q.grad, atol=1e-7) for p, q in zip(model.parameters(), one.parameters()))
                for n, p, q in zip(names, model.parameters(), one.parameters()):
                    applied[n] += p.grad
                    whole[n] += q.grad
                model.zero_grad()
                one.zero_grad()
            state = compressed.state_dict()
            assert not any(torch.equal(t, began[n]) for n, t in state["same"].items()), "iterations begin anew"
            lost = max((applied[n] + left(state, n, whole[n]) - whole[n]).abs().max().item() for n in names)
            kept = max(left(state, n, whole[n]).abs().max().item() for n in names)
            share = (compressed.bytes_sent - compressed.bytes_plain / 5) / (compressed.bytes_plain * 4 / 5)
            report(json.dumps([num, kind, lost, kept, share, compressed.num_steps]))

    as_ranks(2, ranks(work))
    as_ranks(3, ranks(work))
"""


@pytest.mark.multi
@pytest.mark.long
def test_what_is_applied_and_what_is_kept_is_all_there_was_and_ranks_agree() -> None:
    said = [json.loads(line) for line in lines_of(HEAD + NOTHING_LOST)]
    assert len(said) == 15
    for num, kind, lost, kept, share, steps in said:
        print(f"{num} ranks, {kind}: {share:.3f} of the bytes, {lost:.1e} lost, {kept:.1e} kept")
        assert lost < 1e-7  # sums of five gradients below 0.05 in float32
        assert kept > 1e-6
        # 'powersgd': two columns and rows of matrices of 30 x 40 and 41 x 30, and 71 biases whole; of 2501 numbers
        wanted = {"bfloat16": 0.5, "powersgd": (2 * 70 + 2 * 71 + 71) / 2501, "sign": num / 64}[kind]
        assert share == pytest.approx(wanted, rel=0.1)
        assert steps == 5


RESUMED = """
    from flatout.blocks.training.checkpoints import Checkpoints

    def trained(model, ddp, update, rank, num, steps):
        for step in steps:
            x = torch.randn(num, 5, 40, generator=torch.Generator().manual_seed(step))
            ddp(x[rank]).square().mean().backward()
            update.step()
            update.zero_grad()
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    def compressed_ddp(kind, seed=0):
        model = net(seed)
        ddp = DistributedDataParallel(model, bucket_cap_mb=0.003)
        return model, ddp, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), compress(ddp, kind, start_after=1)

    def work(rank, num):
        for kind in KINDS:
            model, ddp, update, kept = compressed_ddp(kind)
            trained(model, ddp, update, rank, num, range(4))
            with Checkpoints(f"{sys.argv[1]}/{kind}") as files:
                files.save(4, net=model, update=update, kept=kept)
            wanted = trained(model, ddp, update, rank, num, range(4, 8))
            model, ddp, update, kept = compressed_ddp(kind, seed=1)
            with Checkpoints(f"{sys.argv[1]}/{kind}") as files:
                assert files.load(net=model, update=update, kept=kept) == 4
            found = trained(model, ddp, update, rank, num, range(4, 8))
            assert torch.equal(wanted, found), kind
            for other in KINDS:
                if other != kind:
                    try:
                        compressed_ddp(other)[3].load_state_dict(kept.state_dict())
                        raise AssertionError
                    except UsageError as e:
                        assert f"of '{kind}'" in str(e)
        report("resumed")

    as_ranks(2, ranks(work))
"""


@pytest.mark.multi
@pytest.mark.long
def test_a_run_goes_on_exactly(tmp_path: Path) -> None:
    assert lines_of(HEAD + RESUMED, tmp_path) == ["resumed"] * 2


NOT_FINITE = """
    def work(rank, num):
        for kind in KINDS:
            model = net()
            ddp = DistributedDataParallel(model)
            compressed = compress(ddp, kind)
            for step in range(3):
                x = torch.randn(5, 40, generator=torch.Generator().manual_seed(step + 9 * rank))
                if step == 1 and rank == 1:
                    x[0] = float("inf")
                model.zero_grad()
                ddp(x).square().mean().backward()
                is_finite = all(p.grad.isfinite().all() for p in model.parameters())
                assert is_finite == (step != 1), (kind, step)
        report("well")

    as_ranks(2, ranks(work))
"""


@pytest.mark.multi
@pytest.mark.long
def test_a_gradient_that_is_not_finite_is_told_and_leaves_no_trace() -> None:
    assert lines_of(HEAD + NOT_FINITE) == ["well"] * 2


LEARNT = """
    from sklearn.datasets import load_digits

    def work(rank, num):
        x, y = (torch.as_tensor(part) for part in load_digits(return_X_y=True))
        x, y = x.float() / 16, y.long()
        for way in (None, *KINDS, "sign without feedback"):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
            ddp = DistributedDataParallel(model)
            kept = None if way is None else compress(ddp, way.split()[0], rank=2)
            update = torch.optim.SGD(model.parameters(), 0.1)
            order = torch.Generator().manual_seed(1)
            for step in range(250):
                mine = torch.randint(1400, (num, 32), generator=order)[rank]
                nn.functional.cross_entropy(ddp(x[mine]), y[mine]).backward()
                update.step()
                update.zero_grad()
                if way == "sign without feedback":
                    for tensor in kept._codec.own.values():
                        tensor.zero_()
            with torch.no_grad():
                loss = nn.functional.cross_entropy(model(x[:1400]), y[:1400]).item()
                right = (model(x[1400:]).argmax(1) == y[1400:]).float().mean().item()
            if rank == 0:
                report(json.dumps([way, loss, right, 1.0 if kept is None else kept.bytes_sent / kept.bytes_plain]))

    as_ranks(2, ranks(work))
"""


@pytest.mark.multi
@pytest.mark.long
def test_digits_are_learnt_about_as_well_and_by_signs_only_with_feedback() -> None:
    said = {
        implementation: (loss, right, share)
        for implementation, loss, right, share in map(json.loads, lines_of(HEAD + LEARNT))
    }
    for implementation, (loss, right, share) in said.items():
        print(f"{implementation}: loss {loss:.4f}, {right:.3f} right, {share:.3f} of the bytes")
    plain_loss, plain_right, _ = said[None]
    for kind in ("bfloat16", "powersgd", "sign"):
        loss, right, share = said[kind]
        assert loss < 1.2 * plain_loss
        assert right > plain_right - 0.03
        assert share < 0.51
    assert said["sign without feedback"][0] > 1.2 * said["sign"][0]


def test_what_cannot_be_compressed_is_refused() -> None:
    with pytest.raises(UsageError, match="was given a Linear; give a model in DistributedDataParallel"):
        compress(nn.Linear(1, 1), "sign")  # type: ignore[arg-type]


@given(st.lists(st.booleans(), min_size=1, max_size=70))
def test_bits_are_packed_eight_a_byte(bits: list[bool]) -> None:
    packed = _packed(torch.tensor(bits))
    assert packed.dtype is torch.uint8
    assert len(packed) == -(-len(bits) // 8)
    assert _unpacked(packed, len(bits)).tolist() == bits


TWO_GPUS = """
    def work(rank, num):
        torch.cuda.set_device(rank)
        for kind in KINDS:
            model, one = net().cuda(), net().cuda()
            ddp = DistributedDataParallel(model, device_ids=[rank])
            kept = compress(ddp, kind)
            total, whole = 0, 0
            for step in range(4):
                x = torch.randn(num, 5, 40, generator=torch.Generator().manual_seed(step)).cuda()
                ddp(x[rank]).square().mean().backward()
                one(x).square().mean().backward()
                total, whole = total + model[2].weight.grad, whole + one[2].weight.grad
                model.zero_grad(), one.zero_grad()
            own = kept.state_dict()["own"]
            total = total + own["2.weight"].full_tensor().mean(0).view_as(total)
            if kind == "bfloat16":
                total = total + own["sum/2.weight"].full_tensor().flatten()[: total.numel()].view_as(total)
            assert (total - whole).abs().max() < 1e-6, kind
        report("well")

    def begun():
        dist.init_process_group("nccl")
        work(dist.get_rank(), dist.get_world_size())
        dist.destroy_process_group()

    as_ranks(2, begun)
"""


@pytest.mark.device
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_over_nccl_nothing_is_lost_either() -> None:
    assert lines_of(HEAD + TWO_GPUS) == ["well"] * 2
