"""Communication in parallel with computation: queues of collectives, and a journal of their actions."""
