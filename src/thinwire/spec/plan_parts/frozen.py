"""How parameters that are not trained are kept."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import Field

from thinwire.spec.base import Problem, Spec, rule
from thinwire.spec.codec import CodecSpec


class Frozen(Spec):
    """How the parameters are kept that are frozen when the model is sharded."""

    storage: CodecSpec = Field(
        default=CodecSpec(),
        description="frozen matrices live, and are gathered, as blocks of this codec, and each gather decodes them: "
        "intN:BLOCK, also with hadamard; none: as they are",
    )

    @rule("storage")
    def _blocks_are_independent(self) -> Iterator[Problem]:
        """``storage`` is ``none`` or ``intN:BLOCK``, without ``stochastic``: every block is then encoded by itself,
        the same on every rank."""
        codec = self.storage
        if not codec.is_none and (codec.block is None or codec.needs_seed):
            yield Problem(
                "storage",
                f"= {str(codec)!r}: frozen parameters are kept in blocks of known size that round to nearest; valid "
                "are 'none', 'intN:BLOCK' and 'intN:BLOCK,hadamard', such as 'int8:256' or 'int4:64'",
            )
