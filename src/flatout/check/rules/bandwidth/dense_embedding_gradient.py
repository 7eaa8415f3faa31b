"""An embedding's gradient is as large as its table though a batch touches few rows.

Costs        A table-sized gradient is zeroed, filled at a few rows, and read by the optimizer, which also reads and writes its
             state and the table: several passes over the whole table in every step.
Evidence     The dense backward of an embedding with far fewer indices than rows, and the optimizer's share for the table. Trial:
             lookup, backward and update of such a table with the captured indices, dense and with sparse=True.
Levers       memory.sparse-gradient
False alarm  Small tables, batches that touch most rows, and weights tied to another layer's: the trial says so. With Adam the
             cure changes the update: moments of untouched rows stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator

from flatout.core.parts import rule
from flatout.core.records.evidence import Evidence, Operator
from flatout.core.records.finding import Finding
from flatout.core.records.trial import TimeSparseEmbedding
from flatout.machine.cost.accounting import (
    around,
    facts_named,
    milliseconds,
    operator_seconds,
    remaining_fraction,
    result_of,
)

_BAG = "aten._embedding_bag_backward"
_DENSE = ("aten.embedding_dense_backward", _BAG)
_MOST_TOUCHED = 0.25
_WORTH_A_TRIAL = 0.04
_MOST_SAVED = 0.75
"""Of a step: its forward and the rest of its model stay."""


def propose(evidence: Evidence) -> Iterator[TimeSparseEmbedding]:
    """Time each table that takes a share of the step."""
    for row in _rows(evidence):
        trial = _trial_of(evidence, row)
        if trial is not None and _cost_s(evidence, row, trial) > _WORTH_A_TRIAL * evidence.steps.step_s:
            yield trial


def check(evidence: Evidence) -> Iterator[Finding]:
    """Yield one finding per lookup of a table; the optimizer works on a table once, however often it is looked up."""
    tables: set[tuple[str, tuple[int, ...]]] = set()
    for row in _rows(evidence):
        trial = _trial_of(evidence, row)
        result = result_of(evidence, trial)
        if trial is None or result is None:
            continue
        operator, use = evidence.operators[row], evidence.optimizers[trial.optimizer]
        table = operator.module, operator.outputs[0].shape
        is_first = table not in tables
        tables.add(table)
        cost_s = _cost_s(evidence, row, trial) if is_first else operator_seconds(evidence, (row,))
        remaining = remaining_fraction(result)
        saved_s = cost_s * max(0.0, 1 - remaining)
        if is_first and result.now_s is not None and result.cured_s is not None and saved_s > 0:
            # Lookup, and giving back a gradient of many pages at zero_grad(), are in no operator's time, but in the trial's.
            saved_s = max(saved_s, min(result.now_s - result.cured_s, _MOST_SAVED * evidence.steps.step_s))
        num_rows, width = operator.outputs[0].shape
        touched = result.parts.get("touched", 0.0)
        lazy = "SparseAdam (it leaves untouched rows alone)" if "Adam" in use.name else use.name
        # It raises on sparse gradients, on a CPU as on a GPU.
        is_clipped = any(u.name == "clip_grad_norm_" for u in evidence.uses)
        clipped = "; clip_grad_norm_ on the other parameters alone, it takes no sparse gradients" if is_clipped else ""
        yield Finding(
            where=evidence.source_of(operator.source),
            cost_s=max(cost_s, saved_s),
            saved_s=around(saved_s, 0.15),
            because=f"a batch touches {touched:.0f} of {num_rows} rows of {width}, but gradient and {use.name} work on all "
            f"of them, {milliseconds(cost_s)} a step; with a sparse gradient it takes {remaining:.0%} (tried)",
            edit=f"nn.{'EmbeddingBag' if operator.op == _BAG else 'Embedding'}(..., sparse=True), its weight in an optimizer of "
            f"its own: torch.optim.{lazy}{clipped}",
            module=operator.module,
            operators=(row,),
            basis="trial",
        )


def _rows(evidence: Evidence) -> list[int]:
    return [i for i, o in enumerate(evidence.operators) if o.op in _DENSE and _is_sparse(o)]


def _is_sparse(operator: Operator) -> bool:
    table = operator.outputs[0].shape
    return len(table) == 2 and len(operator.inputs) >= 2 and operator.inputs[1].num_elements < _MOST_TOUCHED * table[0]


def _cost_s(evidence: Evidence, row: int, trial: TimeSparseEmbedding) -> float:
    """The dense backward, and the optimizer's time by the table's share of its elements."""
    use = evidence.optimizers[trial.optimizer]
    step_s = min(use.step_s, evidence.steps.phases.get("optimizer", use.step_s))
    share = evidence.operators[row].outputs[0].num_elements / max(1, use.num_elements)
    return operator_seconds(evidence, (row,)) + step_s * min(1.0, share)


def _trial_of(evidence: Evidence, row: int) -> TimeSparseEmbedding | None:
    """The trial with the optimizer that holds a tensor of the table's shape."""
    shape = "x".join(map(str, evidence.operators[row].outputs[0].shape))
    holders = {f.source for f in facts_named(evidence, "parameter-shapes") if shape in f.text.split(",")}
    for index, use in enumerate(evidence.optimizers):
        if (use.constructed if use.constructed >= 0 else use.source) in holders:
            return TimeSparseEmbedding(operator=row, optimizer=index)
    return None


RULE = rule(__name__, check, propose=propose, title="A table-sized gradient for a few rows", rewrites_line=True)
