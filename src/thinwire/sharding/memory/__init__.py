"""Memory of parameters: flat buffers, shards, slices, initial values, and the detection of stray writes."""
