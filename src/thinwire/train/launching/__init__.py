"""What a run is when it starts: its decisions, and what the ranks agree on."""
