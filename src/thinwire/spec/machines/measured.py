"""What files of measurements have in common: those of ``thinwire profile`` and ``thinwire kernels``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import ClassVar, Literal, Self

from pydantic import Field

from thinwire.errors import SpecError
from thinwire.spec.base import Positive, Spec


class Timing(Spec):
    """A measured duration: the median and the quartiles around it."""

    seconds: Positive = Field(description="median seconds")
    low: Positive = Field(description="lower quartile, in seconds")
    high: Positive = Field(description="upper quartile, in seconds")

    def scaled(self, factor: float) -> Self:
        """The same work, ``factor`` times as long."""
        return self.with_(seconds=self.seconds * factor, low=self.low * factor, high=self.high * factor)


class JsonSpec(Spec):
    """A specification with a JSON file of its own."""

    what: ClassVar[str]
    """What such a file holds, for messages."""

    made_by: ClassVar[str]
    """The command that makes such a file, up to its name."""

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """Read a file.

        Raises:
            SpecError: The file cannot be read, is not JSON, or is none of these files.
        """
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise SpecError(
                str(path), f"cannot be read as {cls.what}: {error}; {cls.made_by} {path} makes it"
            ) from error
        if not isinstance(data, dict):
            raise SpecError(str(path), f"it should be a JSON object, as {cls.made_by} writes it")
        return cls.parse(data, str(path))

    def write(self, path: str | Path) -> None:
        """Write :meth:`to_json` to ``path``."""
        Path(path).write_text(self.to_json(), encoding="utf-8")

    def to_json(self) -> str:
        """JSON text, one row of a table per line."""
        lines = []
        for key, value in self.to_dict().items():
            if isinstance(value, list) and value:
                rows = ",\n".join(f"    {json.dumps(row)}" for row in value)
                lines.append(f'  "{key}": [\n{rows}\n  ]')
            else:
                lines.append(f'  "{key}": {json.dumps(value)}')
        return "{\n" + ",\n".join(lines) + "\n}\n"


class Measured(JsonSpec):
    """What was measured, and with what."""

    version: Literal[1] = Field(default=1, description="version of this file format")
    device: str = Field(description="name of the accelerator or the processor")
    torch: str = Field(description="PyTorch version")
