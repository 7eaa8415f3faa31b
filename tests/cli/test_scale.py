from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from flatout.cli.app import app

MODELS = Path(__file__).parents[2] / "examples" / "models"


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
    asked = ["scale", "--model", str(MODELS / "gpt3-175b.toml"), "--gpus", "8xa100-80gb", "--batch", "64"]
    result = CliRunner().invoke(app, asked)
    assert result.exit_code == 1
    assert "none fits" in result.output
    assert "state" in result.output
