"""The verbs of a plan: read it, run a script with its levers, apply them to objects that exist.

Apart from the other verbs, so that `flatout run` starts fast: only the levers of the plan are imported.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatout.core.errors import PlanError
from flatout.core.records.plan import (
    Circumstances,
    LossSpread,
    Plan,
    from_toml,
    is_edited,
    mismatches,
    other_model,
    other_script,
    text_root,
)
from flatout.core.registry import lever_of

if TYPE_CHECKING:
    from torch import nn
    from torch.utils.data import DataLoader

    from flatout.core.runtime.script import Outcome, Script
    from flatout.tune.live import Applied, Model, Optimizer


def read_plan(path: Path) -> Plan:
    """The plan in a TOML file.

    Raises PlanError when it cannot be read, is cut off, or names a lever that there is not.
    """
    try:
        data = path.read_bytes()
    except OSError as e:
        raise PlanError(f"cannot read '{path}': {e.strerror or e}; give the file that `flatout tune` wrote") from e
    plan = from_toml(data, name=f"'{path}'")
    for planned in plan.lever:
        lever_of(planned.id)
    return plan


def environment_of(plan: Plan) -> dict[str, str]:
    """The variables that the plan's levers want before the process starts."""
    found: dict[str, str] = {}
    for planned in plan.lever:
        lever = lever_of(planned.id)
        if lever.environment is not None:
            found.update(lever.environment(planned.parameters))
    return found


def precision_of_plan(plan: Plan) -> str:
    """The coarsest precision that the plan's levers have numbers rounded to; '' when they leave it."""
    from flatout.tune.search.script_search import precision_of

    return precision_of(plan.lever, {planned.id: lever_of(planned.id) for planned in plan.lever})


def run_planned(
    plan: Plan,
    script: Script,
    *,
    on_progress: Callable[[str], None],
    world_size: int = 1,
    only_print: bool = False,
    check_losses: bool = False,
) -> int:
    """Run `script` in this process with the plan's levers pulled; the exit code python would give.

    `on_progress` hears at the end which levers met nothing to change. With `only_print` everything is prepared, the levers are
    printed with their settings, and the script's first line is not run. With `check_losses` it also hears how the first losses
    compare with those that the plan holds.

    Raises PlanError when the plan was proved on something that differs in a way that matters.
    """
    from flatout.core.runtime.script import end_script, run_script
    from flatout.tune.apply import applied

    text = Path(script.file).read_bytes()
    must_fit(plan, Path(script.file), world_size=world_size)
    if is_edited(plan, text):
        on_progress(f"{script.file} has changed since the plan was proved; `flatout verify` proves it again")
    others: list[str] = []

    def look_at(module: nn.Module) -> None:
        """Compare the first model that is called with the plan's; levers that come as source may have changed it already."""
        if not others and not any(lever_of(p.id).apply is None for p in plan.lever):
            others.append(other_model(plan, sum(p.numel() for p in module.parameters())))
            if others[0]:
                end_script()

    with applied(plan, root=str(text_root(plan, Path(script.file).resolve())), look_at=look_at) as hooks:
        ready = script.with_code(hooks.code_of(script.file))
        if only_print:
            for planned in plan.lever:
                settings = "".join(f"  {name}={value}" for name, value in planned.parameters.items())
                sys.stdout.write(f"{planned.id}  ({planned.guarantee}){settings}\n")
            return 0
        outcome = (
            _run_checked(ready, plan, plan.losses, on_progress) if check_losses and plan.losses else run_script(ready)
        )
        missed = [planned.id for planned in plan.lever if planned.id not in hooks.done]
    if any(others):
        raise _elsewhere(others)
    if missed:
        on_progress(f"these levers of the plan met nothing to change: {', '.join(missed)}")
    return outcome.exit_code


def must_fit(plan: Plan, file: Path, *, world_size: int = 1) -> None:
    """Raises PlanError when the plan was proved on something that differs in a way that matters from here and this script."""
    from flatout.tune.apply import circumstances

    _must_fit(plan, circumstances(world_size=world_size), other_script(plan, str(file), file.read_bytes()))


def _run_checked(script: Script, plan: Plan, expected: LossSpread, on_progress: Callable[[str], None]) -> Outcome:
    """Run the script, and tell after so many losses whether their mean is one that the untouched script may have."""
    from flatout.core.runtime.script import run_script
    from flatout.tune.verify.losses import FirstLosses, joined_losses

    low, high = expected.limits
    seeds = f"{low:.5g} to {high:.5g} is expected of the untouched script by {len(expected.means)} seeds"

    def on_end(mean: float) -> None:
        found = f"after {expected.num_losses:,} losses the mean of the last fifth is {mean:.5g}; {seeds}"
        odd = "" if expected.holds(mean) else "WARNING: the plan may have changed what is learnt here: "
        on_progress(odd + found)

    losses = FirstLosses(expected.num_losses, on_end, each=joined_losses(plan.lever))
    losses.install()
    try:
        outcome = run_script(script)
    finally:
        losses.remove()
    if losses.num_losses_so_far < expected.num_losses:
        on_progress(
            f"the losses were not compared: the run had {losses.num_losses_so_far:,} of {expected.num_losses:,}"
        )
    return outcome


def apply(
    plan: Plan | Path | str,
    *,
    model: Model = None,  # type: ignore[assignment]
    optimizer: Optimizer = None,  # type: ignore[assignment]
    loader: DataLoader[Any] | None = None,
) -> Applied[Model, Optimizer]:
    """Apply the plan's levers to objects that exist, until `undo()` or the end of a `with`.

    Call it before `Accelerator.prepare` or `Trainer`.

    Args:
        plan: A plan, or the path of its file.
        model: The module to change in place.
        optimizer: Its optimizer, changed in place.
        loader: The loader of its batches; use the one that is returned.

    Returns:
        The same `model` and `optimizer`, a `loader` that may be another one, and as `not_applied` the levers that cannot be
        applied to them, with the reason.

    Raises:
        PlanError: The plan was proved on something that differs in a way that matters.
    """
    import torch.distributed as dist

    from flatout.tune.apply import circumstances
    from flatout.tune.live import Applied as Pulled

    plan = plan if isinstance(plan, Plan) else read_plan(Path(plan))
    world_size = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    _must_fit(plan, circumstances(world_size=world_size))
    other = other_model(plan, sum(p.numel() for p in model.parameters())) if model is not None else ""
    if other:
        raise _elsewhere([other])
    return Pulled(plan, model, optimizer, loader)


def _must_fit(plan: Plan, here: Circumstances, script: str = "") -> None:
    """Raises PlanError when the plan was proved on something that differs in a way that matters; `script` is how that differs."""
    differences = [*filter(None, [script]), *mismatches(plan, here)]
    if differences:
        raise _elsewhere(differences)


def _elsewhere(differences: Iterable[str]) -> PlanError:
    return PlanError(
        f"the plan was proved elsewhere ({'; '.join(differences)}); tune again here, or empty its table [proved_on] and "
        "script_digest to run it unproved"
    )
