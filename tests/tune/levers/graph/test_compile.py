from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
from tests.evidence_builder import EvidenceBuilder, tensor
from tests.lever_tools import pulled, ran
from torch import nn

from flatout.core.errors import EditError, PlanError
from flatout.core.records.lever import Candidate, Parameters, Refusal
from flatout.tune.levers.graph.compile import LEVER, edit


def test_a_model_that_is_most_of_the_step_is_offered() -> None:
    run = EvidenceBuilder()
    run.model(run.line("train.py", 5, "net(x)"))
    [candidate] = LEVER.propose(run.build(), ())
    assert isinstance(candidate, Candidate)
    assert candidate.parameters == {"mode": "default", "plain_evaluation": True}
    assert 0 < candidate.saved_s[1] <= run.build().steps.step_s


def test_a_model_that_is_little_of_the_step_is_refused() -> None:
    run = EvidenceBuilder(forward=0.001, backward=0.001, data=0.098)
    run.model(run.line("train.py", 5, "net(x)"))
    [refusal] = LEVER.propose(run.build(), ())
    assert isinstance(refusal, Refusal)
    assert "%" in refusal.because


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # dynamo's own
def test_a_module_is_compiled_in_place_at_its_first_call_and_afterwards_not() -> None:
    net, x = nn.Sequential(nn.Linear(4, 8), nn.Tanh()), torch.randn(3, 4)
    expected = net(x)
    with pulled(LEVER, backend="eager") as hooks:
        assert net._compiled_call_impl is None
        output = net(x)
        assert net._compiled_call_impl is not None
        assert hooks.done == [LEVER.id]
    assert net._compiled_call_impl is None
    assert torch.equal(output, expected)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # dynamo's own
def test_nothing_is_compiled_anew_for_an_epochs_smaller_last_batch() -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh())
    torch._dynamo.reset()
    with pulled(LEVER, backend="eager"):
        for _ in range(20):
            net(torch.randn(8, 4))
        before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        x = torch.randn(3, 4)
        output = net(x)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before > 0
    assert torch.equal(output, net(x))


def _parameters(run: EvidenceBuilder) -> list[Parameters]:
    """Without what all have in common (evaluations stay as they are), and without fallbacks."""
    proposed = [p for p in LEVER.propose(run.build(), ()) if isinstance(p, Candidate)]
    found = [p.parameters for p in proposed if not p.fallback_for]
    assert all(one.get("plain_evaluation") for one in found)
    return [{k: v for k, v in one.items() if k != "plain_evaluation"} for one in found]


def test_a_policy_is_compiled_in_its_rollouts_too() -> None:
    run = EvidenceBuilder(rollout=0.02)
    run.model(run.line("train.py", 5, "net(x)"))
    [candidate] = LEVER.propose(run.build(), ())
    assert isinstance(candidate, Candidate) and "plain_evaluation" not in candidate.parameters


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # dynamo's own
def test_samples_between_the_steps_of_a_training_are_not_compiled_for() -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh())
    torch._dynamo.reset()
    with pulled(LEVER, backend="eager", plain_evaluation=True):
        net(torch.randn(8, 4))
        before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        with torch.no_grad():
            outputs = [net(torch.ones(length, 4)) for length in range(1, 6)]
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before > 0
    assert all(torch.equal(one, net(torch.ones(len(one), 4))) for one in outputs)


def test_the_text_keeps_evaluations_from_being_compiled() -> None:
    text = (
        "import torch\nnet = Net()\noptimizer = SGD(net.parameters())\n@torch.no_grad()\ndef score(x):\n    return net(x)\n"
        "net(x).sum().backward()\n"
    )
    new = edit(text, {"mode": "default", "plain_evaluation": True})
    assert "net = Net()\nnet.compile()\n" in new
    assert '@torch.no_grad()\n@torch.compiler.set_stance("force_eager")\ndef score' in new


def test_timing_kernels_while_it_compiles_takes_longer() -> None:
    usual = LEVER.effort_with({"mode": "default"})
    assert LEVER.effort_with({"mode": "max-autotune-no-cudagraphs"}) > 2 * usual
    assert usual == LEVER.effort_with({"mode": "reduce-overhead"}) == LEVER.effort_with({}) > 1


