"""What a user types: the command line, the verbs in Python, the pytest plugin."""
