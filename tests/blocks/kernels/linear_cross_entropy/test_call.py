from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.blocks.kernels.against_float64 import name_of, on_device
from tests.blocks.kernels.interpreted import interpreted
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from flatout.blocks.kernels.linear_cross_entropy.call import linear_cross_entropy
from flatout.blocks.kernels.linear_cross_entropy.sizes import device_chunk, summed_in
from flatout.core.errors import UsageError
from flatout.core.records.kernel import Kernel
from flatout.core.registry import kernels

_KERNELS = kernels("linear_cross_entropy")
_FUSED = [k for k in _KERNELS if not k.id.endswith("reference")]


def _inputs(
    dtype: torch.dtype = torch.float32, *, tokens: int = 12, vocabulary: int = 50
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, 16, generator=generator, dtype=torch.float64)
    weight = torch.randn(vocabulary, 16, generator=generator, dtype=torch.float64)
    targets = torch.randint(vocabulary, (tokens,), generator=generator)
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), targets


def _where(kernel: Kernel) -> Any:
    """Triton's run on a CPU, interpreted."""
    return interpreted() if kernel.id.endswith("triton") else nullcontext()


def _unfused(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight).flatten(0, -2), targets.flatten())


def test_a_sequence_of_batches_is_as_its_tokens_in_a_row() -> None:
    hidden, weight, targets = _inputs(torch.float64)
    targets[:4] = -100
    loss = linear_cross_entropy(hidden.view(3, 4, 16), weight, targets.view(3, 4))
    torch.testing.assert_close(loss, _unfused(hidden, weight, targets))
    losses = linear_cross_entropy(hidden.view(3, 4, 16), weight, targets.view(3, 4), reduction="none")
    assert losses.shape == (3, 4)
    torch.testing.assert_close(losses.sum() / 8, loss)


def test_one_token_needs_no_batch() -> None:
    hidden, weight, targets = _inputs(torch.float64)
    torch.testing.assert_close(
        linear_cross_entropy(hidden[0], weight, targets[0]), F.cross_entropy(weight @ hidden[0], targets[0])
    )


@pytest.mark.parametrize("kernel", _FUSED, ids=name_of)
def test_a_kept_graph_gives_the_same_gradient_again_and_leaves_the_first_alone(kernel: Kernel) -> None:
    hidden, weight, targets = _inputs()
    with _where(kernel):
        loss = kernel.run(hidden, weight, targets, chunk=5)
        [first] = torch.autograd.grad(3 * loss, weight, retain_graph=True)
        kept = first.clone()
        [second] = torch.autograd.grad(2 * loss, weight)
    torch.testing.assert_close(first, kept, rtol=0, atol=0)
    torch.testing.assert_close(second * 1.5, first)


@pytest.mark.parametrize("kernel", _FUSED, ids=name_of)
def test_a_second_derivative_is_refused_and_not_taken_for_zero(kernel: Kernel) -> None:
    hidden, weight, targets = _inputs()
    with _where(kernel):
        [gradient] = torch.autograd.grad(kernel.run(hidden, weight, targets), hidden, create_graph=True)
        with pytest.raises(UsageError, match="differentiated again"):
            (kernel.run(hidden, weight, targets) + gradient.square().sum()).backward()


def _products(kernel: Kernel, *, backward: bool) -> int:
    hidden, weight, targets = _inputs()
    with _where(kernel), profile(activities=[ProfilerActivity.CPU], acc_events=True) as seen:
        loss = kernel.run(hidden, weight, targets, chunk=6)
        if backward:
            loss.backward()
    return sum(e.count for e in seen.key_averages() if e.key in ("aten::mm", "aten::addmm_"))


@pytest.mark.parametrize("kernel", _FUSED, ids=name_of)
def test_three_products_a_chunk_and_one_where_nothing_learns(kernel: Kernel) -> None:
    assert _products(kernel, backward=True) == 2 * 3
    with torch.no_grad():
        assert _products(kernel, backward=False) == 2


@pytest.mark.slow
@pytest.mark.parametrize("kernel", _FUSED, ids=name_of)
def test_no_allocation_is_as_large_as_all_logits(kernel: Kernel) -> None:
    hidden, weight, targets = _inputs(tokens=64, vocabulary=300)
    with _where(kernel), profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as seen:
        kernel.run(hidden, weight, targets, chunk=8).backward()
    largest = max(e.cpu_memory_usage for e in seen.events() if e.name == "[memory]")
    assert largest <= max(8 * 320 * 4, weight.numel() * 4) < 64 * 300 * 4


