"""Checkpoints of sharded models."""
