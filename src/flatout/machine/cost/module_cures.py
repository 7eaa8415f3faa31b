"""Cures of a whole root module (its precision, compiling it): what their trials mean for the step, and where they are written."""

from __future__ import annotations

import ast
import builtins
import re
from typing import Final, NamedTuple

from flatout.core.records.evidence import Evidence, Model, Operator
from flatout.core.records.trial import TimeCompiled, TrialResult
from flatout.core.records.workload import Source
from flatout.machine.cost.accounting import around, main_model, model_seconds, remaining_fraction, speed_up
from flatout.machine.cost.matrix_units import PRODUCTS

_PASSES: Final = ("forward", "backward")
_RUNS_LOOP: Final = {"fit", "train", "learn", "fine_tune", "predict", "evaluate", "validate", "test", "pretrain", "run"}
"""Methods of libraries that hold the training loop themselves (Trainer.train, Trainer.fit, model.learn)."""
_ERROR: Final = re.compile(r"\w(Error|Exception)\b")
"""In the reason why a trial was refused: what it tried was raised by what it runs, and would be in the script."""
_OF_TORCH: Final = {"torch", "F", "nn", "functional"}

WORTH_A_CHANGE: Final = 1.15
"""Gain of the step for which a script's precision should change, or compiling at every start be paid; less is a remark."""
_WORTH_A_REMARK: Final = 1.04
"""The noise of a shared machine is of that size."""
_SPREAD: Final = (0.1, 0.3)
"""The least and the most doubt about a trial: steps meet colder caches and other work than calls in a row."""


class PricedCure(NamedTuple):
    """A trial of the main root module: the line that calls the module, and what the cure saves of a step."""

    where: Source | None
    model: Model
    result: TrialResult
    saved_s: tuple[float, float]
    gain: float
    """Of the whole step, in the middle of the range."""

    @classmethod
    def of(cls, evidence: Evidence, main: tuple[int, Model], result: TrialResult) -> PricedCure:
        """The module's measured share of the step, less what the cure leaves of it."""
        model = main[1]
        low, high = _SPREAD
        spread = min(max(result.spread_fraction, low), high)
        whole_s = evidence.steps.whole_s
        middle_s = call_seconds(evidence, model) * max(0.0, 1 - remaining_fraction(result))
        saved_s = around(middle_s, spread)
        gain = speed_up(whole_s, middle_s) if middle_s < whole_s else 1.0
        return cls(evidence.source_of(model.source), model, result, saved_s, gain)

    @property
    def has_backward(self) -> bool:
        """Whether the module's graphs are used."""
        return self.model.num_graphs_used > 0

    @property
    def passes(self) -> str:
        """What was timed, in words."""
        return (
            f"forward and backward of {self.model.name}" if self.has_backward else f"the forward of {self.model.name}"
        )

    @property
    def is_worth_a_change(self) -> bool:
        """Whether it gains so much that it is a finding."""
        return self.gain >= WORTH_A_CHANGE

    @property
    def is_worth_a_remark(self) -> bool:
        """Whether it gains, but less than that."""
        return _WORTH_A_REMARK <= self.gain < WORTH_A_CHANGE


def compiled_result(evidence: Evidence) -> TrialResult | None:
    """What came of compiling the main root module; None where that has not run or was refused."""
    index = main_model(evidence)
    for result in evidence.trials:
        is_it = isinstance(result.trial, TimeCompiled) and result.trial.model == index
        if is_it and result.now_s is not None and result.cured_s is not None:
            return result
    return None


def compiling_failed(evidence: Evidence) -> bool:
    """Whether compiling the main root module was tried and ended in an error."""
    index = main_model(evidence)
    tried = (r for r in evidence.trials if isinstance(r.trial, TimeCompiled) and r.trial.model == index)
    return compiled_result(evidence) is None and any(_ERROR.search(r.refused) for r in tried)


def times_of_both(result: TrialResult | None) -> str:
    """What autocast and compiling leave of the time together, where that was tried and is less than autocast alone leaves."""
    if result is None or not result.now_s or "both" not in result.parts:
        return ""
    if result.parts["both"] >= result.parts.get("autocast", result.now_s):
        return ""
    return f", with autocast and compiled {result.parts['both'] / result.now_s:.0%}"


def operators_of(evidence: Evidence, model: Model) -> list[Operator]:
    """The operators of forward and backward that run inside this root module."""
    inside = model.name + "."
    return [o for o in evidence.operators if o.phase in _PASSES and (o.module + ".").startswith(inside)]


def call_seconds(evidence: Evidence, model: Model) -> float:
    """Seconds of a step in forward and backward of this root module: its operators' share of both."""
    rows = operators_of(evidence, model)
    # Backward operators that torch could not match with forward ones belong to no module.
    phases = {o.phase for o in rows}
    whole_s = sum(o.total_s for o in evidence.operators if o.phase in phases and o.module)
    share = sum(o.total_s for o in rows) / whole_s if whole_s else 1.0
    return model_seconds(evidence) * share


def seconds_beside_products(evidence: Evidence, model: Model) -> float:
    """Seconds of a step in what a compiler can fuse or get out of the way: all of the module but products and convolutions."""
    rows = operators_of(evidence, model)
    whole_s = sum(o.total_s for o in rows)
    products_s = sum(o.op_s for o in rows if o.op.removeprefix("aten.") in PRODUCTS)
    return call_seconds(evidence, model) * max(0.0, whole_s - products_s) / whole_s if whole_s else 0.0


def main_call(evidence: Evidence) -> tuple[int, Model] | None:
    """The root module that takes most of a step, with its index."""
    index = main_model(evidence)
    return None if index is None else (index, evidence.models[index])


def is_in_library(line: Source | None) -> bool:
    """Whether this line hands the loop to a library, so that the module is called where the user cannot write.

    >>> is_in_library(Source(file="a.py", line=1, text="trainer.train()"))
    True
    >>> is_in_library(Source(file="a.py", line=1, text="loss = model(x)"))
    False
    """
    return line is None or any(name.rpartition(".")[2] in _RUNS_LOOP for name in _called(line.text))


def name_of_module(line: Source | None) -> str:
    """What this line calls the module that it calls; 'model' where that is not certain.

    >>> name_of_module(Source(file="a.py", line=1, text="loss = F.mse_loss(net(x), y)"))
    'net'
    >>> name_of_module(Source(file="a.py", line=1, text="for out in map(f, xs):"))
    'model'
    """
    names = [n for n in _called(line.text) if _may_be_module(n)] if line is not None else []
    return names[0] if len(names) == 1 else "model"


def _may_be_module(name: str) -> bool:
    first, _, _ = name.partition(".")
    is_owned = "." not in name or first == "self"
    return is_owned and name != "self" and first not in _OF_TORCH and not hasattr(builtins, name)


def _called(text: str) -> list[str]:
    """Names of the functions called in this line of Python, dotted."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        try:
            tree = ast.parse(f"{text.rstrip()}\n    pass")
        except SyntaxError:
            return []
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            names.append(ast.unparse(node.func))
    return names
