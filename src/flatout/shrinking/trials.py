"""A composition made and measured, in this process."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Final

import torch

from flatout.errors import FlatoutError
from flatout.levers.subjects import Purpose, Subject
from flatout.measure.probe import cpu_model
from flatout.records.lever import KINDS, Lever, Offer, PlannedLever, Reduction, Refusal
from flatout.records.shrinking import Objective, Point, Tried, Untried, Where
from flatout.shrinking.exploring import Composition, name_of
from flatout.shrinking.measured import Measured, of_calls, of_steps
from flatout.shrinking.scores import Score, lost, score_of
from flatout.shrinking.training import Training, copied

TRIAL_S: Final = 3.0
"""Of one comparison of times: 11 rounds at least where a call takes less than a tenth of a second."""


class Workshop:
    """Makes subjects out of the given one, and measures them beside it. Trained ones are kept for what builds on them."""

    def __init__(
        self,
        given: Subject,
        levers: Iterable[Lever],
        objective: Objective,
        *,
        seconds: float = TRIAL_S,
        keep: Path | None = None,
    ) -> None:
        """`levers` are all there are, `seconds` what one comparison of times takes; `keep` is a folder for trained models."""
        self._levers = {lever.id: lever for lever in levers if lever.reduction is not None}
        self._given, self._objective, self._seconds, self._keep = given, objective, seconds, keep
        self._score: Score | None = None
        self._kept: dict[str, Subject] = {}

    def tried(self, composition: Composition, *, allowed_loss: float, times: float = 1.0) -> Tried:
        """The point, and what could come next; or why there is none. Errors that are not flatout's or torch's are raised."""
        purpose = replace(self._given.purpose, allowed_loss=allowed_loss)
        self._given = replace(self._given, purpose=purpose)
        try:
            return self._tried(composition, times * self._seconds)
        except (FlatoutError, RuntimeError) as e:  # of torch.compile, too
            said = str(e).strip() or type(e).__name__
            return Tried(because=said.splitlines()[0] if not isinstance(e, FlatoutError) else said)

    def subject(self, composition: Composition) -> Subject:
        """The given one under these levers, one after the other."""
        if not composition:
            return self._given
        name = name_of(composition)
        if name not in self._kept:
            *before, last = composition
            kept = self._file(name)
            if kept is not None and kept.exists():
                model, inputs, told = torch.load(kept, weights_only=False)  # of our own folder
                self._kept[name] = replace(self._given.having(model, "", inputs=inputs), told=told)
                return self._kept[name]
            reduction = self._reduction(last)
            made: Subject = reduction.apply(self.subject(tuple(before)), last.parameters)
            if reduction.kind not in ("size", "recovery"):
                return made
            self._kept[name] = made
            if kept is not None:
                beside = kept.with_suffix(".part")
                torch.save((made.model, made.inputs, made.told), beside)
                beside.replace(kept)
        return self._kept[name]

    def delivered(self, composition: Composition) -> Subject:
        """The subject with everything but what runs it, as it can be written to a file."""
        held = tuple(offer for offer in composition if self._reduction(offer).kind != "engine")
        if self._objective != "train-cost":
            return self.subject(held)
        subject = self._copy(held)
        Training(subject).run(num_steps(subject.purpose))
        return subject

    def _file(self, name: str) -> Path | None:
        return None if self._keep is None else self._keep / f"{hashlib.sha256(name.encode()).hexdigest()[:16]}.pt"

    def _tried(self, composition: Composition, seconds: float) -> Tried:
        began = perf_counter()
        if self._objective == "train-cost":
            subject, measured, score = self._trained(composition, seconds)
        else:
            subject = self.subject(composition)
            score = score_of(subject)
            measured = of_calls(subject, self._given, seconds=seconds)
        if self._score is None:
            self._score = score if not composition else score_of(self._given)
        value, interval = lost(self._score, score, is_cost=self._given.purpose.is_cost)
        point = Point(
            name=name_of(composition),
            levers=tuple(self._planned(offer) for offer in composition),
            call_s=measured.call_s,
            faster=measured.faster if composition else (1.0, 1.0, 1.0),
            num_pairs=measured.num_pairs,
            num_bytes=measured.num_bytes,
            num_parameters=sum(p.numel() for p in subject.model.parameters()),
            metric=score.value,
            lost=value,
            lost_range=interval,
            seconds=perf_counter() - began,
            told=subject.told,
        )
        said = [*self._said(subject, composition)]
        return Tried(
            point=point,
            offers=tuple(one for one in said if isinstance(one, Offer)),
            where=where() if not composition else Where(),
            refused=tuple(Untried(name=one.lever, because=one.because) for one in said if isinstance(one, Refusal)),
        )

    def _trained(self, composition: Composition, seconds: float) -> tuple[Subject, Measured, Score]:
        """Its steps timed beside the given model's, on copies; then trained for as many steps, on another, and judged."""
        timed, beside, subject = self._copy(composition), self._copy(()), self._copy(composition)
        measured = of_steps(Training(timed), Training(beside), seconds=seconds)
        Training(subject).run(num_steps(subject.purpose))
        return subject, measured, score_of(subject)

    def _copy(self, composition: Composition) -> Subject:
        """The composition on weights of its own."""
        given = Subject.of(copied(self._given.model), self._given.purpose)
        return self._under(composition, given)

    def _under(self, composition: Composition, start: Subject) -> Subject:
        for offer in composition:
            start = self._reduction(offer).apply(start, offer.parameters)
        return start

    def _planned(self, offer: Offer) -> PlannedLever:
        lever = self._levers[offer.lever]
        return PlannedLever(id=lever.id, guarantee=lever.guarantee, parameters=offer.parameters, because=offer.because)

    def _said(self, subject: Subject, composition: Composition) -> Iterator[Offer | Refusal]:
        """What levers of later kinds than those that are there say to the subject."""
        last = max((KINDS.index(self._reduction(offer).kind) for offer in composition), default=-1)
        for lever in self._levers.values():
            assert lever.reduction is not None
            kind = lever.reduction.kind
            if KINDS.index(kind) > last and (kind == "training") == (self._objective == "train-cost"):
                yield from lever.reduction.offers(subject)

    def _reduction(self, offer: Offer) -> Reduction:
        reduction = self._levers[offer.lever].reduction
        assert reduction is not None
        return reduction


def num_steps(purpose: Purpose) -> int:
    """As told, else one pass over the batches."""
    assert purpose.batches is not None
    return purpose.num_steps or sum(1 for _ in purpose.batches())


def where() -> Where:
    """This process's machine."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return Where(
        processor=cpu_model(), device=device, torch=str(torch.__version__), num_threads=torch.get_num_threads()
    )
