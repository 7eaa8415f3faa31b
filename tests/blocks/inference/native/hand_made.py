"""Engines of the models in hand_made.c."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np
import torch
from torch import Tensor

from flatout.blocks.inference.native.engine import Engine
from flatout.blocks.inference.native.library import Generated
from flatout.core.records.native import NativeManifest, Port

SOURCE = Path(__file__).with_name("hand_made.c").read_text()
W = np.array([[1, 2, 3], [4, 5, 6]], np.float32)


class Packing:
    """What stands for a program: the state dict has one tensor of six numbers, w."""

    def packed(self, state_dict: Mapping[str, Tensor], *, precision: Mapping[str, str] | None = None) -> bytes:
        return packed(state_dict["w"].numpy())

    def save(self, path: Path) -> None:
        path.write_bytes(b"a program")


def packed(w: np.ndarray) -> bytes:
    """The weights' block: 16 floats."""
    block = np.zeros(16, np.float32)
    block[: w.size] = w.ravel()
    return block.tobytes()


def weights(value: float) -> dict[str, Tensor]:
    """A state dict whose numbers are all `value`."""
    return {"w": torch.full((2, 3), value)}


def average(w: np.ndarray = W) -> Generated:
    """y = W x + h; h' = (h + y) / 4."""
    return Generated(
        name="average",
        source=SOURCE,
        header="/* nothing */\n",
        weights=packed(w),
        inputs=(Port(name="x", dtype="float32", shape=(3,)),),
        outputs=(Port(name="y", dtype="float32", shape=(2,)),),
        state=(Port(name="h", dtype="float32", shape=(2,)),),
        layers=(),
    )


def pair() -> Generated:
    """s = a * k where it is on, else 0; c = {k, events so far}."""
    return average()._replace(
        name="pair",
        source="#define PAIR\n" + SOURCE,
        inputs=(
            Port(name="a", dtype="float32", shape=(3,)),
            Port(name="k", dtype="int64", shape=()),
            Port(name="on", dtype="bool", shape=(1,)),
        ),
        outputs=(Port(name="s", dtype="float32", shape=(3,)), Port(name="c", dtype="int32", shape=(2,))),
        state=(Port(name="events", dtype="int64", shape=()),),
    )


def compiled_engine(generated: Generated, *, cache: Path) -> Engine:
    """The engine."""
    engine, _ = Engine.compiled(generated, program=Packing(), versions=("2.11.0", "0"), isas=("plain",), cache=cache)
    return engine


def expected(x: np.ndarray, w: np.ndarray = W) -> np.ndarray:
    """y after each event of [T, 3], in float64."""
    h, found = np.zeros(2), []
    for one in x.astype(np.float64):
        y = w @ one + h
        h = 0.25 * (h + y)
        found.append(y)
    return np.array(found)


def with_dtype(manifest: NativeManifest, *, dtype: str) -> NativeManifest:
    """The manifest with another type of its first input."""
    first = msgspec.structs.replace(manifest.inputs[0], dtype=dtype)
    return msgspec.structs.replace(manifest, inputs=(first, *manifest.inputs[1:]))
