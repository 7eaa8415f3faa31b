from __future__ import annotations

from pathlib import Path

import pytest
from tests.check.traces.kineto_builder import POINTWISE, Kineto, training

from flatout.app.session import diagnose_all, evidence_in
from flatout.check.diagnosis import diagnose
from flatout.check.traces.host import is_user_file
from flatout.check.traces.ranks import evidence_of_files
from flatout.core.errors import RecordError
from flatout.core.records.evidence import Evidence
from flatout.core.records.record import from_json, to_json
from flatout.core.registry import rules
from flatout.report.parts.diagnosis import diagnosis_blocks
from flatout.report.text import plain_text


def observed(kineto: Kineto, folder: Path) -> Evidence:
    return evidence_of_files([kineto.write(folder / "trace.json")])


def test_steps_are_those_of_the_profilers_annotations(tmp_path: Path) -> None:
    evidence = observed(training(steps=3), tmp_path)
    assert (evidence.steps.kind, evidence.steps.num_observed, evidence.steps.num_timed) == ("training", 3, 3)
    assert evidence.steps.step_s == pytest.approx(1e-3, rel=0.01)


def test_the_first_of_many_steps_is_not_timed(tmp_path: Path) -> None:
    assert observed(training(steps=6), tmp_path).steps.num_timed == 5


def test_without_annotations_steps_run_from_optimizer_to_optimizer(tmp_path: Path) -> None:
    kineto = training(steps=5)
    kineto.events = [e for e in kineto.events if not e["name"].startswith("ProfilerStep")]
    evidence = observed(kineto, tmp_path)
    assert evidence.steps.num_observed == 4
    assert evidence.steps.step_s == pytest.approx(1e-3, rel=0.01)
    assert any("one optimizer step to the next" in n for n in evidence.notes)


def test_without_any_border_the_whole_trace_is_one_step(tmp_path: Path) -> None:
    kineto = training(steps=1)
    kineto.events = [e for e in kineto.events if not e["name"].startswith(("ProfilerStep", "Optimizer"))]
    evidence = observed(kineto, tmp_path)
    assert (evidence.steps.kind, evidence.steps.num_timed) == ("call", 1)
    found = {f.rule for f in diagnose(evidence, rules()).findings}
    assert "overhead.device-idle" not in found  # the start-up is in it, which no step pays for
    assert any("counts as one step" in n for n in evidence.notes)


def test_an_annotation_at_which_recording_ended_is_no_step(tmp_path: Path) -> None:
    kineto = training(steps=3)
    kineto.step(3, 3000, 12)
    assert observed(kineto, tmp_path).steps.num_observed == 3


def test_the_device_is_busy_and_idle_as_built(tmp_path: Path) -> None:
    step = observed(training(), tmp_path).device_step
    assert step is not None
    assert step.busy_s == pytest.approx(600e-6)
    assert step.busy_s + sum(g.seconds for g in step.gaps) == pytest.approx(step.span_s)
    causes = {g.cause: g.seconds for g in step.gaps}
    assert causes["host-wait"] == pytest.approx(100e-6)
    assert causes["late-launch"] + causes.get("copy", 0.0) + causes.get("data", 0.0) == pytest.approx(300e-6)


def test_lines_are_the_users_functions_and_the_backward_comes_home(tmp_path: Path) -> None:
    evidence = observed(training(), tmp_path)
    step = evidence.device_step
    assert step is not None
    places = {(k.phase, (evidence.source_of(k.source) or evidence.sources[0]).function) for k in step.kernels}
    assert ("forward", "forward") in places
    assert ("backward", "forward") in places
    assert ("optimizer", "main") in places
    assert all(s.file == "train.py" for s in evidence.sources)


def test_the_read_and_its_wait_are_found(tmp_path: Path) -> None:
    [read] = observed(training(), tmp_path).host_reads
    assert (read.call, read.on_device, read.calls) == ("item", True, 1)
    assert read.wait_s == pytest.approx(140e-6)


def test_products_have_flop_and_device_time(tmp_path: Path) -> None:
    evidence = observed(training(), tmp_path)
    [product] = [o for o in evidence.operators if o.op == "aten.mm" and o.phase == "forward"]
    assert (product.flop, product.num_calls) == (2 * 64 * 32 * 16, 1)
    assert product.op_s == pytest.approx(200e-6)
    assert product.inputs[0].dtype == "float32"


def test_loader_optimizer_and_phases_are_found(tmp_path: Path) -> None:
    evidence = observed(training(), tmp_path)
    assert [o.name for o in evidence.optimizers] == ["SGD"]
    assert [u.num_workers for u in evidence.loaders] == [0]
    assert {"data", "forward", "backward", "optimizer"} <= set(evidence.steps.phases)
    assert sum(evidence.steps.phases.values()) == pytest.approx(evidence.steps.step_s, rel=0.01)


def test_a_timeline_has_every_track(tmp_path: Path) -> None:
    timeline = observed(training(), tmp_path).timeline
    assert timeline is not None
    assert {s.track for s in timeline.spans} == {"phase", "host", "device", "copy"}
    assert any(s.is_wait for s in timeline.spans)
    assert all(s.start_s >= 0 and s.start_s + s.duration_s <= timeline.duration_s + 1e-9 for s in timeline.spans)


def test_notes_name_what_the_trace_does_not_show(tmp_path: Path) -> None:
    kineto = training()
    kineto.events = [e for e in kineto.events if e["cat"] != "python_function"]
    for event in kineto.events:
        event["args"].pop("Input Dims", None)
    notes = " ".join(observed(kineto, tmp_path).notes)
    for words in ("no lines", "no FLOP", "no roofline", "torch.profiler itself cost"):
        assert words in notes


