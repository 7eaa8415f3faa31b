"""Builds rules, levers, reductions and kernels from their modules: ids from paths, most of the rest from docstrings.

The module `<package>.<branch>.<name>` has the id `<branch>.<name>`, with hyphens. The docstring's first sentence is the title
unless another is passed; its section "Levers" holds the ids of a rule's levers, "Guarantee" begins with the guarantee.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from inspect import cleandoc
from typing import TYPE_CHECKING, Any, cast, get_args

import msgspec

from flatout.core.errors import LeverRefused, UsageError
from flatout.core.records.finding import Finding, Note, Regime, Rule
from flatout.core.records.kernel import Kernel
from flatout.core.records.lever import Lever, Refusal
from flatout.core.records.reduction import Kind, Reduction
from flatout.core.records.verdict import Guarantee

if TYPE_CHECKING:
    from flatout.core.records.evidence import Evidence
    from flatout.core.records.lever import Candidate, Hooks, Parameters
    from flatout.core.records.reduction import Option, ReductionRefusal
    from flatout.core.records.trial import Trial


def rule(
    module: str,
    check: Callable[[Evidence], Iterator[Finding]] = lambda evidence: iter(()),
    *,
    propose: Callable[[Evidence], Iterator[Trial]] | None = None,
    trial: Callable[[Evidence], Trial | None] | None = None,
    note: Callable[[Evidence], Iterator[Note]] | None = None,
    title: str | None = None,
    is_general: bool = False,
    rewrites_line: bool = False,
    is_cure: bool = False,
) -> Rule:
    """The rule of a module, whose findings and notes get its id, and findings its levers and regime.

    A finding that names no regime has that of the module's folder, or "overhead" where the folder is named after none. Its own
    line is dropped from its other lines (`also`).

    Args:
        module: The module's `__name__`.
        check: Yields what it finds in Evidence; it need not fill in `rule`, `levers`, `regime`. Left out where all costs no time.
        propose: Yields the trials whose results `check` reads.
        trial: Returns the one trial whose result `check` reads, if any, in place of `propose`.
        note: Yields what is worth knowing although it costs nothing here.
        title: What reports print; the docstring's first sentence if None.
        is_general: Whether the rule stays silent where rules that name a cause explain the same time.
        rewrites_line: Whether its edits rewrite the code of the finding's line, which in a library they could not.
        is_cure: Whether the rule prices a change of how a whole module runs, told beside the causes and after them.

    Raises:
        UsageError: The module has no docstring.
    """
    text = _docstring(module)
    id, levers = _id(module), tuple(re.findall(r"[\w-]+\.[\w-]+", _section(text, "Levers")))
    regime = next((r for r in get_args(Regime) if r == id.partition(".")[0]), "overhead")

    def findings(evidence: Evidence) -> Iterator[Finding]:
        for found in check(evidence):
            also = tuple(line for line in found.also if line != found.where)
            yield msgspec.structs.replace(found, rule=id, levers=levers, regime=found.regime or regime, also=also)

    def notes(evidence: Evidence) -> Iterator[Note]:
        for noted in note(evidence) if note is not None else ():
            yield msgspec.structs.replace(noted, rule=id)

    return Rule(
        id=id,
        title=title or _first_sentence(text),
        module=module,
        check=findings,
        propose=_proposing(trial) if trial is not None else propose,
        note=note and notes,
        levers=levers,
        is_general=is_general,
        rewrites_line=rewrites_line,
        is_cure=is_cure,
    )


def lever(
    module: str,
    propose: Callable[[Evidence, Sequence[Finding]], Iterator[Candidate | Refusal]],
    *,
    apply: Callable[[Hooks, Parameters], None] | None = None,
    edit: Callable[[str, Parameters], str] | None = None,
    environment: Callable[[Parameters], Mapping[str, str]] | None = None,
    dtype: Callable[[Parameters], str] | None = None,
    title: str | None = None,
    conflicts: tuple[str, ...] = (),
    is_local: bool = False,
    effort: float | Callable[[Parameters], float] = 1.0,
    errors: tuple[str, ...] = (),
    num_losses: Callable[[Parameters], int] = lambda parameters: 1,
) -> Lever:
    """The lever of a module, with the guarantee that its docstring names.

    Args:
        module: The module's `__name__`.
        propose: As the field of `Lever`; it need not fill in `lever`, and may refuse by LeverRefused.
        apply, edit, environment, dtype, conflicts, is_local, effort, errors, num_losses: The fields of `Lever`.
        title: What reports print; the docstring's first sentence if None.

    Raises:
        UsageError: The module has no docstring, or it names no guarantee.
    """
    text, id = _docstring(module), _id(module)

    def proposals(evidence: Evidence, findings: Sequence[Finding]) -> Iterator[Candidate | Refusal]:
        try:
            for proposal in propose(evidence, findings):
                yield msgspec.structs.replace(proposal, lever=id)
        except LeverRefused as e:
            yield Refusal(lever=id, because=str(e))

    return Lever(
        id=id,
        title=title or _first_sentence(text),
        guarantee=_guarantee(module, text),
        module=module,
        propose=proposals,
        apply=apply,
        environment=environment,
        conflicts=conflicts,
        edit=edit,
        is_local=is_local,
        effort=effort,
        dtype=dtype,
        errors=errors,
        num_losses=num_losses,
    )


def reduction(
    module: str,
    options: Callable[[Any], Iterator[Option | ReductionRefusal]],
    apply: Callable[[Any, Parameters], Any],
    *,
    title: str | None = None,
) -> Reduction:
    """The reduction of a module: its kind is the folder, its guarantee the one that the docstring names.

    Args:
        module: The module's `__name__`.
        options, apply: The fields of `Reduction`.
        title: What reports print; the docstring's first sentence if None.

    Raises:
        UsageError: The module has no docstring, or it names no guarantee.
    """
    text, id = _docstring(module), _id(module)
    return Reduction(
        id=id,
        title=title or _first_sentence(text),
        guarantee=_guarantee(module, text),
        module=module,
        kind=cast(Kind, id.partition(".")[0]),
        options=options,
        apply=apply,
    )


def kernel(
    module: str,
    title: str,
    run: Callable[..., Any],
    *,
    order: int,
    refusal: Callable[..., str | None] = lambda *arguments, **options: None,
    guarantee: Guarantee = "bounded",
    name: str | None = None,
) -> Kernel:
    """The kernel of a module of `flatout.blocks.kernels`: the id is the module's path in there.

    Args:
        module: The module's `__name__`.
        title, run, order, refusal, guarantee: The fields of `Kernel`; without a refusal it takes all valid arguments.
        name: Takes the place of the module's own name in the id.
    """
    _, _, path = module.partition(".blocks.kernels.")
    op, _, own = path.rpartition(".")
    return Kernel(
        id=f"{op}.{name or own}",
        title=title,
        module=module,
        run=run,
        refusal=refusal,
        order=order,
        guarantee=guarantee,
    )


def _id(module: str) -> str:
    return ".".join(module.split(".")[-2:]).replace("_", "-")


def _docstring(module: str) -> str:
    text = sys.modules[module].__doc__
    if not text:
        raise UsageError(
            f"{module} has no docstring, which holds its title and more; write one, and run python without -OO"
        )
    return cleandoc(text)


def _first_sentence(text: str) -> str:
    return text.partition("\n\n")[0].replace("\n", " ").removesuffix(".")


def _section(text: str, name: str) -> str:
    """The text of a section that starts at the margin: "Levers       graph.compile"."""
    found = re.search(rf"^{name} {{2,}}(.*(?:\n +.*)*)", text, re.MULTILINE)
    return found[1] if found else ""


def _guarantee(module: str, text: str) -> Guarantee:
    word = re.split(r"\W", _section(text, "Guarantee"), maxsplit=1)[0].lower()
    if word not in get_args(Guarantee):
        raise UsageError(
            f"the section 'Guarantee' of {module} starts with '{word}'; start it with EXACT, BOUNDED or QUALITY"
        )
    return cast(Guarantee, word)


def _proposing(trial: Callable[[Evidence], Trial | None]) -> Callable[[Evidence], Iterator[Trial]]:
    def propose(evidence: Evidence) -> Iterator[Trial]:
        if (wanted := trial(evidence)) is not None:
            yield wanted

    return propose
