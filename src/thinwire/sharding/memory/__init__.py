"""How parameters lie in memory: flat buffers, shards, slices, and the values that they begin with."""
