"""What a run is when it starts: its decisions, requests to stop, and what the ranks agree on."""
