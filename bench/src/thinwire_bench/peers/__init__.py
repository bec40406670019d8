"""Thinwire and its peers as systems that train the same model on the same data, for benchmarks."""
