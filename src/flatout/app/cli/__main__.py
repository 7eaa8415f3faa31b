"""`python -m flatout.app.cli`: what the `flatout` command runs, for launchers that want a module."""

from __future__ import annotations

from flatout.app.cli import main

if __name__ == "__main__":
    main()
