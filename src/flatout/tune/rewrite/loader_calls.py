"""Calls in a text that make a DataLoader, rewritten to hand out prepared items or whole batches of them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

import libcst as cst

from flatout.core.errors import EditError
from flatout.tune.rewrite.calls import argument, is_named, unpacked
from flatout.tune.rewrite.source import code_of

WORKER_OPTIONS: Final = ("num_workers", "persistent_workers", "prefetch_factor", "multiprocessing_context", "timeout")
_PASSED_ON: Final = ("pin_memory", "generator")
"""What a loader of whole batches takes from the loader of items."""
_ORDER: Final = {
    "dataset": 0,
    "batch_size": 1,
    "shuffle": 2,
    "sampler": 3,
    "batch_sampler": 4,
    "collate_fn": 6,
    "drop_last": 8,
}
_DEFAULTS: Final = {"batch_size": 1, "drop_last": False, "pin_memory": False}


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
        values = self._options.values[word]
        if word not in self._options.certain:
            return cst.parse_expression(f'{self._name}.get("{word}", {_DEFAULTS.get(word)})')
        if len({code_of(v) for v in values}) == 1 and is_named(values[0], "True", "False"):
            return values[0]
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

    def by_batches(self, rows: str) -> cst.Call:
        """`DataLoader(rows, sampler=BatchSampler(RandomSampler(rows), 32, drop_last=True), batch_size=None)`."""
        size, drop = self.value("batch_size"), self.value("drop_last")
        shuffle, sampler, generator = self.value("shuffle"), self.value("sampler"), self.value("generator")
        if sampler is not None:
            order = code_of(sampler)
        elif is_named(shuffle, "True"):
            order = f"RandomSampler({rows}{f', generator={code_of(generator)}' if generator is not None else ''})"
        elif shuffle is None or is_named(shuffle, "False"):
            order = f"SequentialSampler({rows})"
        else:
            raise EditError(f"'shuffle={code_of(shuffle)}' is decided when it runs")
        length = code_of(size) if size is not None else "1"
        batches = f"BatchSampler({order}, {length}, drop_last={code_of(drop) if drop is not None else 'False'})"
        passed = [(word, self.value(word)) for word in _PASSED_ON]
        keywords = "".join(f", {word}={code_of(value)}" for word, value in passed if value is not None)
        new = f"{code_of(self.call.func)}({rows}, sampler={batches}, batch_size=None{keywords})"
        return cst.ensure_type(cst.parse_expression(new), cst.Call)

    def _without(self, arg: cst.Arg, words: Collection[str]) -> cst.Arg:
        """`**options` without these keys, where it may have them."""
        dropped = sorted(set(words) & set(self._options.values))
        if not dropped:
            return arg
        keys = ", ".join(f'"{word}"' for word in dropped)
        test = f'k != "{dropped[0]}"' if len(dropped) == 1 else f"k not in ({keys})"
        return arg.with_changes(value=cst.parse_expression(f"{{k: v for k, v in {self._name}.items() if {test}}}"))
