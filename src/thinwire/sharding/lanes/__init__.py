"""Communication beside computation: queues of collectives, and a journal of what they did."""
