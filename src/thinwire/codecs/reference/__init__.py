"""The codecs in plain torch. They define the wire format and serve as reference for the other backends."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from thinwire.spec.codec import FAMILIES

if TYPE_CHECKING:
    from thinwire.codecs.codec import Codec
    from thinwire.spec import CodecSpec

__all__ = ["make"]


def make(spec: CodecSpec) -> Codec:
    """Make the codec of a spec by ``make`` of the module that its family names."""
    codec: Codec = importlib.import_module(f"{__name__}.{FAMILIES[spec.family].module}").make(spec)
    return codec
