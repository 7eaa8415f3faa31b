"""Several ranks: collectives, replication, stalls."""
