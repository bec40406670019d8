"""The compression policies that several tests go through."""

from __future__ import annotations

STUDIED = (
    "none", "naive-zfp:8", "naive-zfp:16", "naive-mpc", "mzhybrid:8", "mzhybrid:16", "zhybrid:16-8", "zhybrid:24-8",
    "hybrid",
)  # fmt: skip
"""No codec, the published policies at the paper's rates, and ``hybrid``."""
