"""Collectives over the mesh: they know ranks and bytes, nothing of modules."""
