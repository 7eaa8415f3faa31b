"""Write the pages docs/rules/*.md: one page a rule, made from the docstring of the rule's module, and an index.

python docs/generate_rules.py            writes the pages and removes those of rules that are gone
python docs/generate_rules.py --check    writes nothing; exits with 1 and names the pages that are out of date
"""

from __future__ import annotations

import argparse
import importlib
import re
import sys
from collections.abc import Iterable, Mapping
from inspect import cleandoc
from itertools import groupby
from pathlib import Path

from flatout.core import registry
from flatout.core.records.finding import Rule

FOLDER = Path(__file__).parent / "rules"
PAIRS = Path(__file__).parent / "pairs"
"""One file for each rule and each lever: the code before and after, below the comments `# Before` and `# After`."""

# A section of a rule's docstring starts at the margin, with its name and two or more spaces: "Costs        The host".
SECTION = re.compile(r"^(?P<name>[A-Z][\w -]*?) {2,}(?P<text>\S.*)$")


def plain(text: str) -> str:
    r"""`text` so that Markdown shows it as it stands; what is between backquotes is left alone.

    >>> print(plain("calls __getitem__ of `a_b` 2 * n times"))
    calls \_\_getitem\_\_ of `a_b` 2 \* n times
    """
    pieces = re.split(r"(`[^`]*`)", text)
    return "".join(p if p.startswith("`") else re.sub(r"([\\*_<\[\]])", r"\\\1", p) for p in pieces)


def markdown(docstring: str) -> str:
    """The body of a page: the docstring's first line, its prose, and its sections as a definition list.

    >>> print(markdown('''The host waits.
    ...
    ... Costs      Launch latency is exposed,
    ...            once per wait.
    ... Levers     graph.defer-host-read
    ... '''))
    The host waits.
    <BLANKLINE>
    Costs
    :   Launch latency is exposed,
        once per wait.
    <BLANKLINE>
    Levers
    :   graph.defer-host-read
    """
    lines: list[str] = []
    is_in_section = False
    for line in cleandoc(docstring).splitlines():
        if section := SECTION.match(line):
            if lines and lines[-1]:
                lines.append("")
            lines += [section["name"], f":   {plain(section['text'])}"]
            is_in_section = True
        elif is_in_section and line.startswith(" "):
            lines.append(f"    {plain(line.strip())}")
        else:
            if line:
                is_in_section = False
            lines.append(plain(line))
    return "\n".join(lines)


def pair(kind: str, name: str) -> str:
    """The code before and after as sections of a page."""
    path = PAIRS / kind / f"{name}.py"
    if not path.exists():
        raise SystemExit(f"docs/pairs/{kind}/{name}.py is missing; write what the code looks like before and after")
    before, separator, after = path.read_text(encoding="utf-8").removeprefix("# Before\n").partition("\n# After\n")
    if not (before.strip() and separator and after.strip()):
        raise SystemExit(f"{path} lacks code below '# Before' or below '# After'")
    return f"## Before\n\n```python\n{before.strip()}\n```\n\n## After\n\n```python\n{after.strip()}\n```"


def links_to_levers(rule: Rule) -> str:
    """The levers that mend what the rule finds."""
    known = {lever.id for lever in registry.levers()}
    names = ", ".join(f"[`{one}`](../levers/{one}.md)" for one in rule.levers if one in known)
    if not names:
        return "No lever makes this change: edit the line."
    return f"`flatout tune` tries {names}."


def page(rule: Rule) -> str:
    """The page of one rule."""
    docstring = importlib.import_module(rule.module).__doc__
    if not docstring:
        raise SystemExit(f"{rule.module} has no docstring, so '{rule.id}' has no page; write one as docs/how-to says")
    path = f"src/{rule.module.replace('.', '/')}.py"
    blocks = [
        f"# {plain(rule.title)}",
        f"Rule `{rule.id}`, in `{path}`.",
        markdown(docstring),
        links_to_levers(rule),
        pair("rules", rule.id),
    ]
    return "\n\n".join(filter(None, blocks)) + "\n"


def index(rules: Iterable[Rule]) -> str:
    """The list of all rules, bottleneck by bottleneck."""
    lines = ["# Rules", "", "What flatout looks for, by bottleneck. Each page is the docstring of the rule's module."]
    for bottleneck, members in groupby(
        sorted(rules, key=lambda rule: rule.id), key=lambda rule: rule.id.partition(".")[0]
    ):
        lines += ["", f"## {bottleneck}", ""]
        lines += [f"- [`{rule.id}`]({rule.id}.md): {plain(rule.title)}" for rule in members]
    return "\n".join(lines) + "\n"


def written(folder: Path, wanted: Mapping[str, str], *, description: str) -> int:
    """Make the folder hold these pages and no others, or with --check name what is out of date; the exit code."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 when a page is out of date")
    is_check = parser.parse_args().check
    present = {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.md")}
    stale = sorted(name for name in wanted.keys() | present.keys() if wanted.get(name) != present.get(name))
    if is_check:
        for name in stale:
            sys.stdout.write(f"docs/{folder.name}/{name} is out of date; run 'make docs' and commit it\n")
        return 1 if stale else 0
    folder.mkdir(exist_ok=True)
    for name in stale:
        if name in wanted:
            (folder / name).write_text(wanted[name], encoding="utf-8")
        else:
            (folder / name).unlink()
    return 0


def main() -> int:
    rules = registry.rules()
    wanted = {"index.md": index(rules)} | {f"{rule.id}.md": page(rule) for rule in rules}
    return written(FOLDER, wanted, description="Write docs/rules/*.md from the rules' docstrings.")


if __name__ == "__main__":
    sys.exit(main())
