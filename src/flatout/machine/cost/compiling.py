"""What a compiler meets in a run: blocks that repeat, shapes that change, random numbers that are drawn."""

from __future__ import annotations

from collections import defaultdict
from typing import Final

from flatout.core.records.evidence import Evidence
from flatout.machine.cost.accounting import main_model

_FEWEST_BLOCKS: Final = 3
_MUCH_OF_IT: Final = 0.5
"""Share of the model's operators that lies in the blocks, for which compiling them alone is enough."""
_EVERY_STEP: Final = 0.9
_MANY_ROWS: Final = 0.1
_RANDOM: Final = ("dropout", "bernoulli", "rand", "normal", "uniform", "multinomial", "exponential")


def block_containers(evidence: Evidence) -> tuple[str, ...]:
    """Paths below the main root module ('blocks') of containers that hold most of its operators in blocks that are alike.

    '' is the root module itself.
    """
    model = main_model(evidence)
    if model is None:
        return ()
    root = evidence.models[model].name
    rows = [o for o in evidence.operators if o.phase == "forward" and (o.module + ".").startswith(root + ".")]
    inside: dict[str, dict[str, dict[tuple[str, str], float]]] = defaultdict(lambda: defaultdict(dict))
    for o in rows:
        parts = o.module.split(".")[1:]
        for at, part in enumerate(parts):
            if part.isdigit():
                key = (o.op, ".".join(parts[at + 1 :]))
                block = inside[".".join(parts[:at])][part]
                block[key] = block.get(key, 0.0) + o.num_calls
                break  # the outermost container
    whole = sum(o.num_calls for o in rows)
    found = []
    for path, blocks in inside.items():
        kinds: dict[tuple[tuple[str, str], ...], int] = defaultdict(int)
        for ops in blocks.values():
            kinds[tuple(sorted(ops))] += 1
        in_blocks = sum(sum(ops.values()) for ops in blocks.values() if kinds[tuple(sorted(ops))] >= _FEWEST_BLOCKS)
        # a layer of its own is no block, be it of several operators
        has_depth = any(
            any(inner for _, inner in ops) and kinds[tuple(sorted(ops))] >= _FEWEST_BLOCKS for ops in blocks.values()
        )
        if has_depth and in_blocks >= _MUCH_OF_IT * whole:
            found.append(path)
    return tuple(found)


def has_changing_shapes(evidence: Evidence) -> bool:
    """Whether much of the forward pass runs on shapes that do not come in every step."""
    rows = [o for o in evidence.operators if o.phase == "forward" and o.module]
    changing = sum(o.num_calls < _EVERY_STEP for o in rows)
    return bool(rows) and changing > _MANY_ROWS * len(rows)


def draws_in_model(evidence: Evidence) -> bool:
    """Whether operators inside modules draw random numbers: dropout, noise."""
    return any(
        o.module and o.phase == "forward" and any(word in o.op.removeprefix("aten.") for word in _RANDOM)
        for o in evidence.operators
    )
