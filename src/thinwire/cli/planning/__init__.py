"""``thinwire plan``, ``sim`` and ``memory``: choosing and pricing plans."""
