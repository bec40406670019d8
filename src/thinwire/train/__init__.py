"""The trainer: trains a model on text, and writes metrics and checkpoints.

All communication between ranks goes through :mod:`thinwire.sharding` and :mod:`thinwire.collectives`.
"""
