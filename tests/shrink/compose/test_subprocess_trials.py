from __future__ import annotations

import sys

from flatout.core.records.reduction import Option
from flatout.core.records.shrink import Order
from flatout.shrink.compose.subprocess_trials import SubprocessTrials

OFFERS = (Option(reduction="a", name="a"),)


def trials_of(code: str, *, limit_s: float = 30.0) -> SubprocessTrials:
    return SubprocessTrials(Order(model="m:f", metric="m:g"), [sys.executable, "-c", code], limit_s=limit_s)


def test_an_answer_is_read() -> None:
    found = trials_of("import sys; open(sys.argv[2], 'w').write('{\"because\": \"no\"}')").tried(
        OFFERS, allowed_loss=0.5
    )
    assert found.because == "no"


def test_what_it_is_asked_is_in_its_order() -> None:
    code = "import sys, json; o = json.load(open(sys.argv[1])); "
    code += "w = [o['composition'][0]['name'], o['allowed_loss'], o['trial_s']]; "
    code += "json.dump({'because': repr(w)}, open(sys.argv[2], 'w'))"
    assert trials_of(code).tried(OFFERS, allowed_loss=0.5, times=3).because == "['a', 0.5, 9.0]"


def test_a_process_that_hangs_is_ended() -> None:
    assert (
        "more than 0 s" in trials_of("import time; time.sleep(60)", limit_s=0.3).tried(OFFERS, allowed_loss=0).because
    )


def test_a_process_that_crashes_is_told_with_its_signal_and_its_last_words() -> None:
    code = "import os, sys; print('out of luck', file=sys.stderr, flush=True); os.kill(os.getpid(), 11)"
    because = trials_of(code).tried(OFFERS, allowed_loss=0).because
    assert "signal 11" in because
    assert "out of luck" in because


def test_half_an_answer_is_none() -> None:
    assert (
        "ended with 0"
        in trials_of("import sys; open(sys.argv[2], 'w').write('{')").tried(OFFERS, allowed_loss=0).because
    )
