"""Exchanges of islands: what they agreed on last, the change since then, and the outer optimizer."""
