"""The line that the interpreter is on, sampled."""
