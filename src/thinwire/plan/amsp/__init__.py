"""AMSP's own objective (arXiv 2311.00257): its sums, an exact search for their optimum, and how that differs."""
