"""Experts: equal to a loop over tokens, to themselves over ranks, and evenly loaded."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.blocks.parallel.forked import lines_of
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flatout.blocks.parallel.clipping import clip_gradients
from flatout.blocks.parallel.experts import Experts, auxiliary_loss, balance_experts
from flatout.blocks.parallel.routing import Scores, combined, expert_rows, ordered
from flatout.core.errors import UsageError

pytestmark = pytest.mark.slow


def _by_token(layer: Experts, x_NC: Tensor) -> Tensor:
    """The definition, a token at a time, in float64."""
    up, down = layer.up_ECF.double(), layer.down_EFC.double()
    out = torch.zeros_like(x_NC, dtype=torch.float64)
    for n, x in enumerate(x_NC.double()):
        logits = layer.router.weight.double() @ x
        score = logits.softmax(-1) if layer.scores == "softmax" else logits.sigmoid()
        selected = (score + layer.bias_steps_E * layer.balance_step).topk(layer.experts_per_token).indices
        total = score[selected].sum() if layer.is_normalised else 1.0
        for e in selected:
            inner = x @ up[e]
            gate = inner if layer.gate_ECF is None else x @ layer.gate_ECF[e].double()
            inner = layer.activation(gate) * (1.0 if layer.gate_ECF is None else inner)
            out[n] += inner @ down[e] * score[e] / total
    return out


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
@pytest.mark.parametrize("is_gated", [True, False])
@pytest.mark.parametrize("is_normalised", [True, False])
def test_each_token_has_the_weighted_sum_of_its_experts(scores: Scores, is_gated: bool, is_normalised: bool) -> None:
    torch.manual_seed(0)
    layer = Experts(8, 12, 6, 2, is_gated=is_gated, scores=scores, is_normalised=is_normalised, activation=F.gelu)
    layer.bias_steps_E += torch.tensor([300, 0, -300, 0, 0, 100])
    x = torch.randn(2, 7, 8)
    out = layer(x)
    assert out.shape == x.shape
    assert layer.selected is not None and layer.selected.implementation == "loop" and "float32" in layer.selected.reason
    wanted = _by_token(layer, x.view(-1, 8))
    torch.testing.assert_close(out.view(-1, 8).double(), wanted, rtol=1e-5, atol=1e-6)
    names = [n for n, _ in layer.named_parameters()]
    found = torch.autograd.grad(out.square().sum(), [*layer.parameters()])
    exact = torch.autograd.grad(wanted.square().sum(), [*layer.parameters()])
    for name, a, b in zip(names, found, exact, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, msg=name)


def test_grouped_products_are_those_of_the_loop() -> None:
    torch.manual_seed(0)
    loop = Experts(16, 32, 8, 2, implementation="loop").bfloat16()
    grouped = copy.deepcopy(loop)
    grouped.implementation = "grouped"
    outs = []
    for layer in (loop, grouped):
        x = torch.linspace(-1, 1, 5 * 16).view(5, 16).bfloat16().requires_grad_()  # fewer rows than some experts
        out = layer(x)
        out.square().sum().backward()
        outs.append([out, x.grad, *(p.grad for p in layer.parameters())])
        assert layer.selected is not None and layer.selected.implementation == layer.implementation
    for a, b in zip(*outs, strict=True):
        torch.testing.assert_close(a, b, rtol=2**-7, atol=2**-9)


@pytest.mark.device
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_bfloat16_takes_grouped_products_without_a_wait_of_the_host() -> None:
    torch.manual_seed(0)
    layer = Experts(64, 128, 8, 2, has_auxiliary_loss=True).cuda().bfloat16()
    loop = copy.deepcopy(layer)
    loop.implementation = "loop"
    x = torch.randn(100, 64, device="cuda", dtype=torch.bfloat16)
    layer(x).float().square().mean().backward()  # the first call sets libraries up
    layer.zero_grad()
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = layer(x)
        (out.float().square().mean() + auxiliary_loss(layer)).backward()
        balance_experts(layer)
        load = layer.load
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert load.sum().item() == 0
    assert layer.selected is not None and layer.selected.implementation == "grouped"
    wanted = loop(x)
    (wanted.float().square().mean() + auxiliary_loss(loop)).backward()
    torch.testing.assert_close(out, wanted, rtol=2**-6, atol=2**-8)
    for p, q in zip(layer.parameters(), loop.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=2**-5, atol=2**-7 * q.grad.abs().max().item())  # type: ignore[union-attr]


def test_grouped_is_refused_where_it_cannot_be() -> None:
    with pytest.raises(UsageError, match=r"products are in torch\.float32"):
        Experts(8, 8, 2, 1, implementation="grouped")(torch.ones(1, 8))
    with pytest.raises(UsageError, match="width of 12 is no multiple of 8"):
        Experts(8, 12, 2, 1, implementation="grouped").bfloat16()(torch.ones(1, 8, dtype=torch.bfloat16))


def test_numbers_that_do_not_fit_are_refused() -> None:
    for numbers in ((0, 8, 2, 1), (8, 8, 2, 3), (8, 8, 2, 0)):
        with pytest.raises(UsageError, match="give positive numbers"):
            Experts(*numbers)
    with pytest.raises(UsageError, match="scores 'tanh'"):
        Experts(8, 8, 2, 1, scores="tanh")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="no Experts"):
        balance_experts(nn.Linear(1, 1))
    with pytest.raises(UsageError, match="has_auxiliary_loss=True"):
        auxiliary_loss(Experts(8, 8, 2, 1))


def test_under_autocast_products_are_in_its_dtype_and_the_choice_in_float32() -> None:
    torch.manual_seed(0)
    layer, x = Experts(8, 16, 4, 2), torch.randn(9, 8)
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x)
    assert out.dtype is torch.bfloat16
    wanted = layer(x)  # the same choice, or it would be far off
    torch.testing.assert_close(out.float(), wanted, rtol=0.1, atol=2**-6)


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 20), st.integers(1, 4), st.integers(4, 6), st.integers(0, 99))
def test_rows_come_back_to_where_they_were(num: int, choices: int, experts: int, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    expert_NK = torch.rand(num, experts, generator=draw).topk(choices).indices
    order = ordered(expert_NK.flatten(), experts)
    assert torch.equal(order.counts_E, torch.bincount(expert_NK.flatten(), minlength=experts))
    in_order = expert_NK.flatten()[order.source_R]
    assert torch.equal(in_order, in_order.sort().values)
    x = torch.randn(num, 3, generator=draw, dtype=torch.float64, requires_grad=True)
    weight = torch.rand(num, choices, generator=draw, dtype=torch.float64)
    back = combined(expert_rows(x, order, choices), order, weight)
    torch.testing.assert_close(back, x * weight.sum(1, keepdim=True))
    back.sum().backward()
    torch.testing.assert_close(x.grad, weight.sum(1, keepdim=True).expand(-1, 3))


def test_the_bias_of_the_choice_evens_the_load_and_stays_through_a_cast() -> None:
    torch.manual_seed(0)
    layer = Experts(8, 8, 8, 2, balance_step=0.01)
    draw = torch.Generator().manual_seed(1)
    loads = []
    assert layer.load.sum() == 0
    for _ in range(60):
        layer(torch.randn(256, 8, generator=draw) + 1)
        loads.append(layer.load)
        balance_experts(layer)
    assert loads[0].max() > 0.2
    assert loads[-1].max() < 0.16 and loads[-1].min() > 0.08  # of 0.125 each
    steps = layer.bias_steps_E.clone()
    assert torch.equal(layer.bfloat16().bias_steps_E, steps)
    layer.eval()(torch.randn(4, 8).bfloat16())
    assert layer.load.sum() == 0  # counted in training alone


def test_a_step_of_the_bias_is_by_sign_and_none_where_load_is_even() -> None:
    layer = Experts(4, 4, 4, 1)
    layer._counts_E = torch.tensor([5, 3, 4, 4])
    balance_experts(layer)
    assert layer.bias_steps_E.tolist() == [-1, 1, 0, 0]
    balance_experts(layer)  # nothing was counted since
    assert layer.bias_steps_E.tolist() == [-1, 1, 0, 0]


def test_the_auxiliary_loss_is_one_when_even_and_evens_the_router() -> None:
    torch.manual_seed(0)
    layer = Experts(8, 8, 8, 2, has_auxiliary_loss=True, balance_step=0)
    with torch.no_grad():
        layer.router.weight.zero_()
    layer(torch.randn(64, 8))
    assert auxiliary_loss(layer).item() == pytest.approx(1.0)
    with pytest.raises(UsageError, match="run a forward first"):
        auxiliary_loss(layer)  # it is handed out once
    layer.reset_parameters()
    update = torch.optim.Adam(layer.router.parameters(), lr=1e-2)
    losses = []
    for _ in range(100):
        layer(torch.randn(256, 8) + 1)
        loss = auxiliary_loss(nn.Sequential(layer))
        loss.backward()
        update.step()
        update.zero_grad()
        losses.append(loss.item())
    assert losses[0] > 1.05
    assert losses[-1] < 1.0 + (losses[0] - 1) / 4


def test_recompute_gives_the_same_gradients() -> None:
    torch.manual_seed(0)
    layer, x = Experts(8, 8, 4, 2), torch.randn(6, 8, requires_grad=True)
    plain = torch.autograd.grad(layer(x).square().sum(), [x, *layer.parameters()])
    again = torch.autograd.grad(checkpoint(layer, x, use_reentrant=False).square().sum(), [x, *layer.parameters()])
    assert all(map(torch.equal, plain, again))


def test_clipping_without_ranks_is_that_of_torch() -> None:
    one, other = nn.Linear(3, 3), nn.Linear(3, 3)
    for p, q in zip(one.parameters(), other.parameters(), strict=True):
        p.grad = torch.randn_like(p)
        q.grad = p.grad.clone()
    assert clip_gradients([nn.Parameter(torch.ones(1))], 1.0).item() == 0
    norm, wanted = clip_gradients(one.parameters(), 0.5), torch.nn.utils.clip_grad_norm_(other.parameters(), 0.5)
    torch.testing.assert_close(norm, wanted)
    for p, q in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


SPREAD = """
    import copy, json
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor
    from flatout.core.errors import UsageError
    from flatout.blocks.parallel.clipping import clip_gradients
    from flatout.blocks.parallel.experts import Experts, auxiliary_loss, balance_experts, spread_experts
    from flatout.blocks.training.checkpoints import Checkpoints

    def whole(tensor):
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def net():
        torch.manual_seed(0)
        layers = [Experts(16, 24, 8, 2, has_auxiliary_loss=True, scores="sigmoid") for _ in range(2)]
        return nn.Sequential(nn.Linear(6, 16), layers[0], nn.Tanh(), layers[1], nn.Linear(16, 3))

    def work(how, *sizes):
        dist.init_process_group("gloo")
        rank, num = dist.get_rank(), dist.get_world_size()
        one, many = net(), net()
        if rank:  # ranks begin as the first
            for p in many[1].parameters(recurse=False):
                p.data.zero_()
        names = list(many.state_dict())
        mesh = init_device_mesh("cpu", sizes)
        divided = spread_experts(many, mesh)
        assert list(many.state_dict()) == names and len(divided) == 6
        assert divided[0].to_local().shape[0] == 8 // sizes[-1]
        try:
            spread_experts(many, mesh)
            raise AssertionError
        except UsageError as e:
            assert "'1' is spread already" in str(e)
        if how == "fsdp":
            fully_shard(many, ignored_params=set(divided))
            model = many
        else:
            model = nn.parallel.DistributedDataParallel(many)
        updates = [torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-3) for m in (one, many)]
        draw, worst, worst_grad, norms, biases = torch.Generator().manual_seed(3), 0.0, 0.0, [], []
        for step in range(4):
            x = torch.randn(num, 10, 6, generator=draw) + 0.5
            # every rank's loss is its mean; the second step comes as two micro-batches
            for part in ((x,) if step != 1 else x.split(5, dim=1)):
                out = one(part)
                (out.square().mean() + 0.1 * auxiliary_loss(one)).backward()
                mine = model(part[rank])
                (mine.square().mean() + 0.1 * auxiliary_loss(model)).backward()
                worst = max(worst, (out[rank] - mine).abs().max().item())
            for p, q in zip(one.parameters(), many.parameters()):
                worst_grad = max(worst_grad, (p.grad - whole(q.grad)).abs().max().item())
            a, b = nn.utils.clip_grad_norm_(one.parameters(), 0.05), clip_gradients(many.parameters(), 0.05)
            norms.append(abs(a.item() - whole(b).item()))
            for update in updates:
                update.step()
                update.zero_grad()
            balance_experts(model)
            loads = [m._counts_E for m in one if isinstance(m, Experts)]
            for m in one:
                if isinstance(m, Experts):
                    count = m._counts_E
                    m.bias_steps_E += (count.sum() - 8 * count).sign().int()
                    m._counts_E = None
            biases.append(all(torch.equal(whole(many[i].bias_steps_E), one[i].bias_steps_E) for i in (1, 3)))
            assert one[1].bias_steps_E.any()
        apart = max((p - whole(q)).abs().max().item() for p, q in zip(one.parameters(), many.parameters()))
        report(json.dumps([worst, worst_grad, max(norms), apart, all(biases)]))
        if how == "saved":
            with Checkpoints(sys.argv[1]) as kept:
                kept.save(4, net=model, optimizer=updates[1])
            torch.save([one.state_dict(), updates[0].state_dict()], f"{sys.argv[1]}/one-{rank}.pt")
        dist.destroy_process_group()
