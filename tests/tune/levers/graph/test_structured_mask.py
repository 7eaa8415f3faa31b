from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.evidence_builder import EvidenceBuilder
from tests.lever_tools import edited, pulled
from torch import Tensor
from torch.nn import functional as F

from flatout import masks
from flatout.blocks.kernels.attention import api as front
from flatout.core.errors import EditError
from flatout.core.records.lever import Candidate, Parameters, Refusal
from flatout.tune.levers.graph.structured_mask import LEVER

Q = (2, 4, 512, 32)
FLASH = "aten._scaled_dot_product_flash_attention_for_cpu"
DENSE = {
    "documents": (masks.documents([0, 100, 220, 512]) & masks.causal()).dense(512, 512)[0, 0],
    "window": masks.window(40).dense(512, 512)[0, 0],
    "causal": masks.causal().dense(512, 512)[0, 0],
    "nothing hidden": torch.ones(512, 512, dtype=torch.bool),
    "bias": torch.linspace(-1, 0, 512).expand(512, 512),
}


def operands(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(Q, generator=generator, dtype=dtype).requires_grad_() for _ in range(3)]


def results(mask: Tensor, **given: Any) -> list[Tensor]:
    q, k, v = operands()
    mask = mask if mask.dtype == torch.bool else mask.double()
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **given)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), (q, k, v))]


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The masks that flatout.attention was called with."""
    calls: list[str] = []
    run = front.attention

    def attention(*args: Any, mask: Any = None, **given: Any) -> Tensor:
        calls.append(repr(mask))
        return run(*args, mask=mask, **given)

    monkeypatch.setattr(front, "attention", attention)
    return calls


@pytest.mark.slow
@pytest.mark.parametrize("kind", DENSE)
def test_attention_is_the_same_and_skips_what_is_hidden(kind: str, called: list[str]) -> None:
    expected = results(DENSE[kind])
    with pulled(LEVER) as hooks:
        for one, other in zip(results(DENSE[kind]), expected, strict=True):
            torch.testing.assert_close(one, other)
        assert hooks.done == ([] if kind == "bias" else [LEVER.id])
    assert len(called) == (kind in ("documents", "window"))
    before = len(called)
    results(DENSE[kind])
    assert len(called) == before  # and torch's function is itself again


def test_a_mask_is_looked_at_again_after_it_has_changed() -> None:
    mask = DENSE["window"].clone()
    with pulled(LEVER):
        results(mask)
        mask.copy_(DENSE["documents"])
        changed = results(mask)
    for one, other in zip(changed, results(DENSE["documents"]), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.slow
def test_masks_made_in_every_step_are_not_kept() -> None:
    with pulled(LEVER):
        mask = DENSE["documents"].clone()
        gone = weakref.ref(mask)
        results(mask[None, None])
        del mask
        gc.collect()
        assert gone() is None


def test_dropout_and_other_numbers_of_keys_are_left_to_torch(called: list[str]) -> None:
    q, k, v = operands(torch.float32)
    with pulled(LEVER) as hooks:
        torch.manual_seed(0)
        F.scaled_dot_product_attention(q, k, v, attn_mask=DENSE["window"], dropout_p=0.1)
        F.scaled_dot_product_attention(q, k, v, attn_mask=torch.ones(1, 512, dtype=torch.bool))
        assert not hooks.done
    assert not called


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)  # dynamo reads it of a frame's inputs
def test_compiled_models_skip_what_is_hidden_too(called: list[str]) -> None:
    def model(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(2 * q, k, v, attn_mask=mask[None, None]).square()

    inputs = operands()
    expected = torch.autograd.grad(model(*inputs, DENSE["documents"]).sum(), inputs)
    with pulled(LEVER) as hooks:
        compiled = torch.compile(model)
        for _ in range(2):
            found = torch.autograd.grad(compiled(*inputs, DENSE["documents"]).sum(), inputs)
        assert hooks.done == [LEVER.id]
    assert len(called) == 2
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def graphs_of(model: Callable[..., Tensor], *inputs: Tensor) -> tuple[Tensor, list[torch.fx.Graph]]:
    """What the compiled model returns, and the graphs that it is made of."""
    graphs: list[torch.fx.Graph] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> object:
        graphs.append(graph.graph)
        return graph.forward

    torch._dynamo.reset()
    return torch.compile(model, backend=backend)(*inputs), graphs


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)  # dynamo reads it of a frame's inputs
@pytest.mark.parametrize("parameters", [{}, {"without_breaks": True}])
def test_graphs_end_at_attention_or_hold_an_operator_that_looks_at_the_mask(parameters: Parameters) -> None:
    def model(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q + 7, k * 3, v, attn_mask=mask).square()

    inputs = (*operands(torch.float32), DENSE["documents"])
    expected = model(*inputs)
    with pulled(LEVER, **parameters):
        found, graphs = graphs_of(model, *inputs)
    torch.testing.assert_close(found, expected)
    names = [node.name for graph in graphs for node in graph.nodes]
    assert any("dense_mask" in name for name in names) == bool(parameters)
    assert len(graphs) == (1 if parameters else 2)


@pytest.mark.parametrize("parameters", [{}, {"without_breaks": True}])
def test_masks_of_padding_end_no_graph(parameters: Parameters) -> None:
    padding = torch.ones(2, 1, 1, 512, dtype=torch.bool)
    with pulled(LEVER, **parameters) as hooks:
        _, graphs = graphs_of(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=padding), *operands())
        assert not hooks.done
    assert len(graphs) == 1
    assert not any("dense_mask" in node.name for node in graphs[0].nodes)


def test_under_autocast_it_is_of_autocasts_type() -> None:
    q, k, v = operands(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = F.scaled_dot_product_attention(q, k, v, attn_mask=DENSE["window"])
        with pulled(LEVER):
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=DENSE["window"])
    assert out.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(("kind", "parameters"), [("documents", [{}, {"without_breaks": True}]), ("sparse", [{}])])
def test_on_a_device_documents_may_stay_in_the_graph(kind: str, parameters: list[Parameters]) -> None:
    found = LEVER.propose(masked(kind, 0.1, device_s=0.099).build(), ())
    assert [c.parameters for c in found if isinstance(c, Candidate)] == parameters


def masked(kind: str, share: float, *, device_s: float | None = None) -> EvidenceBuilder:
    run = EvidenceBuilder(device_s=device_s)
    line = run.line("model.py", 12, "y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)")
    run.operator(FLASH, line, inputs=[Q, Q, Q, (512, 512)], output=Q, op_s=0.02)
    run.operator(f"{FLASH}_backward", line, inputs=[Q, Q, Q, Q], output=Q, op_s=0.03, phase="backward")
    run.fact("attention-mask", line, kind=kind, value=share)
    return run


def test_it_is_proposed_where_most_pairs_are_hidden_and_promises_no_more_than_those() -> None:
    (said,) = LEVER.propose(masked("documents", 0.1).build(), ())
    assert isinstance(said, Candidate)
    assert said.saved_s[0] == 0
    assert 0.04 < said.saved_s[1] < 0.05
    assert "hides 90% of the pairs" in said.because
    (said,) = LEVER.propose(masked("padding", 0.1).build(), ())
    assert isinstance(said, Refusal)


def test_the_flag_is_written_in_place_of_the_mask() -> None:
    text = "import torch.nn.functional as F\ny = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.1)\n"
    causal = edited(LEVER, text, kind="causal")
    assert causal.endswith("F.scaled_dot_product_attention(q, k, v, scale=0.1, is_causal=True)\n")
    assert edited(LEVER, text, kind="all-true").endswith("F.scaled_dot_product_attention(q, k, v, scale=0.1)\n")
    by_position = (
        "from torch.nn.functional import scaled_dot_product_attention\nscaled_dot_product_attention(q, k, v, mask)\n"
    )
    assert edited(LEVER, by_position, kind="causal").endswith("(q, k, v, is_causal=True)\n")
    with pytest.raises(EditError, match=r"flatout\.masks"):
        edited(LEVER, text)