@pytest.mark.parametrize(
    ("inner", "regions"), [(".linear", [("blocks",)]), ("", [])], ids=["blocks of layers", "single layers in a row"]
)
def test_blocks_that_are_alike_are_offered_to_be_compiled_alone(inner: str, regions: list[tuple[str, ...]]) -> None:
    run = EvidenceBuilder()
    line = run.line("train.py", 5, "net(x)")
    run.model(line)
    for number in range(4):
        run.operator("aten.addmm", line, module=f"Net.blocks.{number}{inner}")
        run.operator("aten.gelu", line, module=f"Net.blocks.{number}")
    run.operator("aten.addmm", line, module="Net.head")
    assert _parameters(run) == [{"mode": "default"}, *({"mode": "default", "regions": one} for one in regions)]


def test_blocks_that_differ_are_not() -> None:
    run = EvidenceBuilder()
    line = run.line("train.py", 5, "net(x)")
    run.model(line)
    for number in range(4):
        run.operator("aten.addmm", line, module=f"Net.blocks.{number}.linear")
        run.operator(f"aten.kind{number}", line, module=f"Net.blocks.{number}")
    assert _parameters(run) == [{"mode": "default"}]


def test_shapes_that_change_are_compiled_for_all_shapes_first() -> None:
    run = EvidenceBuilder()
    line = run.line("train.py", 5, "net(x)")
    run.model(line)
    for length in range(8, 16):
        run.operator("aten.addmm", line, module="Net.head", inputs=[(length, 4)], calls=0.125)
    assert _parameters(run)[0] == {"mode": "default", "dynamic": True}


def test_a_small_model_on_a_device_that_waits_gets_graphs_first_and_a_busy_one_is_tuned() -> None:
    waiting, busy = EvidenceBuilder(device_s=0.03), EvidenceBuilder(device_s=0.099)
    small = EvidenceBuilder(step_s=0.006, device_s=0.003, forward=0.002, backward=0.003, optimizer=0.001, data=0.0)
    for run in (waiting, busy, small):
        run.model(run.line("train.py", 5, "net(x)"))
    assert _parameters(small) == [{"mode": "reduce-overhead"}, {"mode": "default"}]
    assert _parameters(waiting) == [{"mode": "default"}, {"mode": "reduce-overhead"}]
    tuned = {"inductor": ("coordinate_descent_tuning", "triton.cudagraphs")}
    assert _parameters(busy) == [{"mode": "default"}, tuned, {"mode": "max-autotune-no-cudagraphs"}]
    assert callable(LEVER.effort) and LEVER.effort({}) < LEVER.effort(tuned) < LEVER.effort({"mode": "max-autotune"})


def test_a_busy_device_that_would_wait_for_its_host_if_it_were_faster_gets_graphs_too() -> None:
    run = EvidenceBuilder(device_s=0.099)
    run.model(run.line("train.py", 5, "net(x)"))
    run.operator("aten.mm", run.line("train.py", 5, "net(x)"), op_s=0.08, python_s=0.01)
    assert _parameters(run) == [
        {"mode": "default"},
        {"mode": "reduce-overhead"},
        {"inductor": ("coordinate_descent_tuning", "triton.cudagraphs")},
        {"mode": "max-autotune-no-cudagraphs"},
    ]
    proposed = [c for c in LEVER.propose(run.build(), []) if isinstance(c, Candidate) and not c.fallback_for]
    first_below_s = [c.first_below_s for c in proposed]
    assert first_below_s == [0.0, pytest.approx(1.5 * 0.01), 0.0, 0.0], (
        "graphs come first once launching takes most of a step"
    )
    run.padding(padding_fraction=0.02)  # rows of text that end with the same token by chance
    assert {"inductor": ("coordinate_descent_tuning", "triton.cudagraphs")} in _parameters(run)
    run.padding()
    assert {"inductor": ("coordinate_descent_tuning",)} in _parameters(run)
    proposed = [c for c in LEVER.propose(run.build(), []) if isinstance(c, Candidate)]
    assert not any(c.first_below_s for c in proposed if "skip_padding" not in c.parameters)


