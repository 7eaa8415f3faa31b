from __future__ import annotations

from pathlib import Path

import pytest

from flatout.core.errors import HardwareError, PlanError
from flatout.core.records.scale import ModelShape
from flatout.scale.inputs import cluster_of, read_model, samples_of
from flatout.scale.sizes import num_parameters

EXAMPLES = Path(__file__).parents[2] / "examples" / "models"


def test_the_examples_have_the_parameters_of_their_names() -> None:
    for name, billions, embeddings in (("llama-70b", 70.5, 2), ("gpt3-175b", 174.6, 1)):
        model = read_model(EXAMPLES / f"{name}.toml")
        of_layers, of_embedding = num_parameters(model)
        assert of_layers + embeddings * of_embedding == pytest.approx(billions * 1e9, rel=0.002)


def test_a_cluster_has_a_node_and_what_joins_nodes() -> None:
    cluster = cluster_of("1024xnvidia-h100-sxm")
    assert [(t.name, t.reach, t.bytes_per_s) for t in cluster.tiers] == [("node", 8, 4.5e11), ("fabric", 1024, 5e10)]
    assert len(cluster_of("4xh200").tiers) == 1


@pytest.mark.parametrize(
    ("text", "samples"), [("1024", 1024), ("2k", 2000), ("4M-tokens", 1024), ("3M-tokens", 512), ("12k-tokens", 2)]
)
def test_a_batch_is_samples_or_tokens(text: str, samples: int) -> None:
    model = ModelShape(hidden=64, layers=1, heads=1, vocab=9, seq=4096)
    assert samples_of(text, model) == samples


def test_what_cannot_be_read_is_told(tmp_path: Path) -> None:
    model = ModelShape(hidden=64, layers=1, heads=1, vocab=9, seq=4096)
    for text in ("four", "-1", "4Mtokens", ""):
        with pytest.raises(PlanError, match="is no batch"):
            samples_of(text, model)
    with pytest.raises(PlanError, match="less than one sample"):
        samples_of("100-tokens", model)
    with pytest.raises(PlanError, match="is no cluster"):
        cluster_of("h100")
    with pytest.raises(HardwareError, match="no data sheet 'h1000'"):
        cluster_of("8xh1000")
    file = tmp_path / "model.toml"
    for text, why in (
        ("hidden = 64\nwidth = 3", "has 'width'"),
        ("hidden = 64", "missing required field"),
        ("hidden = [", "is no TOML"),
        ("hidden = 65\nlayers = 1\nheads = 2\nvocab = 9\nseq = 8", "no multiple of heads"),
    ):
        file.write_text(text)
        with pytest.raises(PlanError, match=why):
            read_model(file)
    with pytest.raises(PlanError, match="cannot read"):
        read_model(tmp_path / "none.toml")
