"""Exit codes of the command line: one meaning for each number, whatever the verb (docs/exit-codes.md)."""

from __future__ import annotations

from typing import Final

DONE: Final = 0
"""It did what was asked; where it was a question, the answer is yes."""
NEGATIVE: Final = 1
"""It did what was asked, and the answer is no: different, slower, does not fit."""
REFUSED_INPUT: Final = 2
"""It could not do what was asked, and one line on standard error says what to change; nothing was decided."""
UNDECIDED: Final = 3
"""It did what it could, and there is no answer: neither yes nor no."""
PARTLY_DONE: Final = 4
"""It did a part of what was asked, and names the rest."""
ENDED_ON_REQUEST: Final = 75
"""It was asked to end, and its state is saved: start it again (sysexits.h, EX_TEMPFAIL)."""
