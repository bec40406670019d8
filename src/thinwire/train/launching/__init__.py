"""Starts, stops and restarts the ranks of a run, and checks that they agree."""
