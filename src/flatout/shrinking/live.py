"""`flatout.shrink`: the chooser on a model that is there, in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from flatout.errors import UsageError
from flatout.levers.subjects import Batch, Purpose, Subject
from flatout.records.shrinking import OBJECTIVES, Objective, Shrunk
from flatout.registry import levers
from flatout.reporting.shrinking import shrunk_lines
from flatout.shrinking.exploring import Composition
from flatout.shrinking.shrink import Allowance, Settings
from flatout.shrinking.shrink import shrink as search
from flatout.shrinking.trials import Workshop
from flatout.shrinking.written import write


@dataclass(frozen=True)
class Smaller:
    """What was chosen: called as the model is. Print it for the table."""

    report: Shrunk
    call: Callable[..., Any]
    _shop: Workshop
    _composition: Composition

    def __call__(self, *inputs: Any) -> Any:
        return self.call(*inputs)

    def __str__(self) -> str:
        return "\n".join(shrunk_lines(self.report))

    def save(self, folder: str | Path) -> None:
        """Write it where `flatout.load_shrunk` finds it. Raises UsageError when it cannot be pickled or written."""
        write(self._shop.delivered(self._composition), self._composition, Path(folder))


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
    tell: Callable[[str], None] = lambda _: None,
) -> Smaller:
    """The cheapest model that loses no more than `budget` of its metric ('1%' of it, or '0.01' in its own unit).

    `inputs` are those of one call as it is timed, the last `num_state` of them carried state that comes back as the last
    outputs. `evaluate` is given what is called like the model (with a state: `levers.subjects.Stepping`) and returns the metric:
    a number, or one a sample. `batches` returns (inputs, targets) anew at each call, `loss` takes (outputs, targets). The model
    itself stays as it is. Everything runs in this process: `flatout shrink` gives each composition one of its own.

    Raises UsageError for arguments that do not fit, PlanError when the model as it is cannot be measured.
    """
    if model.training:
        raise UsageError("the model is in training mode; call eval() first")
    if objective not in OBJECTIVES:
        raise UsageError(f"objective '{objective}' is none of {', '.join(OBJECTIVES)}")
    if objective == "train-cost" and (batches is None or loss is None):
        raise UsageError("objective 'train-cost' trains: give batches and loss")
    purpose = Purpose(
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
    shop = Workshop(Subject.of(model, purpose), levers(), objective)
    settings = Settings(type(model).__name__, objective, Allowance.of(budget), is_cost, budget_s)
    report, composition = search(shop, levers(), settings, tell=tell)
    return Smaller(report, shop.subject(composition).usable, shop, composition)
