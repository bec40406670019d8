"""Times of single kernels on one accelerator, as ``thinwire kernels`` measures them and anyone can share."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field

from thinwire.spec.base import Count, Depth
from thinwire.spec.machines.measured import Measured, Timing
from thinwire.spec.plan import Dtype


class KernelRow(Timing):
    """Time of one kernel of one shape, while nothing else runs."""

    kernel: Literal["matmul", "attention", "attention_backward", "elementwise", "update", "copy"] = Field(
        description="matmul: rows x depth times depth x columns; attention: causal, of `rows` tokens in sequences of "
        "`depth`, `columns` wide over all heads; elementwise: what lies between the products of blocks `columns` "
        "wide, counted as if it read and wrote `rows` values in all; update: AdamW on "
        "`rows` elements; copy: `rows` values from fp32 to the dtype"
    )
    rows: Count = Field(description="rows of the product, tokens, values or elements")
    columns: Count = Field(default=1, description="columns of the product, or width of all heads")
    depth: Count = Field(default=1, description="length of the sums, or tokens of a sequence")
    heads: Depth = Field(default=0, description="attention heads")


class KernelTable(Measured):
    """Times of kernels on one kind of accelerator."""

    what: ClassVar[str] = "times of kernels"
    made_by: ClassVar[str] = "thinwire kernels"
    former_keys: ClassVar[Mapping[str, str]] = {"threads": ""}

    host: str = Field(default="", description="digits that stand for the machine that measured; may be left out")
    dtype: Dtype = Field(description="dtype of the values")
    rows: tuple[KernelRow, ...] = Field(min_length=1, description="times of kernels by shape")


def this_host() -> str:
    """Digits that stand for this machine and say nothing else about it."""
    return hashlib.sha256(f"thinwire {platform.node()}".encode()).hexdigest()[:12]
