"""The trainer: real text in, a trained model, its metrics and its checkpoints out.

It stands on :mod:`thinwire.shard` for everything that touches other ranks and never calls a collective
itself.
"""
