"""What helps: one lever a file, shelved by the taxonomy of efficient compute. Only pulling a lever imports torch."""
