"""Float8 as a lever: whom it is offered, what it does to a model and to a text, and that all of it is undone."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
import torch.nn.functional as F
from tests.evidence_builder import MACHINE, EvidenceBuilder, tensor
from tests.lever_tools import edited, pulled, ran
from torch import Tensor, nn

from flatout.blocks.training import float8
from flatout.core.errors import EditError, PlanError, UsageError
from flatout.core.records.compilation import Compilation
from flatout.core.records.lever import Candidate, PlannedLever, Refusal
from flatout.core.records.plan import Plan
from flatout.tune.levers.workload.float8_training import LEVER
from flatout.tune.live import Applied

NO_FLOAT8 = float8.refusal("cuda") if torch.cuda.is_available() else "no GPU"


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is offered depends on the run, not on what this machine has."""
    monkeypatch.setattr(float8, "absence", lambda: None)


def _run(*, rows: int = 8192, k: int = 4096, n: int = 4096, dtype: str = "bfloat16") -> EvidenceBuilder:
    rates = {"float32": 50e12, "bfloat16": 700e12}
    run = EvidenceBuilder(device_s=0.09, machine=msgspec.structs.replace(MACHINE, matmul_flop_per_s=rates))
    line = run.line("train.py", 5, "out = net(x)")
    run.model(line)
    for phase, a, b in (
        ("forward", (rows, k), (k, n)),
        ("backward", (rows, n), (n, k)),
        ("backward", (n, rows), (rows, k)),
    ):
        inputs = [tensor(*a, dtype=dtype), tensor(*b, dtype=dtype)]
        run.operator("aten.mm", line, inputs=inputs, op_s=0.02, phase=phase, flop=2 * rows * k * n)  # type: ignore[arg-type]
    return run


def _refusal(run: EvidenceBuilder) -> str:
    [said] = LEVER.propose(run.build(), ())
    assert isinstance(said, Refusal)
    return said.because


def test_large_products_in_bfloat16_are_offered_with_half_of_their_time() -> None:
    [candidate] = LEVER.propose(_run().build(), ())
    assert isinstance(candidate, Candidate)
    assert candidate.parameters == {"recipe": "tensorwise", "gated": True, "compile": True}
    assert candidate.saved_s == (pytest.approx(-0.018), pytest.approx(0.03, rel=0.01))
    assert "60.00 ms" in candidate.because
    assert LEVER.guarantee == "quality"


def test_a_script_that_compiles_is_asked_by_the_weights_of_its_graphs() -> None:
    run = _run()
    run.operators.clear()
    flop = int(700e12 * 0.04)
    run.operator("inductor.graph", inputs=[tensor(4096, 4096, dtype="bfloat16")], op_s=0.05, flop=flop)
    run.compilation = Compilation(compile_s=1.0, num_frames=1, num_graphs=1)
    [candidate] = LEVER.propose(run.build(), ())
    assert isinstance(candidate, Candidate)
    assert candidate.parameters == {"recipe": "tensorwise", "gated": True}
    assert candidate.saved_s[1] == pytest.approx(0.02, rel=0.01)
    run.operators.clear()
    run.operator("inductor.graph", inputs=[tensor(64, 64, dtype="bfloat16")], op_s=0.05, flop=flop)
    assert "large enough" in _refusal(run)


def test_of_products_in_float32_what_they_gain_in_bfloat16_is_promised() -> None:
    [candidate] = LEVER.propose(_run(dtype="float32").build(), ())
    assert isinstance(candidate, Candidate)
    in_bfloat16_s = 3 * 2 * 8192 * 4096 * 4096 / 700e12
    low_s, high_s = candidate.saved_s
    assert (low_s, high_s) == (pytest.approx(-0.3 * in_bfloat16_s), pytest.approx(0.5 * in_bfloat16_s, rel=0.01))
    run = _run(dtype="float32")
    run.operators[:] = [msgspec.structs.replace(o, op_s=0.002) for o in run.operators]
    assert "6% of a step" in _refusal(run)


def test_products_in_float16_and_of_devices_that_were_not_measured_are_refused() -> None:
    run = _run()
    run.fact("autocast", text="cuda:float16")
    assert "neither in bfloat16 nor in float32" in _refusal(run)
    evidence = _run(dtype="float32").build()
    [said] = LEVER.propose(msgspec.structs.replace(evidence, machine=None), ())
    assert isinstance(said, Refusal) and "neither in bfloat16 nor in float32" in said.because


@pytest.mark.parametrize(
    ("sizes", "told"),
    [
        ({"rows": 8190}, "8190 rows are no multiple of 16"),
        ({"k": 1024, "n": 1024}, "casts cost more than the product gains"),
        ({"n": 50257}, "50257 is not a multiple of 16"),
    ],
)
def test_products_that_do_not_gain_are_refused_with_their_sizes(sizes: dict[str, int], told: str) -> None:
    assert told in _refusal(_run(**sizes))


