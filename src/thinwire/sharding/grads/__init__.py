"""Gradients of a unit, and the pieces of parameters that a rank updates."""