def test_a_trace_of_the_host_alone_has_no_device(tmp_path: Path) -> None:
    kineto = training()
    kineto.events = [e for e in kineto.events if e["cat"] not in ("kernel", "gpu_memcpy", "cuda_runtime")]
    evidence = observed(kineto, tmp_path)
    assert (evidence.device_step, evidence.steps.device_s, evidence.workload.device) == (None, None, "cpu")


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_every_rule_can_read_a_trace_and_the_report_is_written(tmp_path: Path, name: str) -> None:
    evidence = evidence_in([training(rank=0, world_size=1).write(tmp_path / name)])
    for rule in rules():
        list(rule.check(evidence))
        list(rule.note(evidence) if rule.note is not None else ())
        list(rule.propose(evidence) if rule.propose is not None else ())
    report = plain_text(diagnosis_blocks(evidence, diagnose_all(evidence)))
    assert "overhead.device-idle" in report
    assert "NVIDIA H200" in report


def test_evidence_of_a_trace_goes_to_json_and_back(tmp_path: Path) -> None:
    evidence = observed(training(), tmp_path)
    assert from_json(to_json(evidence), Evidence) == evidence


def test_a_busy_device_gives_no_finding(tmp_path: Path) -> None:
    kineto = Kineto()
    for i in range(4):
        t = 1000.0 * i
        kineto.step(i, t, 1000)
        for j in range(10):
            launch = kineto.launch(t + 5 + 20 * j, op="aten::add")
            kineto.kernel(launch, 300 + t + 100 * j, 100, name=POINTWISE)
        kineto.host("Optimizer.step#SGD.step", t + 900, 10, cat="user_annotation")
    evidence = observed(kineto, tmp_path)
    assert diagnose(evidence, rules()).findings == ()


def test_several_ranks_show_who_waits(tmp_path: Path) -> None:
    """Rank 0 arrives first and waits 60 us for rank 1 in the all-reduce."""
    training(rank=0, world_size=2, late_us=60).write(tmp_path / "rank0.json")
    training(rank=1, world_size=2).write(tmp_path / "rank1.json.gz")
    found = evidence_of_files([tmp_path]).distributed
    assert found is not None
    assert (found.backend, found.rank, found.world_size, found.missing_ranks) == ("nccl", 0, 2, ())
    [collective] = found.collectives
    assert (collective.op, collective.num, collective.bytes, collective.phase) == ("all_reduce", 1, 4000, "backward")
    assert collective.seconds == pytest.approx(210e-6)
    assert collective.wait_s == pytest.approx(60e-6)
    assert collective.exposed_s == pytest.approx(160e-6)  # 50 us of it run beside the backward's kernel
    assert found.ranks[0].work_s == pytest.approx(found.ranks[0].step_s - 60e-6)
    assert found.ranks[1].work_s == pytest.approx(found.ranks[1].step_s)


def test_a_missing_rank_is_reported(tmp_path: Path) -> None:
    evidence = evidence_of_files([training(rank=0, world_size=4).write(tmp_path / "a.json")])
    assert evidence.distributed is not None
    assert evidence.distributed.missing_ranks == (1, 2, 3)
    assert any("1 of 4 ranks" in n for n in evidence.notes)


def test_two_files_of_one_rank_are_refused(tmp_path: Path) -> None:
    for name in ("a.json", "b.json"):
        training(rank=3, world_size=4).write(tmp_path / name)
    with pytest.raises(RecordError, match=r"a\.json, b\.json all claim to be rank 3"):
        evidence_of_files([tmp_path])


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="holds no trace"):
        evidence_in([tmp_path])


def test_flatouts_own_reports_are_read_as_before(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_bytes(to_json(observed(training(), tmp_path)))
    assert evidence_in([path]).device_step is not None


@pytest.mark.parametrize(
    ("file", "is_users"),
    [
        ("train.py", True),
        ("/home/ada/work/model.py", True),
        ("src/model.py", True),
        ("torch/nn/functional.py", False),
        ("/usr/lib/python3.12/threading.py", False),
        ("threading.py", False),
        ("transformers/trainer.py", False),
        ("/venv/lib/site-packages/mine/x.py", False),
        ("<frozen abc>", False),
    ],
)
def test_files_of_libraries_are_not_the_users(file: str, is_users: bool) -> None:
    assert is_user_file(file) is is_users


def test_kernels_that_inductor_wrote_have_rows_with_all_that_they_read_and_write(tmp_path: Path) -> None:
    kineto = Kineto()
    gelu, rows = "triton_poi_fused_gelu_0", "triton_poi_fused_add_embedding_1"
    both = {"Input Dims": [[1024, 768], [1024, 768], [], []], "Input type": ["c10::BFloat16", "float", "Scalar", ""]}
    for i in range(3):
        t = 1000.0 * i
        kineto.step(i, t, 999)
        kineto.host("Torch-Compiled Region: 0/0", t + 5, 60)
        for name, at in ((gelu, 10), (rows, 30)):
            kineto.kernel(kineto.launch(t + at, op=name, **both), t + 10 * at, 150, name=name)
    evidence = observed(kineto, tmp_path)
    found = {o.op: o for o in evidence.operators}
    assert set(found) == {f"inductor.{gelu}", f"inductor.{rows}"}
    assert (found[f"inductor.{gelu}"].bytes, found[f"inductor.{rows}"].bytes) == (1024 * 768 * (2 + 4), 0)
    assert found[f"inductor.{gelu}"].op_s == pytest.approx(150e-6)
    text = plain_text(diagnosis_blocks(evidence, diagnose(evidence, rules())))
    assert "compiled kernels" in text
