"""One meaning for one exit code, in the code and on its page."""

from __future__ import annotations

import re
from pathlib import Path

from flatout.core import exit_codes
from flatout.core.records.verdict import EXIT_CODES

ROOT = Path(__file__).parents[2]


def test_the_page_has_every_code_once() -> None:
    codes = sorted(value for name, value in vars(exit_codes).items() if name.isupper())
    on_page = re.findall(r"^\| (\d+) \|", (ROOT / "docs" / "exit-codes.md").read_text(), re.MULTILINE)
    assert [int(code) for code in on_page] == codes == [*range(5), 75]


def test_no_verdict_ends_as_a_mistake_in_the_call_does() -> None:
    assert EXIT_CODES["proved"] == exit_codes.DONE
    assert EXIT_CODES["unknown"] == exit_codes.UNDECIDED
    assert exit_codes.REFUSED_INPUT not in EXIT_CODES.values()
