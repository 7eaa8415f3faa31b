"""What hurts: one bad pattern a file, shelved by bottleneck. Rules are pure functions of Evidence."""
