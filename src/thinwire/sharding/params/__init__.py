"""Parameters of a unit: sharded, gathered, and freed again."""
