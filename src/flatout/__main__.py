"""`python -m flatout` is the command `flatout`."""

from flatout.cli import main

if __name__ == "__main__":
    main()
