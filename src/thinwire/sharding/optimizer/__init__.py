"""Optimizers over this rank's part of the masters."""
