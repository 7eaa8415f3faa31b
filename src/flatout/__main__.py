"""`python -m flatout` is the command `flatout`."""

from flatout.app.cli import main

if __name__ == "__main__":
    main()
