"""All ways to do a problem on its device, and what binds each."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from flatout.kernels.matmul import compiled, float32, padded, prepacked, tiled, tiles, vendor
from flatout.kernels.matmul.problem import Problem
from flatout.kernels.matmul.way import Runner, Way


class Ways(NamedTuple):
    """What can be measured, the vendor first, and why others cannot."""

    ways: tuple[Way, ...]
    refusals: tuple[tuple[str, str], ...]


def ways_of(problem: Problem, *, most_tiles: int = 12, has_compiled: bool = False) -> Ways:
    """The vendor's library first: it is what others have to beat. `has_compiled`: torch.compile's as well, which takes long."""
    found, refusals = [vendor.VENDOR], []
    for name, why, more in (
        ("vendor-fused", vendor.fused_refusal(problem), lambda p: (vendor.FUSED,)),
        ("padded", padded.refusal(problem), padded.ways),
        ("triton", tiled.refusal(problem), partial(_tiled, most=most_tiles)),
        ("float32 from halves", float32.refusal(problem), float32.ways),
        ("prepacked", prepacked.refusal(problem), lambda p: (prepacked.PREPACKED,)),
        ("compiled", compiled.refusal(problem) if has_compiled else "not asked for", lambda p: (compiled.COMPILED,)),
    ):
        if why is None:
            found += more(problem)
        else:
            refusals.append((name, why))
    return Ways(tuple(found), tuple(refusals))


def bound(problem: Problem, way: Way) -> Runner:
    """What runs this way. Compiling, and errors of it, come at the first run."""
    simple = {
        "vendor": vendor.bind,
        "vendor-fused": vendor.bind_fused,
        "prepacked": prepacked.bind,
        "compiled": compiled.bind,
    }
    if way.name in simple:
        return simple[way.name](problem)
    if way.name == "padded":
        return padded.bind(problem, way)
    if way.name in (float32.HALVES, float32.WIDE):
        return float32.bind(problem, way)
    assert way.name == "triton" and way.tile is not None, way
    return tiled.bind(problem, way.tile)


def _tiled(problem: Problem, *, most: int) -> tuple[Way, ...]:
    proposed = tiles.proposed(problem, tiled.device_of(problem), most=most)
    return tuple(Way(name="triton", tile=tile) for tile in proposed)
