from __future__ import annotations

import re
from itertools import product
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from flatout.app.cli.app import app
from flatout.core.errors import PlanError, UsageError
from flatout.core.records.scale import Constants, Layout, Software
from flatout.scale.inputs import cluster_of, read_layout, read_model, read_runs
from flatout.scale.step import step_time

pytestmark = pytest.mark.slow

MODELS = Path(__file__).parents[3] / "examples" / "models"


@pytest.fixture(autouse=True)
def few_played(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranking itself has tests of its own."""
    monkeypatch.setattr("flatout.scale.search._MOST_PLAYED", 20)


def test_layouts_are_ranked_with_where_their_steps_go() -> None:
    asked = [
        "scale",
        "--model",
        str(MODELS / "llama-70b.toml"),
        "--gpus",
        "64xh100-sxm",
        "--batch",
        "1M-tokens",
        "--top",
        "3",
    ]
    result = CliRunner().invoke(app, asked)
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert "llama-70b on 64 x nvidia-h100-sxm, 128 samples of 8192 tokens a step" in lines[0]
    assert [line.split()[0] for line in lines[2:5]] == ["1", "2", "3"]
    assert all("compute" in line and "GiB" in line for line in lines[2:5])
    assert any(line.startswith("a trillion tokens by the first:") for line in lines)


def test_what_does_not_fit_is_told_with_what_fills_it() -> None:
    asked = ["scale", "--model", str(MODELS / "gpt3-175b.toml"), "--gpus", "1xa100-40gb", "--batch", "64"]
    result = CliRunner().invoke(app, [*asked, "--host-memory", "64", "--disk", "0"])
    assert isinstance(result.exception, UsageError)
    long = MODELS.parent / "none.toml"
    assert isinstance(CliRunner().invoke(app, ["scale", "--model", str(long), *asked[3:]]).exception, PlanError)


@pytest.mark.long
def test_what_fits_only_offloaded_says_so_and_what_the_host_must_have() -> None:
    asked = ["scale", "--model", str(MODELS / "gpt3-175b.toml"), "--gpus", "8xa100-80gb", "--batch", "64", "--top", "2"]
    result = CliRunner().invoke(app, asked)
    assert result.exit_code == 0, result.output
    assert (
        "nothing fits without it: weights, gradients and the optimizer's state kept in the host's memory"
        in result.output
    )
    assert re.search(r"it takes 2\d\d\d GiB of each node's memory", result.output)
    on_disk = CliRunner().invoke(app, [*asked, "--host-memory", "1024"])
    assert "on its disk" in on_disk.output
    assert "weights on the disk" in on_disk.output


def test_what_fits_nowhere_is_told_with_what_fills_it(tmp_path: Path) -> None:
    model = tmp_path / "huge.toml"
    model.write_text("hidden = 65536\nlayers = 8\nheads = 64\nvocab = 256000\nseq = 65536\n")
    result = CliRunner().invoke(app, ["scale", "--model", str(model), "--gpus", "1xrtx-4090", "--batch", "1"])
    assert result.exit_code == 1
    assert "none fits; the smallest takes of its fullest device" in result.output
    assert "buffer" in result.output


def test_a_run_is_priced_with_what_failures_leave_of_it() -> None:
    asked = [
        "scale",
        "--model",
        str(MODELS / "llama-70b.toml"),
        "--gpus",
        "64xh100-sxm",
        "--batch",
        "1M-tokens",
        "--top",
        "1",
    ]
    more = ["--tokens", "15T", "--failures", "3.8", "--price", "2.5"]
    output = CliRunner().invoke(app, [*asked, *more]).output
    without = re.search(r"15T tokens without failures: (\S+)M GPU-hours, \S+ days, (\S+)M at 2.5 a GPU-hour", output)
    kept = re.search(r"(\S+)% of the time is kept", output)
    left = re.search(r"15T tokens with failures: (\S+)M GPU-hours", output)
    assert without is not None and kept is not None and left is not None
    assert float(without[2]) == pytest.approx(2.5 * float(without[1]), rel=0.01)
    assert float(left[1]) == pytest.approx(float(without[1]) / (float(kept[1]) / 100), rel=0.01)
    assert isinstance(CliRunner().invoke(app, [*asked, "--tokens", "many"]).exception, PlanError)


def test_compressed_gradients_are_asked_for_by_name_and_said_to_change_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flatout.scale.search._MOST_PLAYED", 200)  # they are far below the first
    model = tmp_path / "small.toml"
    model.write_text("hidden = 2048\nlayers = 24\nheads = 16\nvocab = 50304\nseq = 1024\n")
    asked = [
        "scale",
        "--model",
        str(model),
        "--gpus",
        "16xa100-80gb",
        "--batch",
        "64",
        "--top",
        "500",
        "--fabric",
        "10",
    ]
    output = CliRunner().invoke(app, [*asked, "--compression", "powersgd,sign"]).output
    assert "powersgd gradients (changes results)" in output
    assert "changes results" not in CliRunner().invoke(app, asked).output
    assert isinstance(CliRunner().invoke(app, [*asked, "--compression", "zip"]).exception, UsageError)


def test_stragglers_are_a_part_of_their_own() -> None:
    asked = [
        "scale",
        "--model",
        str(MODELS / "llama-70b.toml"),
        "--gpus",
        "64xh100-sxm",
        "--batch",
        "1M-tokens",
        "--top",
        "1",
    ]
    assert "stragglers" in CliRunner().invoke(app, [*asked, "--straggler", "0.02"]).output
    assert "stragglers" not in CliRunner().invoke(app, asked).output


def test_the_fullest_stage_is_named_and_what_lies_on_the_host(tmp_path: Path) -> None:
    layout = tmp_path / "layout.toml"
    layout.write_text('tensor = 8\npipeline = 3\nglobal_batch = 12\noffload = "state"\n')
    result = CliRunner().invoke(app, ["fit", "--model", str(MODELS / "llama-70b.toml"), "--layout", str(layout)])
    assert result.exit_code == 0, result.output
    assert "fullest: stage " in result.output
    assert "a device in the host's memory or on its disk" in result.output
    assert "An upper bound for what is counted" in result.output


def test_the_first_layout_is_written_and_fits_stage_by_stage(tmp_path: Path) -> None:
    out, model = tmp_path / "layout.toml", str(MODELS / "llama-70b.toml")
    asked = ["scale", "--model", model, "--gpus", "64xh100-sxm", "--batch", "1M-tokens", "--out", str(out)]
    assert CliRunner().invoke(app, asked).exit_code == 0
    assert out.read_text().startswith("# llama-70b on 64xh100-sxm, predicted ")
    result = CliRunner().invoke(app, ["fit", "--model", model, "--layout", str(out), "--gpus", "64xh100-sxm"])
    assert result.exit_code == 0, result.output
    stages = [line for line in result.output.splitlines() if line.startswith("stage")]
    assert len(stages) == read_layout(out).pipeline
    assert all(line.endswith("GiB fits") for line in stages)


def test_gpt3_is_counted_both_ways_and_does_not_fit_one_device() -> None:
    result = CliRunner().invoke(app, ["fit", "--model", str(MODELS / "gpt3-175b.toml"), "--gpus", "1xa100-80gb"])
    assert result.exit_code == 1
    assert "DOES NOT FIT" in result.output
    assert "16 bytes each" in result.output and "2.79 TB" in result.output
    assert "four parts of 4 bytes each" in result.output and "0.70 TB each (650 GiB)" in result.output


def test_pages_are_written(tmp_path: Path) -> None:
    page, model = tmp_path / "page.html", str(MODELS / "llama-70b.toml")
    asked = ["scale", "--model", model, "--gpus", "64xh100-sxm", "--batch", "1M-tokens", "--failures", "6.5"]
    assert CliRunner().invoke(app, [*asked, "--html", str(page)]).exit_code == 0
    assert "6.5 interruptions per 1000 node-days" in page.read_text()
    assert CliRunner().invoke(app, ["fit", "--model", model, "--html", str(page)]).exit_code == 0
    assert "llama-70b" in page.read_text()
    assert isinstance(CliRunner().invoke(app, ["fit", "a:b", "--html", str(page)]).exception, UsageError)


def test_a_layout_with_an_unknown_key_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "layout.toml"
    out.write_text("tensor = 2\nwidth = 3\n")
    with pytest.raises(PlanError, match="has 'width'; a layout has"):
        read_layout(out)


def test_measured_steps_give_the_constants_and_narrow_the_intervals(tmp_path: Path) -> None:
    model = read_model(MODELS / "llama-70b.toml")
    cluster, slow = cluster_of("64xh100-sxm"), Constants(product_share=0.4)
    runs = []
    for tensor, micro_batch, pipeline in product((2, 4, 8), (1, 2), (1, 2, 4)):
        data = 64 // tensor // pipeline
        layout = Layout(
            tensor=tensor,
            pipeline=pipeline,
            data=data,
            micro_batch=micro_batch,
            global_batch=128,
            shard=1,
            is_sequence_parallel=True,
        )
        runs.append(
            {"model": model, "layout": layout, "seconds": step_time(model, layout, cluster, Software(), slow).total_s}
        )
    file = tmp_path / "runs.json"
    file.write_bytes(msgspec.json.encode(runs))
    asked = [
        "scale",
        "--model",
        str(MODELS / "llama-70b.toml"),
        "--gpus",
        "64xh100-sxm",
        "--batch",
        "1M-tokens",
        "--top",
        "1",
    ]
    plain, measured = (CliRunner().invoke(app, [*asked, *more]) for more in ([], ["--measured", str(file)]))
    assert measured.exit_code == 0, measured.output
    assert "constants of 18 measured steps" in measured.output

    def seconds(output: str) -> list[float]:
        return [float(x) for x in re.findall(r"(\d+\.\d+)(?= s| - )", output.splitlines()[2])[:3]]

    (fast_s, *_), (slow_s, low_s, high_s) = seconds(plain.output), seconds(measured.output)
    assert slow_s > 1.4 * fast_s
    assert low_s < slow_s < high_s < 1.15 * slow_s


def test_damaged_measurements_are_told(tmp_path: Path) -> None:
    file = tmp_path / "runs.json"
    for text, why in (("[{}]", "missing required field"), ("{", "no list of measured steps"), ("[1]", "no list")):
        file.write_text(text)
        with pytest.raises(PlanError, match=why):
            read_runs(file)


def test_a_step_of_ones_own_is_weighed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "large_step.py").write_text(
        "import torch\n"
        "def make():\n"
        "    net = torch.nn.Linear(65536, 65536, bias=False)\n"
        "    return lambda: net(torch.randn(8, 65536)).sum().backward()\n"
    )
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["fit", "large_step:make", "--gpus", "1xh100-sxm"])
    assert result.exit_code == 0, result.output
    assert "weights 16.0 GiB, gradients 16.0 GiB" in result.output
    assert "of 80.0 GiB: fits" in result.output
    for wrong in ("large_step:none", "no_module:make", "large_step"):
        assert isinstance(CliRunner().invoke(app, ["fit", wrong]).exception, UsageError)
    assert isinstance(CliRunner().invoke(app, ["fit"]).exception, UsageError)