@pytest.mark.parametrize(("scalars", "is_short"), [("", True), ("approximate='tanh'", False)])
def test_where_the_device_is_busy_exact_gelu_is_short(scalars: str, is_short: bool) -> None:
    run = EvidenceBuilder(device_s=0.099)
    run.model(run.line("train.py", 5, "net(x)"))
    run.operator("aten.gelu", run.line("train.py", 5, "net(x)"), op_s=0.01, scalars=scalars)
    ways = _parameters(run)
    assert {way.get("mode") for way in ways} >= {"default", "max-autotune-no-cudagraphs", None}
    assert {way.get("short_erf", False) for way in ways} == {is_short}


def test_where_the_device_is_busy_and_keys_are_repeated_graphs_read_them_once() -> None:
    run = EvidenceBuilder(device_s=0.099)
    line = run.line("train.py", 5, "net(x)")
    run.model(line)
    run.operator("aten._scaled_dot_product_flash_attention", line, inputs=[tensor(2, 8, 24, 16)], op_s=0.08)
    assert not any("grouped_keys" in way for way in _parameters(run))
    run.operator("aten.clone", line, inputs=[tensor(2, 2, 4, 24, 16)], op_s=0.01)
    assert all(way["grouped_keys"] for way in _parameters(run) if "regions" not in way)


@pytest.mark.parametrize("is_masked", [False, True])
def test_where_the_device_is_busy_attention_that_is_written_out_without_a_mask_is_fused(is_masked: bool) -> None:
    run = EvidenceBuilder(device_s=0.099)
    line = run.line("train.py", 5, "y = unet(x)")
    run.model(line)
    scores = tensor(2, 4, 64, 68)
    run.operator("aten._softmax", line, inputs=[scores], output=scores, op_s=0.01)
    assert not any("written_attention" in way for way in _parameters(run))
    run.operator("aten.bmm", line, output=tensor(8, 64, 68), op_s=0.01)
    if is_masked:
        run.operator("aten.masked_fill", line, inputs=[scores], output=scores, op_s=0.01)
    ways = [way.get("written_attention", False) for way in _parameters(run) if "regions" not in way]
    assert set(ways) == {not is_masked}


def test_a_device_that_is_busy_gets_kernels_tuned_without_graphs_where_graphs_fail() -> None:
    run = EvidenceBuilder(device_s=0.099)
    run.model(run.line("train.py", 5, "net(x)"))
    found = [c for c in LEVER.propose(run.build(), []) if isinstance(c, Candidate)]
    fallbacks = [c for c in found if c.parameters.get("inductor") == ("coordinate_descent_tuning",)]
    assert ["CUDAGraphs" in one.fallback_for for one in fallbacks] == [True]


def test_where_tokens_are_padded_the_padding_is_left_out_first() -> None:
    run = EvidenceBuilder()
    run.model(run.line("train.py", 5, "net(x)"))
    run.padding(shape=(32, 512), padding_fraction=0.6)
    first, second = _parameters(run)
    assert first == {"skip_padding": 0, "multiple": 256}
    assert second == {"mode": "default"}


def test_ways_that_come_first_promise_most_also_where_compiling_may_cost_more_than_it_gains() -> None:
    run = EvidenceBuilder()
    run.model(run.line("train.py", 5, "net(x)"))
    run.padding(shape=(32, 512), padding_fraction=0.6)
    sums = [sum(c.saved_s) for c in LEVER.propose(run.build(), []) if isinstance(c, Candidate)]
    assert sums[0] < 0 and sums == sorted(sums, reverse=True)


@pytest.mark.parametrize(("fraction", "signs"), [(0.1, ("integers",)), (0.6, ())])
def test_little_padding_and_trailing_zeros_that_may_be_data_are_computed(
    fraction: float, signs: tuple[str, ...]
) -> None:
    run = EvidenceBuilder()
    run.model(run.line("train.py", 5, "net(x)"))
    run.padding(padding_fraction=fraction, signs=signs)
    assert _parameters(run) == [{"mode": "default"}]