"""


@pytest.mark.multi
@pytest.mark.long
def test_over_ranks_it_is_one_process_with_all_tokens(tmp_path: Path) -> None:
    calls = ('2, lambda: work("ddp", 2)', '4, lambda: work("fsdp", 4)', '4, lambda: work("ddp", 2, 2)')
    said = lines_of(SPREAD + "".join(f"\n    as_ranks({arguments})" for arguments in calls), tmp_path)
    assert len(said) == 10
    for line in said:
        out, grad, norm, apart, is_same_bias = json.loads(line)
        assert max(out, grad, norm) < 1e-5
        assert apart < 1e-4  # weights after four steps of Adam, of size 0.01 each
        assert is_same_bias


LOADED = """
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor
    from flatout.blocks.parallel.experts import Experts, spread_experts
    from flatout.blocks.training.checkpoints import Checkpoints

    def loaded():
        dist.init_process_group("gloo")
        many = net()
        spread_experts(many, init_device_mesh("cpu", (4,)))
        update = torch.optim.AdamW(many.parameters())
        with Checkpoints(sys.argv[1]) as kept:
            assert kept.load(net=many, optimizer=update) == 4
        weights, state = torch.load(f"{sys.argv[1]}/one-0.pt")
        for name, value in many.state_dict().items():
            assert torch.allclose(whole(value), weights[name], atol=1e-4), name
        for number, values in update.state_dict()["state"].items():
            assert torch.allclose(whole(values["exp_avg"]), state["state"][number]["exp_avg"], atol=1e-5)
        assert update.state[many[1].up_ECF]["exp_avg"].to_local().shape[0] == 2
        report("loaded")
        dist.destroy_process_group()

    as_ranks(4, loaded)