@pytest.mark.slow
@pytest.mark.parametrize("kernel", _FUSED, ids=name_of)
@pytest.mark.long
def test_small_gradients_survive_float16_under_a_loss_scale(kernel: Kernel) -> None:
    """Probabilities of 1/3000 over 400 tokens are 8e-7, of which float16 holds one digit; classes that are never a target get no
    more."""
    hidden, weight, targets = _inputs(torch.float16, tokens=400, vocabulary=3000)
    targets %= 10
    with torch.no_grad():
        weight.mul_(0.02)
    exact = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    [wanted] = torch.autograd.grad(_unfused(*exact, targets), exact[1:])
    with _where(kernel):
        [got] = torch.autograd.grad(kernel.run(hidden, weight, targets, chunk=128) * 65536, [weight])
    difference = got.double() / 65536 - wanted
    assert float(difference[10:].norm() / wanted[10:].norm()) < 4 * torch.finfo(torch.float16).eps


def test_autocast_decides_the_precision_of_the_products() -> None:
    hidden, weight, targets = _inputs()
    exact = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    wanted = torch.autograd.grad(_unfused(*exact, targets), exact)
    with torch.autocast("cpu", torch.bfloat16):
        usual, fused = _unfused(hidden, weight, targets), linear_cross_entropy(hidden, weight, targets, chunk=5)
    rough, got = (torch.autograd.grad(loss, [hidden, weight]) for loss in (usual, fused))
    assert [g.dtype for g in got] == [torch.float32, torch.float32]
    for a, b, c in zip(got, rough, wanted, strict=True):
        assert 1e-5 < (a - c).norm() <= 2 * (b - c).norm() + torch.finfo(torch.bfloat16).eps * c.norm()


def test_weights_tied_to_an_embedding_get_both_gradients() -> None:
    torch.manual_seed(0)
    table, tokens, targets = nn.Embedding(30, 8).double(), torch.randint(30, (9,)), torch.randint(30, (9,))
    got = torch.autograd.grad(linear_cross_entropy(table(tokens).tanh(), table.weight, targets), table.weight)
    wanted = torch.autograd.grad(_unfused(table(tokens).tanh(), table.weight, targets), table.weight)
    torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("num_kept", [8, 10, 12, 100])
def test_a_bound_on_the_kept_tokens_changes_nothing(num_kept: int) -> None:
    hidden, weight, targets = _inputs(torch.float64)
    targets[2:6] = -100
    got = linear_cross_entropy(hidden, weight, targets, num_kept=num_kept)
    wanted = _unfused(hidden, weight, targets)
    torch.testing.assert_close(got, wanted)
    for a, b in zip(*(torch.autograd.grad(loss, [hidden, weight]) for loss in (got, wanted)), strict=True):
        torch.testing.assert_close(a, b)


def test_too_small_a_bound_is_seen() -> None:
    hidden, weight, targets = _inputs()
    assert linear_cross_entropy(hidden, weight, targets, num_kept=11).isnan()


def test_a_class_outside_of_the_vocabulary_is_not_silent() -> None:
    hidden, weight, targets = _inputs()
    targets[3] = 50
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        linear_cross_entropy(hidden, weight, targets)
    with interpreted():
        assert _KERNELS[0].run(hidden, weight, targets).isnan()


@pytest.mark.slow
@pytest.mark.parametrize("kernel", _KERNELS, ids=name_of)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_compiles_whole(kernel: Kernel, reduction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, targets = _inputs()
    targets[:3] = -100
    options: dict[str, Any] = {"label_smoothing": 0.1, "reduction": reduction, "chunk": 5, "kernel": kernel.id}
    if kernel.id.endswith("triton"):
        monkeypatch.setattr("flatout.blocks.kernels.linear_cross_entropy.call.kernel_for", lambda *_, **__: kernel)

    def step(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return 2 * linear_cross_entropy(hidden.tanh(), weight, targets, **options).sum()

    torch.compiler.reset()
    with _where(kernel):
        made = [(loss, *torch.autograd.grad(loss, [hidden, weight])) for loss in (
            step(hidden, weight, targets),
            torch.compile(step, fullgraph=True, backend="aot_eager")(hidden, weight, targets),
        )]  # fmt: skip
    for a, b in zip(*made, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.slow
def test_compiles_for_other_numbers_of_tokens_at_once() -> None:
    torch.compiler.reset()
    step = torch.compile(linear_cross_entropy, fullgraph=True, backend="aot_eager", dynamic=True)
    with torch.compiler.set_stance("default"):
        first = _inputs(tokens=12)
        step(*first)
    with torch.compiler.set_stance("fail_on_recompile"):
        for tokens in (13, 40):
            inputs = _inputs(tokens=tokens)
            torch.testing.assert_close(step(*inputs), linear_cross_entropy(*inputs))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"weight": torch.zeros(50, 15)}, "do not multiply"),
        ({"targets": torch.zeros(11, dtype=torch.long)}, "one for each row"),
        ({"targets": torch.zeros(12)}, "class numbers"),
        ({"bias": torch.zeros(49)}, "one number for each"),
        ({"weight": torch.zeros(50, 16, dtype=torch.bfloat16)}, "one dtype"),
        ({"label_smoothing": 1.5}, "outside of 0..1"),
        ({"softcap": 0.0}, "softcap 0.0"),
        ({"reduction": "max"}, "none of mean, sum, none"),
        ({"chunk": 0}, "chunk 0"),
        ({"num_kept": 3, "reduction": "none"}, "num_kept 3"),
        ({"kernel": "linear_cross_entropy.other"}, "does not implement"),
        ({"kernel": "linear_cross_entropy.triton"}, "is on 'cpu'"),
    ],
)
def test_what_does_not_fit_is_said(change: dict[str, Any], says: str) -> None:
    hidden, weight, targets = _inputs()
    with pytest.raises(UsageError, match=says):
        linear_cross_entropy(**{"hidden": hidden, "weight": weight, "targets": targets, **change})


