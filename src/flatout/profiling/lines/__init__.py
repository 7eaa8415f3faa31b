"""Which line the interpreter is on, by samples."""
