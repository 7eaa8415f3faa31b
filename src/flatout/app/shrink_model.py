"""`flatout.shrink`: the chooser on a model that is there, in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from flatout.core.errors import UsageError
from flatout.core.records.allowance import Allowance
from flatout.core.records.shrink import OBJECTIVES, Objective, Shrunk
from flatout.core.registry import reductions
from flatout.report.parts.shrink import shrunk_blocks
from flatout.report.text import plain_lines
from flatout.shrink.candidate import Batch, CandidateModel, ShrinkTask
from flatout.shrink.compose.explorer import Composition
from flatout.shrink.compose.saved_model import write_shrunk
from flatout.shrink.compose.shrink import ShrinkSettings, find_cheapest
from flatout.shrink.compose.trials import TrialRunner


@dataclass(frozen=True)
class ShrunkModel:
    """What was chosen: called as the model is. Print it for the table."""

    report: Shrunk
    call: Callable[..., Any]
    _runner: TrialRunner
    _composition: Composition

    def __call__(self, *inputs: Any) -> Any:
        return self.call(*inputs)

    def __str__(self) -> str:
        return "\n".join(plain_lines(shrunk_blocks(self.report)))

    def save(self, folder: str | Path, *, allow_pickle: bool = False) -> None:
        """Write it where `flatout.load_shrunk` finds it, as data: a tree of modules, and tensors.

        Raises UsageError where it holds what cannot be described so; with `allow_pickle` it is pickled then. And where the folder
        cannot be written.
        """
        found = self._runner.delivered(self._composition)
        write_shrunk(found, self._composition, Path(folder), allow_pickle=allow_pickle)


def shrink(
    model: nn.Module,
    inputs: Sequence[Any],
    *,
    evaluate: Callable[[Callable[..., Any]], Any],
    batches: Callable[[], Iterable[Batch]] | None = None,
    loss: Callable[[Any, Any], Tensor] | None = None,
    budget: str = "1%",
    objective: Objective = "latency",
    is_cost: bool = False,
    num_state: int = 0,
    budget_s: float = 600.0,
    recovery_s: float = 60.0,
    num_steps: int = 0,
    learning_rate: float = 1e-3,
    seed: int = 0,
    on_progress: Callable[[str], None] = lambda _: None,
) -> ShrunkModel:
    """The cheapest model that loses no more than `budget` of its metric ('1%' of it, or '0.01' in its own unit).

    Everything runs in this process: `flatout shrink` gives each composition one of its own. The model itself is not changed.

    Args:
        model: The trained model, in eval mode.
        inputs: Arguments of one call as it is timed; the last `num_state` are carried state that comes back as the last outputs.
        evaluate: Gets what is called like the model (with a state: `flatout.shrink.candidate.StatefulModel`) and returns the
            metric: a number, or one number a sample.
        batches: Returns (inputs, targets) again at each call, to train and calibrate on.
        loss: Of (outputs, targets); without it a smaller model learns from this one.
        budget: What of the metric may be lost.
        objective: What to save: 'latency', 'memory' or 'train-cost'.
        is_cost: Whether less of the metric is better.
        num_state: Number of inputs that are carried state.
        budget_s: Seconds to try compositions in.
        recovery_s: Seconds to train a smaller model in.
        num_steps: Steps of training for 'train-cost'; 0: one pass over the batches.
        learning_rate: Of AdamW, for 'train-cost'.
        seed: Start of all training.
        on_progress: Gets the name of each composition before it is tried.

    Returns:
        The cheapest model that was proved, called as the model is, with the report of all that was tried.

    Raises:
        UsageError: Arguments do not fit.
        PlanError: The model as it is cannot be measured.
    """
    if model.training:
        raise UsageError("the model is in training mode; call eval() first")
    if objective not in OBJECTIVES:
        raise UsageError(f"objective '{objective}' is none of {', '.join(OBJECTIVES)}")
    if objective == "train-cost" and (batches is None or loss is None):
        raise UsageError("objective 'train-cost' trains: give batches and loss")
    task = ShrinkTask(
        inputs=tuple(inputs),
        num_state=num_state,
        evaluate=evaluate,
        batches=batches,
        loss=loss,
        is_cost=is_cost,
        recovery_s=recovery_s,
        num_steps=num_steps,
        learning_rate=learning_rate,
        seed=seed,
    )
    runner = TrialRunner(CandidateModel.of(model, task), reductions(), objective)
    settings = ShrinkSettings(type(model).__name__, objective, Allowance.of(budget, name="budget"), is_cost, budget_s)
    report, composition = find_cheapest(runner, reductions(), settings, on_progress=on_progress)
    return ShrunkModel(report, runner.candidate(composition).usable, runner, composition)
