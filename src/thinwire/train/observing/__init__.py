"""Observation of a run: metrics, progress, memory and traces."""
