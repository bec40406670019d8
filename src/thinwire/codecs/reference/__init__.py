"""The codecs in plain torch: what the wire format means, and what the other backends are compared with."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from thinwire.spec.codec import FAMILIES

if TYPE_CHECKING:
    from thinwire.codecs.codec import Codec
    from thinwire.spec import CodecSpec

__all__ = ["make"]


def make(spec: CodecSpec) -> Codec:
    """The codec of a spec: ``make`` of the file that its family names."""
    codec: Codec = importlib.import_module(f"{__name__}.{FAMILIES[spec.family].module}").make(spec)
    return codec
