"""Runs that go on after the death of any of their ranks: who watches and starts them, and what they start again from."""
