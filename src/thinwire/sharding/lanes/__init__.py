"""Communication in parallel with computation: queues of collectives."""
