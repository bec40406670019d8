"""``thinwire doctor``: checking a host."""
