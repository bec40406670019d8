"""What holds for every test."""

from __future__ import annotations

import os

# torch asks the name server for the name of 127.0.0.1 each time a rank connects to its job's store. Where a question is
# lost on the way now and then, the five seconds until the next would be a good part of the suite's time.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:2")
