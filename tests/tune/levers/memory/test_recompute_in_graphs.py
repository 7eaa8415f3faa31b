from __future__ import annotations

import pytest
import torch
from tests.evidence_builder import EvidenceBuilder, tensor
from tests.lever_tools import pulled, ran
from torch import Tensor, nn
from torch._functorch import config

from flatout.core.errors import EditError
from flatout.core.records.compilation import Compilation
from flatout.core.records.evidence import Evidence
from flatout.core.records.lever import Candidate, Refusal
from flatout.tune.levers.memory.recompute_in_graphs import LEVER, edit

MIB = 1 << 20
RULES = [f"ban_recompute_{name}" for name in ("used_far_apart", "long_fusible_chains", "materialized_backward")]
COMPILED = Compilation(compile_s=1.0, num_frames=1, num_graphs=1)


def run(*, rows: int = 65536, compilation: Compilation | None = COMPILED) -> Evidence:
    """A compiled layer of width 256: its backward takes the weight, two activations and a gradient."""
    builder = EvidenceBuilder()
    batch, weight = tensor(rows, 256), tensor(256, 256)
    builder.operator("inductor.graph", inputs=[weight, batch], op_s=0.02)
    builder.operator("inductor.graph", inputs=[weight, batch, batch, batch], op_s=0.04, phase="backward")
    builder.compilation = compilation
    return builder.build()


def test_compiled_training_is_told_what_it_saves() -> None:
    [candidate] = LEVER.propose(run(), ())
    assert isinstance(candidate, Candidate)
    assert candidate.saved_bytes == pytest.approx(0.4 * 128 * MIB, rel=1e-6)
    assert candidate.saved_s[0] < 0 == candidate.saved_s[1]
    assert "128 MiB" in candidate.because


def test_beside_compiling_in_the_same_plan_it_is_proposed_by_what_cheap_operators_return() -> None:
    builder = EvidenceBuilder()
    batch = tensor(65536, 256)
    builder.operator("aten.mm", inputs=[batch, tensor(256, 256)], output=batch, op_s=0.02)
    builder.operator("aten.silu", inputs=[batch], output=batch, op_s=0.01)
    builder.operator("aten.silu_backward", inputs=[batch, batch], output=batch, op_s=0.01, phase="backward")
    [candidate] = LEVER.propose(builder.build(), ())
    assert isinstance(candidate, Candidate)
    assert (candidate.beside, candidate.parameters) == (("graph.compile",), {"chains": False})
    assert candidate.saved_bytes == pytest.approx(0.1 * 64 * MIB, rel=1e-6)


@pytest.mark.parametrize(
    ("evidence", "why"),
    [
        (EvidenceBuilder(kind="inference").build(), "does not train"),
        (run(compilation=None), "compiles nothing, and cheap operators keep little"),
        (run(rows=1024), "keep 2.0 MiB"),
    ],
)
def test_other_runs_are_refused_with_the_reason(evidence: Evidence, why: str) -> None:
    [refusal] = LEVER.propose(evidence, ())
    assert isinstance(refusal, Refusal)
    assert why in refusal.because


class Gated(nn.Module):
    """Its gate's product goes into another product, so that the backward needs it in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(32)
        self.gate, self.up = (nn.Linear(32, 64, bias=False) for _ in range(2))
        self.down = nn.Linear(64, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return self.down(torch.nn.functional.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


def saved_and_gradients(net: nn.Module, x: Tensor) -> tuple[int, list[Tensor]]:
    """Bytes that are left for the backward, each storage once and without those of weights, and the gradients."""
    own = {p.untyped_storage().data_ptr() for p in net.parameters()}
    sizes: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        if t.untyped_storage().data_ptr() not in own:
            sizes[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = net(x).square().sum()
    return sum(sizes.values()), list(torch.autograd.grad(y, [*net.parameters()]))


@pytest.mark.slow
def test_less_is_left_for_the_backward_and_gradients_are_the_same() -> None:
    torch.manual_seed(0)
    net, x = Gated(), torch.randn(48, 32)
    expected = saved_and_gradients(net, x)[1]
    found = {}
    for way in ("as torch does it", "again"):
        torch.compiler.reset()
        compiled = torch.compile(net, backend="aot_eager_decomp_partition")
        if way == "again":
            with pulled(LEVER) as hooks:
                found[way] = saved_and_gradients(compiled, x)  # type: ignore[arg-type]
                assert hooks.done == [LEVER.id]
        else:
            found[way] = saved_and_gradients(compiled, x)  # type: ignore[arg-type]
        for a, b in zip(found[way][1], expected, strict=True):
            torch.testing.assert_close(a, b)
    # at least the gated product, 48 x 64 of 4 bytes, is not among it
    assert found["again"][0] <= found["as torch does it"][0] - 4 * 48 * 64


def test_the_rules_are_put_back() -> None:
    before = {name: getattr(config, name) for name in RULES}
    with pulled(LEVER):
        assert all(before[name] is True and getattr(config, name) is False for name in RULES)
    assert before == {name: getattr(config, name) for name in RULES}


def test_without_chains_one_rule_goes() -> None:
    with pulled(LEVER, chains=False):
        assert [getattr(config, name) for name in RULES] == [True, True, False]
    assert "recompute_cheap_operators(chains=False)" in edit("import torch\n", {"chains": False})


def test_the_edit_calls_it_at_the_start_and_once() -> None:
    text = "import torch\nfrom torch import nn\n\nmodel = nn.Linear(2, 2)\nmodel.compile(backend='eager')\n"
    new = edit(text, {})
    before = config.ban_recompute_materialized_backward
    try:
        ran(new)
        assert config.ban_recompute_materialized_backward is False
    finally:
        for name in RULES:
            setattr(config, name, before)
    with pytest.raises(EditError, match="itself"):
        edit(new, {})
