"""A layout in sentences: each way to divide the work has one, and only those that are used."""

from __future__ import annotations

import typing

import msgspec
import pytest
from tests.report.scale_builder import LAYOUT, LLAMA

from flatout.core.records.scale import FOLDED, Layout, ScheduleKind
from flatout.report.parts.layouts import layout_words

change = msgspec.structs.replace


def words(layout: Layout) -> dict[str, str]:
    return {one.term: one.meaning for one in layout_words(layout, LLAMA)}


def test_what_is_not_divided_is_not_told() -> None:
    assert words(Layout(global_batch=4)) == {
        "data 1": "One copy of the model, 4 x 1 sample a step.",
        "recomputed": "Nothing: all activations are kept for the backward.",
    }


def test_all_that_is_divided_is_told() -> None:
    assert words(LAYOUT) == {
        "tensor 8": "Each layer is divided over 8 neighbouring devices; what lies between its products is divided by tokens.",
        "pipeline 4": "The 80 layers lie in 4 stages of 2 parts, each of 10 layers; interleaved 1F1B.",
        "data 32": "32 copies, each 16 x 1 sample a step; the optimizer's state is divided among them (ZeRO-1).",
        "recomputed": "Attention, in the backward; all other activations are kept.",
    }


@pytest.mark.parametrize("kind", typing.get_args(ScheduleKind))
def test_every_schedule_has_its_words_and_parts(kind: ScheduleKind) -> None:
    said = words(Layout(pipeline=4, global_batch=16, schedule=kind))["pipeline 4"]
    assert ("2 parts" in said) == (kind in FOLDED)
    assert said.endswith(".") and ";" in said


def test_layers_that_do_not_divide_are_a_range() -> None:
    assert "3 stages of 26 - 27 layers" in words(Layout(pipeline=3, global_batch=3))["pipeline 3"]


@pytest.mark.parametrize(
    ("changed", "term", "meaning"),
    [
        ({"context": 4}, "context 4", "Each sample is divided by tokens over 4 devices."),
        ({"expert": 8}, "expert 8", "The 1 experts of a layer lie on 8 ranks."),
        ({"offload": "state"}, "offloaded", "The optimizer's state lies in the host's memory."),
        (
            {"offload": "weights", "offload_to": "disk"},
            "offloaded",
            "Weights and the optimizer's state lie in the host's disk.",
        ),
        ({"shard": 0, "compression": "powersgd"}, "compressed", "Gradients between copies, by powersgd."),
    ],
)
def test_further_ways_have_their_words(changed: dict[str, object], term: str, meaning: str) -> None:
    assert words(change(LAYOUT, **changed))[term] == meaning
    assert term.partition(" ")[0] not in " ".join(words(LAYOUT))


def test_groups_of_copies_are_told() -> None:
    assert "(FSDP, ZeRO-3), in groups of 8." in words(change(LAYOUT, shard=3, shard_ranks=8))["data 32"]
