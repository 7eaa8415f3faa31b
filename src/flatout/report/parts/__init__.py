"""The parts of reports: each module builds the blocks of one from records."""
