"""The command line: one thin file a command, each parses, calls a verb, and prints."""

from __future__ import annotations


def main() -> None:
    """Entry point of the `flatout` command."""
    import sys

    from flatout.app.cli.plain_run import planned_words

    words = planned_words(sys.argv[1:])
    if words is not None:
        from flatout.app.cli.children import planned_run

        sys.argv[1:] = words
        planned_run.run()
    from flatout.app.cli.app import run

    run()
