"""One composition in a process of its own: `python -m flatout.cli.shrink_trial ORDER ANSWER`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatout.cli.factories import given_model, named_function
from flatout.errors import FlatoutError, UsageError

if TYPE_CHECKING:
    from flatout.levers.subjects import Subject
    from flatout.records.shrinking import Order, Tried


def main(arguments: list[str]) -> int:
    """Do what the order says; the answer is written whole or not at all."""
    from flatout.records.record import from_json, to_json, write_file
    from flatout.records.shrinking import Order, Tried

    order = from_json(Path(arguments[0]).read_bytes(), Order)
    sys.path[0] = order.root  # not this package's folder, where python -m would look
    try:
        tried = answered(order)
    except FlatoutError as e:
        tried = Tried(because=str(e))
    write_file(Path(arguments[1]), to_json(tried))
    return 0


def answered(order: Order) -> Tried:
    """Make the composition; measure it, or write it into the folder that the order names."""
    import torch

    from flatout.records.shrinking import Tried
    from flatout.registry import levers
    from flatout.shrinking.trials import Workshop
    from flatout.shrinking.written import write

    if order.num_threads:
        torch.set_num_threads(order.num_threads)
    subject = _subject(order)
    keep = Path(order.keep) if order.keep else None
    if keep is not None:
        _same_weights(subject, keep / "given.pt")
    workshop = Workshop(subject, levers(), order.objective, seconds=order.trial_s, keep=keep)
    if not order.out:
        return workshop.tried(order.composition, allowed_loss=order.allowed_loss)
    write(workshop.delivered(order.composition), order.composition, Path(order.out))
    return Tried()


def _subject(order: Order) -> Subject:
    from flatout.levers.subjects import Purpose, Subject

    given = given_model(order.model)
    batches = named_function(order.data, gives="batches: (inputs, targets)") if order.data else None
    loss = named_function(order.loss, gives="the loss of (outputs, targets)") if order.loss else None
    purpose = Purpose(
        inputs=given.example_inputs,
        num_state=len(given.state),
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
    return Subject.of(given.module.eval(), purpose)


def _same_weights(subject: Subject, file: Path) -> None:
    """The weights that the first process got from the factory, for all. Raises UsageError if they do not fit."""
    import torch

    state: dict[str, Any] = subject.model.state_dict()
    if not file.exists():
        beside = file.with_suffix(".part")
        torch.save(state, beside)
        beside.replace(file)
        return
    try:
        subject.model.load_state_dict(torch.load(file))
    except RuntimeError as e:
        raise UsageError(f"the factory returns another model each time it is called: {e}") from e


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