def test_small_shares_processors_and_inference_are_refused() -> None:
    run = _run()
    run.operators[:] = [msgspec.structs.replace(o, op_s=0.002) for o in run.operators]
    assert "6% of a step" in _refusal(run)
    assert "GPUs" in _refusal(EvidenceBuilder())
    assert "does not train" in _refusal(EvidenceBuilder(kind="inference", device_s=0.09))


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("NVIDIA A100-SXM4-80GB", "has no units for float8"),
        ("NVIDIA GeForce 9999", "is not known here"),
        ("AMD Instinct MI300X", "NVIDIA"),
    ],
)
def test_devices_are_refused_by_their_data_sheet(name: str, told: str) -> None:
    evidence = _run().build()
    evidence = msgspec.structs.replace(evidence, workload=msgspec.structs.replace(evidence.workload, device=name))
    [said] = LEVER.propose(evidence, ())
    assert isinstance(said, Refusal)
    assert told in said.because


def test_without_torchao_it_is_refused_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float8, "absence", lambda: "torchao is not installed; pip install 'flatout[quantise]'")
    assert "flatout[quantise]" in _refusal(_run())


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 2048, bias=False)
        self.down = nn.Linear(2048, 16)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.up(x).relu())
        return y


@pytest.fixture
def as_if(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if this device multiplied float8: the conversion without torchao, which a subclass stands for."""

    class Converted(nn.Linear):
        @classmethod
        def of(cls, layer: nn.Linear) -> Converted:
            made = cls(layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta")
            made.weight, made.bias = layer.weight, layer.bias
            return made

    class Config:
        @staticmethod
        def from_recipe_name(name: str) -> str:
            return name

    class Torchao:
        Float8LinearConfig = Config

        @staticmethod
        def convert_to_float8_training(model: nn.Module, *, config: str, module_filter_fn: Any) -> None:
            for path, layer in [*model.named_modules()]:
                if isinstance(layer, nn.Linear) and module_filter_fn(layer, path):
                    parent, _, name = path.rpartition(".")
                    setattr(model.get_submodule(parent), name, Converted.of(layer))

    monkeypatch.setattr(float8, "refusal", lambda _: None)
    monkeypatch.setattr(float8, "_torchao", lambda: Torchao)


@pytest.mark.usefixtures("as_if")
def test_a_model_that_trains_is_converted_at_its_first_call_and_put_back() -> None:
    net, x = Net(), torch.randn(16, 16)
    up, down, weights = net.up, net.down, dict(net.named_parameters())
    with pulled(LEVER) as hooks:
        net(x)
        assert type(net.up).__name__ == "Converted"
        assert net.down is down
        assert dict(net.named_parameters()).items() == weights.items()
        assert hooks.done == [LEVER.id]
    assert net.up is up
    assert all(p is weights[name] for name, p in net.named_parameters())


@pytest.mark.usefixtures("as_if")
def test_with_compile_the_model_is_compiled_unless_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[nn.Module] = []

    def compile_it(self: nn.Module, **options: object) -> None:
        asked.append(self)
        self._compiled_call_impl = self._call_impl

    monkeypatch.setattr(nn.Module, "compile", compile_it)
    net = Net()
    with pulled(LEVER, compile=True):
        net(torch.randn(16, 16))
        assert asked == [net]
    assert net._compiled_call_impl is None
    other = Net()
    other.down._compiled_call_impl = other.down._call_impl
    with pulled(LEVER, compile=True):
        other(torch.randn(16, 16))
        assert asked == [net]


@pytest.mark.usefixtures("as_if")
def test_a_teacher_and_a_small_model_stay() -> None:
    teacher, small = Net().eval(), nn.Sequential(nn.Linear(16, 16))
    with pulled(LEVER) as hooks:
        with torch.no_grad():
            teacher(torch.randn(16, 16))
        small(torch.randn(16, 16))
        assert type(teacher.up) is nn.Linear
        assert not hooks.done


class GatedNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(16, 2048, bias=False) for _ in range(2))
        self.down = nn.Linear(2048, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_gated_mlps_are_run_as_one_and_layer_by_layer_again(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torchao", reason="torchao is not installed")
    monkeypatch.setattr(float8, "refusal", lambda _: None)
    monkeypatch.setattr(float8, "layer_refusal", lambda layer, **_: None if type(layer) is nn.Linear else "other")
    net, x = GatedNet(), torch.randn(16, 16)
    expected = net(x)
    with pulled(LEVER, gated=True):
        found = net(x)
        assert "forward" in net.__dict__ and type(net.gate).__name__ == "Float8Linear"
        found.sum().backward()
    assert 1e-4 < float(((found - expected).norm() / expected.norm()).detach()) < 0.15
    assert "forward" not in net.__dict__ and torch.equal(net(x), expected)
    with pulled(LEVER):
        net(x)
        assert "forward" not in net.__dict__


@pytest.mark.usefixtures("as_if")
def test_it_is_pulled_on_a_model_that_is_there() -> None:
    net = Net()
    plan = Plan(lever=(PlannedLever(id=LEVER.id, guarantee=LEVER.guarantee),))
    with Applied(plan, net, None, None) as applied:
        assert applied.applied == (LEVER.id,)
        assert type(net.up).__name__ == "Converted"
    assert type(net.up) is nn.Linear


def test_on_a_processor_it_is_an_error_and_the_model_stays() -> None:
    net = Net()
    with pytest.raises(UsageError, match="'cpu' does not multiply float8"), pulled(LEVER):
        net(torch.randn(16, 16))
    assert type(net.up) is nn.Linear


def test_an_unknown_recipe_is_refused() -> None:
    with pytest.raises(PlanError, match="'fp7' is none of tensorwise"), pulled(LEVER, recipe="fp7"):
        pass


HEAD = """
    import torch
    from torch import nn

    model = nn.Sequential(nn.Linear(16, 2048), nn.Linear(2048, 16))
"""
TAIL = """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(16, 16)).sum().backward()
"""


def test_the_edit_comes_behind_the_move_and_compiles_where_nothing_does() -> None:
    after = edited(LEVER, HEAD + '    model.to("cpu")\n' + TAIL, compile=True)
    assert "from flatout.blocks.training import float8\n" in after
    assert 'model.to("cpu")\nfloat8.convert(model)\nmodel.compile()\n' in after
    gated = edited(LEVER, HEAD + '    model.to("cpu")\n' + TAIL, compile=True, gated=True)
    assert "float8.convert(model)\nrun_gated_as_one(model)\nmodel.compile()\n" in gated
    assert "from flatout.blocks.kernels.float8_gating.layers import run_gated_as_one\n" in gated
    assert 'convert(model, recipe="rowwise")\n' in edited(LEVER, HEAD + TAIL, recipe="rowwise")


@pytest.mark.parametrize("statement", ["    model = torch.compile(model)\n", "    model.compile()\n"])
def test_the_edit_comes_before_what_compiles(statement: str, monkeypatch: pytest.MonkeyPatch) -> None:
    after = edited(LEVER, HEAD + "    # fused\n" + statement + TAIL, compile=True, gated=True)
    assert "float8.convert(model)\nrun_gated_as_one(model)\n" in after
    assert after.index("float8.convert(model)\n") < after.index(statement.strip())
    assert after.count("compile(") == after.count("# fused") == 1
    monkeypatch.setattr(nn.Module, "compile", lambda self: None)
    monkeypatch.setattr(torch, "compile", lambda module: module)
    converted: list[nn.Module] = []
    monkeypatch.setattr(float8, "convert", converted.append)
    left = ran(after)
    assert converted == [left["model"]]


def test_a_compiled_function_is_not_taken_for_the_model() -> None:
    step = "\n    def step(x):\n        return model(x)\n\n    step = torch.compile(step)\n"
    after = edited(LEVER, HEAD + step + TAIL)
    assert "2048, 16))\nfloat8.convert(model)\n" in after


def test_texts_that_leave_doubt_are_refused() -> None:
    with pytest.raises(EditError, match="itself"):
        edited(LEVER, "from torchao import float8\n")
    two = "    other = nn.Linear(2, 2)\n    model = torch.compile(model)\n    other = torch.compile(other)\n"
    with pytest.raises(EditError, match="several"):
        edited(LEVER, HEAD + two + TAIL)


@pytest.mark.device
@pytest.mark.skipif(NO_FLOAT8 is not None, reason=str(NO_FLOAT8))
def test_a_compiled_model_trains_in_float8_and_is_put_back() -> None:
    pytest.importorskip("torchao", reason="torchao is not installed")
    torch.manual_seed(0)
    net = Net().cuda()
    up, x = net.up, torch.randn(64, 16, device="cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        expected = net(x)
    with pulled(LEVER, recipe="tensorwise", compile=True) as hooks, torch.autocast("cuda", dtype=torch.bfloat16):
        found = net(x)
        assert type(net.up).__name__ == "Float8Linear"
        found.float().square().mean().backward()
        assert hooks.done == [LEVER.id]
    assert net.up is up
    assert up.weight.grad is not None and bool(up.weight.grad.isfinite().all())
    error = float((found - expected).detach().float().norm() / expected.detach().float().norm())
    assert 1e-4 < error < 0.1
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert torch.equal(net(x), expected)
