"""Reading and changing the syntax of the user's files: places, names, loops, calls, purity. Levers build their edits of it."""