def test_on_a_device_graphs_for_each_number_of_rows_are_tried_too() -> None:
    run = EvidenceBuilder(device_s=0.09)
    run.model(run.line("train.py", 5, "net(x)"))
    run.padding()
    assert _parameters(run)[:2] == [
        {"skip_padding": 0, "multiple": 64},
        {"skip_padding": 0, "multiple": 128, "inductor": ("triton.cudagraphs",)},
    ]


def test_rows_in_graphs_come_first_where_the_host_would_be_waited_for_without_padding() -> None:
    run = EvidenceBuilder(device_s=0.09)
    run.model(run.line("train.py", 5, "net(x)"))
    run.operator("aten.mm", run.line("train.py", 5, "net(x)"), op_s=0.08, python_s=0.01)
    run.padding(padding_fraction=0.75)
    packed = [c for c in LEVER.propose(run.build(), []) if isinstance(c, Candidate) and "skip_padding" in c.parameters]
    assert [c.first_below_s for c in packed if not c.fallback_for] == [0.0, pytest.approx(1.5 * 0.01 / 0.25)]
    assert all("communication.trim-padding" in c.replaces for c in packed)


def test_a_module_computes_without_padding_from_its_first_call_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "flatout.blocks.kernels.packed.skip_padding._inductor", lambda options: lambda graph, inputs: graph
    )
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(9, 4, padding_idx=0), nn.Linear(4, 8), nn.ReLU())
    tokens = torch.tensor([[1, 2, 0, 0], [3, 0, 0, 0], [4, 5, 6, 7]])
    expected = net(tokens)
    with pulled(LEVER, skip_padding=0, multiple=2) as hooks:
        output = net(tokens)
        assert hooks.done == [LEVER.id]
        assert not output[tokens == 0].any()
    assert net._compiled_call_impl is None
    torch.testing.assert_close(output[tokens != 0], expected[tokens != 0])


@pytest.mark.parametrize(
    "parameters",
    [
        {"skip_padding": 0, "multiple": 0},
        {"skip_padding": 0, "multiple": 8, "mode": "reduce-overhead"},
        {"skip_padding": 0, "multiple": 8, "regions": ("blocks",)},
        {"skip_padding": "zero", "multiple": 8},
    ],
)
def test_a_plan_that_packs_tokens_in_no_way_is_refused(parameters: Parameters) -> None:
    with pytest.raises(PlanError), pulled(LEVER, **parameters):
        pass


def test_the_text_calls_the_block_that_leaves_padding_out() -> None:
    text = "import torch\nfrom torch import nn\n\nnet = nn.Linear(9, 4)\nnet.train()\nnet(torch.ones(2, 9))\n"
    after = edit(text, {"skip_padding": 0, "multiple": 64})
    assert "from flatout import skip_padding\n" in after
    assert "net.train()\nskip_padding(net, pad=0, multiple=64)\n" in after
    in_graphs = edit(text, {"skip_padding": 0, "multiple": 64, "inductor": ("triton.cudagraphs",)})
    assert "skip_padding(net, pad=0, multiple=64, options={'triton.cudagraphs': True})\n" in in_graphs


def test_on_a_device_each_way_but_a_tuned_mode_has_one_without_reductions_that_torch_gets_wrong() -> None:
    run = EvidenceBuilder(device_s=0.099)
    run.model(run.line("train.py", 5, "net(x)"))
    run.operator("aten.mm", run.line("train.py", 5, "net(x)"), op_s=0.08, python_s=0.01)
    off = {"inductor_off": ("triton.mix_order_reduction",)}
    assert [parameters for parameters, words in _ways(run) if "gradient" in words] == [
        off,
        off | {"inductor": ("triton.cudagraphs",)},
        off | {"inductor": ("coordinate_descent_tuning", "triton.cudagraphs")},
    ]
    assert not any(words for _, words in _ways(EvidenceBuilder()))


def test_reductions_that_are_known_to_fail_are_not_tried() -> None:
    run = EvidenceBuilder(device_s=0.099)
    line = run.line("train.py", 5, "net(x)")
    run.model(line)
    run.operator("aten.mul", line, inputs=[(8, 64, 32, 32), (1, 64, 1, 1)])  # a norm over channels
    ways = [way for way in _ways(run) if "CUDAGraphs" not in way[1]]
    assert not any(words for _, words in ways)
    off = ("triton.mix_order_reduction",)
    assert [p.get("inductor_off") for p, _ in ways if not str(p.get("mode", "")).startswith("max-autotune")] == [
        off,
        off,
    ]
    run.operators[-1] = msgspec.structs.replace(run.operators[-1], op="aten.add")  # its gradient is a plain sum
    assert any("gradient" in words for _, words in _ways(run))