"""


@pytest.mark.multi
@pytest.mark.long
def test_a_checkpoint_of_two_ranks_is_read_by_four(tmp_path: Path) -> None:
    said = lines_of(SPREAD + '\n    as_ranks(2, lambda: work("saved", 2))\n' + LOADED, tmp_path)
    assert said[2:] == ["loaded"] * 4


UNEVEN = """
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from flatout.core.errors import UsageError
    from flatout.blocks.parallel.experts import Experts, spread_experts

    def work():
        dist.init_process_group("gloo")
        rank = dist.get_rank()
        mesh = init_device_mesh("cpu", (2,))
        torch.manual_seed(0)
        one, layer = Experts(8, 8, 4, 1), Experts(8, 8, 4, 1)
        layer.load_state_dict(one.state_dict())
        spread_experts(layer, mesh)
        parts = [torch.randn(3, 8), torch.randn(0, 8)]  # the second rank has no token
        for only in (None, 0):  # and then no expert but one has any
            if only is not None:
                for m in (one, layer):
                    m.bias_steps_E.zero_()
                    m.bias_steps_E[only] = 10000
            m = None
            wanted = one(torch.cat(parts))
            wanted.sum().backward()
            found = layer(parts[rank])
            found.sum().backward()
            assert torch.allclose(found, wanted[:3] if rank == 0 else wanted[3:], atol=1e-6)
            assert torch.allclose(layer.up_ECF.grad.full_tensor() * 2, one.up_ECF.grad, atol=1e-6)
        for sizes, why in (((2,), "5 experts for 2 ranks"), ((1, 1, 2), "3 dimensions of the mesh")):
            try:
                spread_experts(Experts(8, 8, 5, 1), init_device_mesh("cpu", sizes))
                raise AssertionError
            except UsageError as e:
                assert why in str(e), e
        report("well")
        dist.destroy_process_group()

    as_ranks(2, work)
"""


@pytest.mark.multi
@pytest.mark.long
def test_ranks_without_tokens_and_experts_without_rows() -> None:
    assert lines_of(UNEVEN) == ["well"] * 2
