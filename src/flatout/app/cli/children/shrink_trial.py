"""One composition in a process of its own: `python -m flatout.app.cli.children.shrink_trial ORDER ANSWER`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatout.app.cli.factories import named_function, named_model
from flatout.core.errors import FlatoutError, UsageError

if TYPE_CHECKING:
    from flatout.core.records.shrink import Order, Tried
    from flatout.shrink.candidate import CandidateModel


def main(arguments: list[str]) -> int:
    """Do what the order says; the answer is written whole or not at all."""
    from flatout.core.files import write_whole_file
    from flatout.core.records.record import from_json, to_json
    from flatout.core.records.shrink import Order, Tried

    order = from_json(Path(arguments[0]).read_bytes(), Order)
    sys.path[0] = order.root  # not this package's folder, where python -m would look
    try:
        tried = answered(order)
    except FlatoutError as e:
        tried = Tried(because=str(e))
    write_whole_file(Path(arguments[1]), to_json(tried))
    return 0


def answered(order: Order) -> Tried:
    """Make the composition; measure it, or write it into the folder that the order names."""
    import torch

    from flatout.core.records.shrink import Tried
    from flatout.core.registry import reductions
    from flatout.shrink.compose.saved_model import require_savable, write_shrunk
    from flatout.shrink.compose.trials import TrialRunner

    if order.num_threads:
        torch.set_num_threads(order.num_threads)
    candidate = _candidate(order)
    if order.is_check:
        require_savable(candidate)
        return Tried()
    keep = Path(order.keep) if order.keep else None
    if keep is not None:
        _same_weights(candidate, keep / "given.pt")
    runner = TrialRunner(candidate, reductions(), order.objective, seconds=order.trial_s, keep=keep)
    if not order.out:
        return runner.tried(order.composition, allowed_loss=order.allowed_loss)
    found = runner.delivered(order.composition)
    write_shrunk(found, order.composition, Path(order.out), allow_pickle=order.allow_pickle)
    return Tried()


def _candidate(order: Order) -> CandidateModel:
    from flatout.shrink.candidate import CandidateModel, ShrinkTask

    built = named_model(order.model)
    batches = named_function(order.data, gives="batches: (inputs, targets)") if order.data else None
    loss = named_function(order.loss, gives="the loss of (outputs, targets)") if order.loss else None
    task = ShrinkTask(
        inputs=built.example_inputs,
        num_state=len(built.state),
        evaluate=named_function(order.metric, gives="the metric of a model: a number, or one a sample"),
        batches=batches,
        loss=loss,
        is_cost=order.is_cost,
        allowed_loss=order.allowed_loss,
        recovery_s=order.recovery_s,
        num_steps=order.num_steps,
        learning_rate=order.learning_rate,
        seed=order.seed,
    )
    return CandidateModel.of(built.module.eval(), task)


def _same_weights(candidate: CandidateModel, file: Path) -> None:
    """The weights that the first process got from the factory, for all. Raises UsageError if they do not fit."""
    import torch

    state: dict[str, Any] = candidate.model.state_dict()
    if not file.exists():
        beside = file.with_suffix(".part")
        torch.save(state, beside)
        beside.replace(file)
        return
    try:
        candidate.model.load_state_dict(torch.load(file, weights_only=True))
    except RuntimeError as e:
        raise UsageError(f"the factory returns another model each time it is called: {e}") from e


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