def _ways(run: EvidenceBuilder) -> list[tuple[Parameters, tuple[str, ...]]]:
    if not run.models:
        run.model(run.line("train.py", 5, "net(x)"))
    found = [c for c in LEVER.propose(run.build(), []) if isinstance(c, Candidate)]
    return [({k: v for k, v in c.parameters.items() if k != "plain_evaluation"}, c.fallback_for) for c in found]


def test_models_that_draw_random_numbers_draw_them_as_without_compiling() -> None:
    run = EvidenceBuilder()
    line = run.line("train.py", 5, "net(x)")
    run.model(line)
    run.operator("aten.native_dropout", line, module="Net.drop")
    assert _parameters(run) == [{"mode": "default", "fallback_random": True}]


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.linear(x)
        return y


class _Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[_Block() for _ in range(3)], nn.Linear(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.blocks(x)
        return y


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # dynamo's own
def test_blocks_alone_are_compiled() -> None:
    net, x = _Tower(), torch.randn(3, 4)
    expected = net(x)
    with pulled(LEVER, backend="eager", regions=("blocks",)) as hooks:
        assert torch.equal(net(x), expected)
        assert [c._compiled_call_impl is not None for c in net.blocks] == [True, True, True, False]
        assert net._compiled_call_impl is None
        assert hooks.done == [LEVER.id]
    assert all(c._compiled_call_impl is None for c in net.blocks)


def test_a_model_without_the_blocks_is_left_alone() -> None:
    net = nn.Linear(3, 2)
    with pulled(LEVER, backend="eager", regions=("blocks",)) as hooks:
        net(torch.randn(4, 3))
        assert not hooks.done


def test_random_numbers_are_drawn_as_in_eager_code_until_the_end() -> None:
    from torch._inductor import config

    before = config.fallback_random
    with pulled(LEVER, fallback_random=True):
        assert config.fallback_random is True
    assert config.fallback_random is before


RETAINED = """
import torch
net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
torch.optim.SGD(net.parameters(), 0.1)
loss = net(torch.ones(3, 4)).tanh().mean()
loss.backward(retain_graph=True)
loss.backward()
"""


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # dynamo's own
@pytest.mark.slow
def test_a_script_that_retains_graphs_can_go_backward_twice(tmp_path: Path) -> None:
    from torch._functorch import config

    path = tmp_path / "train.py"
    path.write_text(RETAINED)
    run = EvidenceBuilder()
    run.model(run.line("train.py", 4, "net(x)"))
    evidence = run.build()
    workload = msgspec.structs.replace(evidence.workload, command=("python", str(path)), cwd=str(tmp_path))
    [candidate] = LEVER.propose(msgspec.structs.replace(evidence, workload=workload), ())
    assert isinstance(candidate, Candidate)
    assert candidate.parameters == {"mode": "default", "retained_graphs": True, "plain_evaluation": True}
    before = config.donated_buffer
    with pulled(LEVER, backend="aot_eager", retained_graphs=True):
        ran(RETAINED)
        assert config.donated_buffer is False
    assert config.donated_buffer is before
    new = edit(RETAINED, {"retained_graphs": True})
    try:
        ran(new.replace("compile()", "compile(backend='aot_eager')"))
        assert config.donated_buffer is False
    finally:
        config.donated_buffer = before


def test_switches_of_inductor_are_passed_on_and_wrong_ones_refused() -> None:
    net = nn.Linear(8, 8)
    with pulled(LEVER, mode="default", inductor=("coordinate_descent_tuning",)):
        net(torch.ones(2, 8))
        assert net._compiled_call_impl is not None
    made, rest = "net = make()\n", "optimizer = SGD(net.parameters())\nnet(x).sum().backward()\n"
    new = edit(made + rest, {"mode": "default", "inductor": ("coordinate_descent_tuning",)})
    assert new == made + "net.compile(options={'coordinate_descent_tuning': True})\n" + rest
    new = edit(made + rest, {"inductor_off": ("triton.mix_order_reduction",)})
    assert new == made + "net.compile(options={'triton.mix_order_reduction': False})\n" + rest
    for wrong in ("coordinate_descending", "cpp.threads"):
        with pytest.raises(PlanError, match=f"'{wrong}' is no switch"), pulled(LEVER, inductor=(wrong,)):
            pass
    with (
        pytest.raises(PlanError, match="exclude one another"),
        pulled(LEVER, mode="reduce-overhead", inductor=("debug",)),
    ):
        pass
    with pytest.raises(PlanError, match="must be a list"), pulled(LEVER, inductor="debug"):
        pass


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(PlanError, match="fastest"), pulled(LEVER, mode="fastest"):
        pass


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        ("net = make()\nprint(net)\n", 'net = make()\nnet.compile(mode="reduce-overhead")\nprint(net)\n'),
        ("net = make()\nnet = net.to(d)\n", 'net = make()\nnet = net.to(d)\nnet.compile(mode="reduce-overhead")\n'),
        ("net = make()\nnet.to(d).train()\n", 'net = make()\nnet.to(d).train()\nnet.compile(mode="reduce-overhead")\n'),
        (
            "net = make()\nwith open(p) as f:\n    net = torch.load(f)\n",
            'net = make()\nnet.compile(mode="reduce-overhead")\nwith open(p) as f:\n    net = torch.load(f)\n',
        ),
    ],
)
def test_the_model_is_compiled_when_it_is_made_and_moved(made: str, expected: str) -> None:
    rest = "optimizer = SGD(net.parameters())\nnet(x).sum().backward()\n"
    assert edit(made + rest, {"mode": "reduce-overhead", "fallback_random": True}) == expected + rest


