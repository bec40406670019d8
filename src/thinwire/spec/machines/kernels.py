"""Times of single kernels on one accelerator, as ``thinwire kernels`` measures them and anyone can share."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field

from thinwire.errors import SpecError
from thinwire.spec.base import Count, Depth
from thinwire.spec.machines.measured import Measured, Timing
from thinwire.spec.plan import Dtype

__all__ = ["KernelRow", "KernelTable", "this_host"]


class KernelRow(Timing):
    """Time of one kernel of one shape, while nothing else runs."""

    kernel: Literal["matmul", "attention", "attention_backward", "elementwise", "update", "copy"] = Field(
        description="matmul: rows x depth times depth x columns; attention: causal, of `rows` tokens in sequences of "
        "`depth`, `columns` wide over all heads; elementwise: reads and writes `rows` values in all; update: AdamW on "
        "`rows` elements; copy: `rows` values from fp32 to the dtype"
    )
    rows: Count = Field(description="rows of the product, tokens, values or elements")
    columns: Count = Field(default=1, description="columns of the product, or width of all heads")
    depth: Count = Field(default=1, description="length of the sums, or tokens of a sequence")
    heads: Depth = Field(default=0, description="attention heads")


class KernelTable(Measured):
    """Times of kernels on one kind of accelerator."""

    host: str = Field(default="", description="digits that stand for the machine that measured; may be left out")
    dtype: Dtype = Field(description="dtype of the values")
    threads: Depth = Field(default=0, description="threads of a processor; 0 for accelerators")
    rows: tuple[KernelRow, ...] = Field(min_length=1, description="times of kernels by shape")

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """Read a table.

        Raises:
            SpecError: The file cannot be read, is not JSON, or is not a table of kernels.
        """
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
            what = f"cannot be read as times of kernels: {error}; make them with thinwire kernels {path}"
            raise SpecError(str(path), [what]) from error
        if not isinstance(data, Mapping):
            raise SpecError(str(path), ["it should be a JSON object, as thinwire kernels writes it"])
        return cls.parse(data, str(path))

    def write(self, path: str | Path) -> None:
        """Write the table as JSON, one row per line."""
        table: dict[str, Any] = self.to_dict()
        rows = ",\n".join(f"    {json.dumps(row)}" for row in table.pop("rows"))
        head = ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in table.items())
        Path(path).write_text(f'{{\n{head},\n  "rows": [\n{rows}\n  ]\n}}\n', encoding="utf-8")


def this_host() -> str:
    """Digits that stand for this machine and say nothing else about it."""
    return hashlib.sha256(f"thinwire {platform.node()}".encode()).hexdigest()[:12]
