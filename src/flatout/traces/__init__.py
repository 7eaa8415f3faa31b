"""What a profiler recorded, event by event, turned into facts: for traces made elsewhere and for the step watched here."""
