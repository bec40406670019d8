"""Faults on purpose: real runs of ``thinwire train`` that are killed, stopped, cut off, filled up and damaged."""