def test_a_cpu_gets_the_chunked_kernel_with_the_reason_against_triton() -> None:
    from flatout.blocks.kernels.selection import select_kernel

    choice = select_kernel("linear_cross_entropy", *_inputs())
    assert choice.kernel.id == "linear_cross_entropy.chunked"
    assert [id for id, _ in choice.refusals] == ["linear_cross_entropy.triton"]


@pytest.mark.parametrize("width", [768, 2048, 4096, 8192])
@pytest.mark.parametrize("num_tokens", [8192, 16384, 32768, 131072])
def test_on_a_device_a_sixth_of_the_memory_is_enough(width: int, num_tokens: int) -> None:
    """In bytes over V, for bf16: a chunk of logits and the sum of the weight's gradient where it is wider, to logits,
    log-softmax and gradient of all tokens."""
    chunk = device_chunk(num_tokens=num_tokens, width=width)
    dtype = summed_in(num_chunks=-(-num_tokens // chunk), weight=torch.bfloat16, product=torch.bfloat16)
    assert 2 * chunk + (4 * width if dtype == torch.float32 else 0) <= 3 * 2 * num_tokens / 6


@on_device
@pytest.mark.device
def test_the_host_waits_for_nothing() -> None:
    hidden, weight, targets = (t.detach().cuda() for t in _inputs(torch.bfloat16))
    hidden.requires_grad_(), weight.requires_grad_()
    targets[:3] = -100
    linear_cross_entropy(hidden, weight, targets, num_kept=10).backward()
    try:
        torch.cuda.set_sync_debug_mode("error")
        linear_cross_entropy(hidden, weight, targets, chunk=5, label_smoothing=0.1).backward()
        linear_cross_entropy(hidden, weight, targets, num_kept=10).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@on_device
@pytest.mark.device
def test_weights_in_float32_get_their_gradient_unrounded_under_autocast() -> None:
    hidden, weight, targets = (t.detach().cuda() for t in _inputs(tokens=300, vocabulary=1000))
    hidden.requires_grad_(), weight.requires_grad_()
    with torch.autocast("cuda", torch.bfloat16):
        usual, fused = _unfused(hidden, weight, targets), linear_cross_entropy(hidden, weight, targets, chunk=64)
    exact = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    wanted = torch.autograd.grad(_unfused(*exact, targets), exact)
    rough, got = (torch.autograd.grad(loss, [hidden, weight]) for loss in (usual, fused))
    for a, b, c in zip(got, rough, wanted, strict=True):
        assert a.dtype == torch.float32
        assert (a - c).norm() <= 2 * (b - c).norm() + torch.finfo(torch.bfloat16).eps * c.norm()


@on_device
@pytest.mark.device
def test_compiles_whole_on_a_device() -> None:
    hidden, weight, targets = (t.detach().cuda() for t in _inputs(torch.bfloat16))
    hidden.requires_grad_(), weight.requires_grad_()
    torch.compiler.reset()
    made = [
        (loss, *torch.autograd.grad(loss, [hidden, weight]))
        for loss in (
            linear_cross_entropy(hidden, weight, targets),
            torch.compile(linear_cross_entropy, fullgraph=True)(hidden, weight, targets),
        )
    ]
    for a, b in zip(*made, strict=True):
        torch.testing.assert_close(a, b)
