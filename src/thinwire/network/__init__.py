"""Where hosts stand in the network: their leaf switches, found by timing pairs of hosts or read, and the order of ranks
that keeps heavy axes below a leaf."""
