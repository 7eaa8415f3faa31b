"""The command line: one thin file a command, each parses, calls a verb, and prints."""

from __future__ import annotations


def main() -> None:
    """Entry point of the `flatout` command."""
    from flatout.app.cli.app import run

    run()
