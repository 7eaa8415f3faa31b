"""What tuning found in Markdown, short enough for a pull request; what came from the script cannot become markup."""

from __future__ import annotations

from flatout.records.tuned import Tuned
from flatout.reporting.ladder import LEFT_OUT, UNFINISHED, circumstances, headline, rows
from flatout.reporting.markdown import plain


def ladder_markdown(tuned: Tuned) -> str:
    """Headline, the rungs as a table, and the levers that were left out, folded away."""
    blocks = [f"### flatout: {plain(headline(tuned))}"]
    if tuned.plan.lever:
        blocks.append(_table(tuned))
    if where := circumstances(tuned):
        blocks.append(plain(where))
    for title, is_for_script in ((LEFT_OUT, True), ("Not for this script", False)):
        others = [one for one in tuned.left_out if one.is_for_script is is_for_script]
        listed = "\n".join(f"- {plain(one.lever)}: {plain(one.because)}" for one in others)
        if others:
            blocks.append(f"<details><summary>{title}</summary>\n\n{listed}\n\n</details>")
    if not tuned.is_complete:
        blocks.append(UNFINISHED)
    return "\n\n".join(blocks) + "\n"


def _table(tuned: Tuned) -> str:
    lines = ["| lever | predicted | measured | step | memory | guarantee |", "|---|---|---|---|---|---|"]
    for row in rows(tuned):
        name = f"{row.name} ({row.where})" if row.where else row.name
        cells = (name, row.predicted, row.measured, row.step, row.memory, row.guarantee)
        lines.append("| " + " | ".join(map(plain, cells)) + " |")
    return "\n".join(lines)
