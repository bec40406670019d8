"""Plans with islands: which loss they cost by a law, and which of them is the fastest for a loss."""
