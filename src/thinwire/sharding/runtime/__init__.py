"""Everything that one model needs while it trains, and its parameters between passes."""
