"""Clusters: their nodes, links and switches, and what was measured of them."""
