"""Debug modes off: autograd's anomaly detection, and checks of gradients that nobody reads.

What        `torch.autograd.set_detect_anomaly` and `detect_anomaly` do nothing.
Guarantee   EXACT: the mode looks at results and does not change them. (It would have stopped at the first NaN.)
Refuses     Scripts that do not switch the mode on.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, Final

import libcst as cst

from flatout.core.errors import EditError
from flatout.core.parts import lever
from flatout.core.records.lever import Hooks, Parameters
from flatout.tune.levers.proposals import as_found
from flatout.tune.rewrite.calls import argument, calls_to, is_named
from flatout.tune.rewrite.imports import without_unused_import
from flatout.tune.rewrite.source import code_of, parsed

_NAMES: Final = tuple(
    f"{home}.{name}"
    for home in ("torch.autograd", "torch.autograd.anomaly_mode")
    for name in ("set_detect_anomaly", "detect_anomaly")
)


def apply(hooks: Hooks, parameters: Parameters) -> None:
    """Replace what switches the mode on by something that does nothing."""
    from contextlib import nullcontext

    import torch

    class Off(nullcontext[None]):
        """Stands for `set_detect_anomaly` and `detect_anomaly`: to be called, or entered."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__()
            hooks.note(LEVER.id)

    for owner in (torch.autograd, torch.autograd.anomaly_mode):
        hooks.replace(owner, "set_detect_anomaly", Off)
        hooks.replace(owner, "detect_anomaly", Off)


def edit(text: str, parameters: Parameters) -> str:
    """Take out the statements that switch the mode on; the body of a `with` of it moves out."""
    module = parsed(text)
    calls = [c for c in calls_to(module, _NAMES) if not is_named(_mode(c), "False")]
    if not calls:
        raise EditError("no debug mode is switched on in the file")
    unclear = next((c for c in calls if _mode(c) is not None and not is_named(_mode(c), "True")), None)
    if unclear is not None:
        raise EditError(f"'{code_of(unclear)}' may be on or off")
    remover = _remover()(calls)
    module = module.visit(remover)
    if remover.num_met != len(calls):
        raise EditError("the mode is switched on inside of another statement")
    for name in _NAMES:
        home, _, member = name.rpartition(".")
        module = without_unused_import(module, home, member)
    return without_unused_import(module, "torch").code


def _mode(call: cst.Call) -> cst.BaseExpression | None:
    """What a call says about on and off; None where nothing is said and it is on."""
    return argument(call, "mode", 0) if code_of(call.func).endswith("set_detect_anomaly") else None


@cache
def _remover() -> type[Any]:
    """The class of what removes calls, made when the first text is changed: libcst takes half a second to import."""

    class Remover(cst.CSTTransformer):
        """Takes out statements and items of `with` that consist of these calls."""

        def __init__(self, calls: Sequence[cst.Call]) -> None:
            super().__init__()
            self.num_met = 0
            self._gone: list[cst.SimpleStatementLine] = []
            self._calls = {id(call) for call in calls}

        def leave_SimpleStatementLine(
            self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
        ) -> cst.BaseStatement:
            only = original_node.body[0]
            if len(original_node.body) > 1 or not isinstance(only, cst.Expr) or id(only.value) not in self._calls:
                return updated_node
            self.num_met += 1
            self._gone.append(updated_node)
            return updated_node

        def leave_IndentedBlock(
            self, original_node: cst.IndentedBlock, updated_node: cst.IndentedBlock
        ) -> cst.BaseSuite:
            body = self._closed_up(updated_node.body)
            if not body:
                raise EditError("the mode is all that a block of the file switches on")
            return updated_node.with_changes(body=body)

        def leave_Module(self, original_node: cst.Module, updated_node: cst.Module) -> cst.Module:
            return updated_node.with_changes(body=self._closed_up(updated_node.body))

        def _closed_up(self, block: Sequence[cst.BaseStatement]) -> list[cst.BaseStatement]:
            """The block without what is gone; blank lines above it go to what follows."""
            remaining: list[cst.BaseStatement] = []
            blank: list[cst.EmptyLine] = []
            for statement in block:
                lines: Sequence[cst.EmptyLine] = getattr(statement, "leading_lines", ())
                if any(statement is gone for gone in self._gone):
                    blank = [line for line in lines if line.comment is None]
                    continue
                remaining.append(statement.with_changes(leading_lines=blank) if blank and not lines else statement)
                blank = []
            return remaining

        def leave_With(
            self, original_node: cst.With, updated_node: cst.With
        ) -> cst.BaseStatement | cst.FlattenSentinel[cst.BaseStatement]:
            pairs = zip(original_node.items, updated_node.items, strict=True)
            remaining = [new for old, new in pairs if id(old.item) not in self._calls or old.asname is not None]
            body = updated_node.body
            if len(remaining) == len(updated_node.items) or not isinstance(body, cst.IndentedBlock):
                return updated_node
            self.num_met += len(updated_node.items) - len(remaining)
            if remaining:
                remaining[-1] = remaining[-1].with_changes(comma=updated_node.items[-1].comma)
                return updated_node.with_changes(items=remaining)
            first, *rest = body.body
            return cst.FlattenSentinel([first.with_changes(leading_lines=updated_node.leading_lines), *rest])

    return Remover


LEVER = lever(__name__, as_found("no debug mode is on"), apply=apply, edit=edit, title="Debug modes off")
