"""Helpers of small runs of the command line: a text that is the same everywhere, and a batch."""

from __future__ import annotations

import random
from pathlib import Path

BATCH = """\
seq = 16
global_batch = 8
tensorboard = false
"""
"""Keys of a recipe's ``[train]``: with plan.micro_batch = 2, one, two or four ranks do the
same step in a few milliseconds."""


DATA = """\
[data]
source = "text"
paths = ["text.txt"]
cache = "cache"
vocab = 300
"""
"""Table of a recipe: the text that :func:`write_text` writes beside it."""


def write_text(path: Path, *, words: int = 300, lines: int = 3000) -> None:
    """Write lines of made-up words, always the same ones."""
    chance = random.Random(0)
    known = ["".join(chance.choices("abcdefghij", k=chance.randint(2, 6))) for _ in range(words)]
    path.write_text("\n".join(" ".join(chance.choices(known, k=12)) for _ in range(lines)), encoding="utf-8")
