"""A layer becomes sparse only where it was seen to be faster, and is left whole otherwise."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.plain_models import plain
from torch import nn

from flatout.core.errors import UsageError
from flatout.shrink.prune import sparsify
from flatout.shrink.prune.sparse import SparseLinear, thinned


class Slower:
    """A clock for which every other call takes `ratio` times as long: dense and sparse in turn, an order that turns."""

    def __init__(self, ratio: float) -> None:
        self.ratio = ratio

    def elapsed_s(self, fn: Callable[[], object], num_calls: int) -> float:
        fn()
        is_sparse = isinstance(getattr(fn, "func", None), SparseLinear)
        return num_calls * (self.ratio if is_sparse else 1.0) * 1e-3


@pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning")
def test_a_faster_layer_gives_what_its_thinned_weight_gives() -> None:
    case = plain("mlp")

    sparse = sparsify(case.module, case.inputs, density=0.2, min_time_s=0.01, clock=Slower(0.5))

    assert all(layer.is_sparse for layer in sparse.layers) and len(sparse.layers) == 3
    assert isinstance(sparse.model[0], SparseLinear) and isinstance(case.module[0], nn.Linear)
    x = case.inputs[0]
    expected = nn.functional.linear(
        x, thinned(case.module[0].weight, kind="unstructured", density=0.2), case.module[0].bias
    )
    torch.testing.assert_close(sparse.model[0](x), expected)
    torch.testing.assert_close(sparse.model[0](x[:1]), expected[:1])


@pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning")
def test_a_layer_that_is_not_faster_keeps_all_its_weights_and_says_both_times() -> None:
    case = plain("mlp")

    sparse = sparsify(case.module, case.inputs, min_time_s=0.01, clock=Slower(1.5))

    assert not any(layer.is_sparse for layer in sparse.layers)
    assert sparse.layers[0].because == "not faster: sparse 1500.0 us, dense 1000.0 us"
    assert torch.equal(sparse.model[0].weight, case.module[0].weight)


def test_a_kind_without_a_kernel_here_is_refused() -> None:
    with pytest.raises(UsageError, match="'2:4' has no kernel on 'cpu'"):
        sparsify(plain("mlp").module, plain("mlp").inputs, kind="2:4")
    with pytest.raises(UsageError, match="density 2 is outside"):
        sparsify(plain("mlp").module, plain("mlp").inputs, density=2)


@pytest.mark.device
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU with 2:4 kernels")
def test_two_of_four_on_a_gpu_is_faster_or_refused() -> None:
    model = nn.Sequential(nn.Linear(4096, 4096)).cuda().half()
    x = torch.randn(4096, 4096, device="cuda", dtype=torch.float16)

    sparse = sparsify(model, (x,), kind="2:4")

    weight = thinned(model[0].weight, kind="2:4", density=0.5) if sparse.layers[0].is_sparse else model[0].weight
    torch.testing.assert_close(sparse.model(x), nn.functional.linear(x, weight, model[0].bias), rtol=2e-2, atol=2e-2)