def test_a_loop_compiles_the_blocks() -> None:
    text = "model = make()\noptimizer = SGD(model.parameters())\nmodel(x)\n"
    loop = "for block in model.tower.blocks:\n    block.compile(dynamic=True)\n"
    changed = edit(text, {"mode": "default", "dynamic": True, "regions": ("tower.blocks",)})
    assert changed == text.replace("()\noptimizer", f"()\n{loop}optimizer")


def test_each_of_several_models_is_compiled_and_the_blocks_of_one_alone() -> None:
    text = "a = A()\nb = B().to(d)\nloss = L()\na.train()\nb.train()\nloss(a(b(x)))\n"
    expected = "a = A()\na.compile()\nb = B().to(d)\nb.compile()\nloss = L()\n"
    assert edit(text, {"mode": "default"}).startswith(expected + "a.train")
    with pytest.raises(EditError, match="a, b are made in the file; which one"):
        edit(text, {"mode": "default", "regions": ("blocks",)})


def test_a_model_of_one_of_several_classes_is_compiled_behind_the_branches_that_make_it() -> None:
    made = "if kind == 'a':\n    net = A()\nelif kind == 'b':\n    net = B(2)\nelse:\n    raise ValueError(kind)\n"
    rest = "optimizer = SGD(net.parameters())\nnet(x).sum().backward()\n"
    assert edit(made + rest, {"mode": "default"}) == made + "net.compile()\n" + rest
    moved = "net.to(device)\n"
    assert edit(made + moved + rest, {"mode": "default"}) == made + moved + "net.compile()\n" + rest


@pytest.mark.parametrize(
    ("text", "because"),
    [
        ("a = A()\na.train()\na(x)\na = B()\n", "more than once"),
        ("if c:\n    a = A()\na.train()\na(x)\nif not c:\n    a = B()\n", "more than once"),
        ("if c:\n    a = A()\n    a = B()\na.train()\na(x)\n", "more than once"),
        ("loss = F.mse_loss(x, y)\n", "nothing"),
        ("a = torch.compile(A())\na.train()\na(x)\n", "already"),
    ],
)
def test_an_edit_is_refused_where_the_model_is_not_certain(text: str, because: str) -> None:
    with pytest.raises(EditError, match=because):
        edit(text, {"mode": "default"})
