"""``thinwire profile``, ``kernels`` and ``topology``: measuring a machine."""
