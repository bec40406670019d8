"""Starting, stopping and restarting the ranks of a run, and what they must have in common."""
