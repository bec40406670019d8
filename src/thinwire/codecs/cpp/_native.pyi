"""The native module (csrc/bind.cpp).

Memory is passed as addresses and sizes: callers see to device, dtype, contiguity and lifetime. All functions
release the interpreter lock and use at most ``threads`` threads. Sizes that do not fit raise `ValueError`.
"""

from collections.abc import Sequence

def targets() -> list[str]:
    """Instruction sets that this CPU supports, the plainest first."""

def target() -> str:
    """The instruction set in use: the best one, or what ``THINWIRE_TARGET`` names."""

def use_target(name: str) -> None:
    """Use another instruction set, in every thread, from now on; for tests and benchmarks."""

# dtype: its place in DTYPES of thinwire.spec.codec: 0 is float32, 1 is bfloat16, 2 is float16.

class Codec:
    """A codec of fixed length (csrc/codec.hpp)."""

    def __init__(self, name: str, parameters: Sequence[int]) -> None:
        """Make a codec.

        Args:
            name: of a file of csrc/codecs.
            parameters: that file's; a ``Family`` of :mod:`thinwire.spec.codec` gives them.

        Raises:
            ValueError: if no such codec has messages of fixed length, or the parameters are not valid.
        """

    def wire_bytes(self, numel: int) -> int: ...
    def encode(
        self, x_address: int, dtype: int, numel: int, wire_address: int, wire_bytes: int, seed: int, threads: int
    ) -> None: ...
    def encode_feedback(
        self,
        x_address: int,
        dtype: int,
        numel: int,
        lost_address: int,
        gain: float,
        wire_address: int,
        wire_bytes: int,
        seed: int,
        threads: int,
    ) -> None: ...
    def decode(
        self, wire_address: int, wire_bytes: int, numel: int, out_address: int, dtype: int, add: bool, threads: int
    ) -> None: ...
    def decode_sum(
        self,
        wires_address: int,
        count: int,
        stride: int,
        numel: int,
        onto_address: int,
        onto_dtype: int,
        factor: float,
        out_address: int,
        dtype: int,
        threads: int,
    ) -> None: ...
    def decode_sum_encode(
        self,
        wires_address: int,
        count: int,
        stride: int,
        numel: int,
        onto_address: int,
        onto_dtype: int,
        factor: float,
        to: Codec,
        wire_address: int,
        wire_bytes: int,
        seed: int,
        threads: int,
    ) -> None: ...

class Lossless:
    """A lossless codec of variable length (csrc/codec_kinds.hpp).

    The encoder needs room for the largest message and returns how many bytes this one has. The decoder takes the
    message, with other bytes after it if need be, and raises ``ValueError`` unless it is well formed.
    """

    def __init__(self, name: str, parameters: Sequence[int]) -> None: ...
    def encode(self, x_address: int, dtype: int, numel: int, wire_address: int, capacity: int, threads: int) -> int: ...
    def decode(
        self,
        wire_address: int,
        wire_bytes: int,
        numel: int,
        encoded: int,
        out_address: int,
        dtype: int,
        add: bool,
        threads: int,
    ) -> None: ...

# Deltas (csrc/delta.hpp). dtype: its number in NUMBERS of thinwire.codecs.delta; a block has 2^log values.

def delta_bytes(dtype: int, numel: int, log: int) -> int:
    """The largest message."""

def encode_delta(
    dtype: int,
    old_address: int,
    new_address: int,
    numel: int,
    log: int,
    wire_address: int,
    capacity: int,
    threads: int,
) -> int:
    """Needs room for the largest message and returns how many bytes this one has."""

def apply_delta(
    dtype: int, old_address: int, numel: int, wire_address: int, wire_bytes: int, out_address: int, threads: int
) -> None:
    """Takes the message, with other bytes after it if need be; ``out`` overlaps nothing."""
