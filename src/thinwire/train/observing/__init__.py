"""What a run measures of itself and shows: metrics, progress, memory, traces."""
