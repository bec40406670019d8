"""Handles the user's modules: chooses units, casts inputs, recomputes activations, and widens norms."""
