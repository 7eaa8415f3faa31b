"""What a profiler recorded, event by event, turned into facts: for traces recorded elsewhere and for the step watched here."""
