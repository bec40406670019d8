"""``thinwire bench`` and ``thinwire reproduce``."""
