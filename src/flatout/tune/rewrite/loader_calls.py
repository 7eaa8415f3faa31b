"""Calls in a text that make a DataLoader, rewritten to hand out prepared items."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

import libcst as cst

from flatout.core.errors import EditError
from flatout.tune.rewrite.calls import argument, unpacked
from flatout.tune.rewrite.source import code_of

WORKER_OPTIONS: Final = ("num_workers", "persistent_workers", "prefetch_factor", "multiprocessing_context", "timeout")
_ORDER: Final = {
    "dataset": 0,
    "batch_size": 1,
    "shuffle": 2,
    "sampler": 3,
    "batch_sampler": 4,
    "collate_fn": 6,
    "drop_last": 8,
}


class LoaderCall:
    """A call of DataLoader, and what it may get out of `**options`.

    Raises EditError where that cannot be told from the text of `scope`.
    """

    def __init__(self, call: cst.Call, scope: cst.CSTNode) -> None:
        self.call = call
        self._options = unpacked(scope, call)
        self._name = next((code_of(a.value) for a in call.args if a.star), "")

    def value(self, word: str) -> cst.BaseExpression | None:
        """What is passed for a parameter, as an expression to write elsewhere; None where nothing is."""
        plain = argument(self.call.with_changes(args=[a for a in self.call.args if not a.star]), word, _ORDER.get(word))
        if plain is not None or word not in self._options.values:
            return plain
        if word not in self._options.certain:
            return cst.parse_expression(f'{self._name}.get("{word}")')
        return cst.parse_expression(f'{self._name}["{word}"]')

    @property
    def dataset(self) -> cst.BaseExpression:
        """Raises EditError where the loader is made without one."""
        found = self.value("dataset")
        if found is None:
            raise EditError("the loader is made without a dataset")
        return found

    def of_items(self, items: str) -> cst.Call:
        """The same loader of other items, without workers: `DataLoader(items, 32, shuffle=True)`."""
        first = self.call.args[0]
        if first.star or (first.keyword is not None and first.keyword.value != "dataset"):
            raise EditError("the dataset is not the loader's first argument")
        rest = [a for a in self.call.args[1:] if a.keyword is None or a.keyword.value not in WORKER_OPTIONS]
        args = [
            first.with_changes(value=cst.Name(items)),
            *(self._without(a, WORKER_OPTIONS) if a.star else a for a in rest),
        ]
        last = self.call.args[-1]
        args[-1] = args[-1].with_changes(comma=last.comma, whitespace_after_arg=last.whitespace_after_arg)
        return self.call.with_changes(args=args)

    def _without(self, arg: cst.Arg, words: Collection[str]) -> cst.Arg:
        """`**options` without these keys, where it may have them."""
        return _without_keys(arg, sorted(set(words) & set(self._options.values)))


def of_items_with_unknown_options(call: cst.Call, items: str) -> cst.Call:
    """The same loader of other items, without workers, where `**options` comes from elsewhere and may hold anything."""
    rest = [a for a in call.args[1:] if a.keyword is None or a.keyword.value not in WORKER_OPTIONS]
    named = [w for w in WORKER_OPTIONS if w != "timeout"]  # without workers it says nothing, the others are errors
    rest = [_without_keys(a, named) if a.star == "**" and isinstance(a.value, cst.Name) else a for a in rest]
    return call.with_changes(args=[call.args[0].with_changes(value=cst.Name(items)), *rest])


def _without_keys(arg: cst.Arg, keys: Sequence[str]) -> cst.Arg:
    """`**options` without these keys."""
    if not keys:
        return arg
    quoted = ", ".join(f'"{key}"' for key in keys)
    test = f"k != {quoted}" if len(keys) == 1 else f"k not in ({quoted})"
    name = code_of(arg.value)
    return arg.with_changes(value=cst.parse_expression(f"{{k: v for k, v in {name}.items() if {test}}}"))
