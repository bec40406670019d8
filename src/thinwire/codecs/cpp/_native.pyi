"""The native module (csrc/bind*.cpp).

Memory is passed as addresses and sizes: callers see to device, dtype, contiguity and lifetime. All functions
release the interpreter lock and use at most ``threads`` threads. Sizes that do not fit raise `ValueError`.
"""

def targets() -> list[str]:
    """Instruction sets that this CPU supports, the plainest first."""

def target() -> str:
    """The instruction set in use: the best one, or what ``THINWIRE_CPU_TARGET`` names."""

def use_target(name: str) -> None:
    """Use another instruction set, in every thread, from now on; for tests and benchmarks."""

# dtype: 0 is float32, 1 is bfloat16, 2 is float16.

class Codec:
    """A codec of fixed length (csrc/codec.hpp)."""

    @staticmethod
    def cast(to: int) -> Codec: ...
    @staticmethod
    def block(bits: int, block: int, search: bool, hadamard: bool, stochastic: bool) -> Codec: ...
    @staticmethod
    def zfp(block_bits: int) -> Codec: ...
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
        factor: float,
        to: Codec,
        wire_address: int,
        wire_bytes: int,
        seed: int,
        threads: int,
    ) -> None: ...

# Codecs of variable length. An encoder needs room for the largest message and returns how many bytes this one has; a
# decoder takes the message, with other bytes after it if need be, and raises ValueError unless it is well formed.

def exp3_encode(x_address: int, numel: int, wire_address: int, capacity: int, threads: int) -> int: ...
def exp3_decode(
    wire_address: int, wire_bytes: int, numel: int, out_address: int, dtype: int, add: bool, threads: int
) -> None: ...
def mpc_encode(x_address: int, nbytes: int, wire_address: int, capacity: int, threads: int) -> int: ...
def mpc_decode(
    wire_address: int,
    wire_bytes: int,
    numel: int,
    encoded: int,
    out_address: int,
    dtype: int,
    add: bool,
    threads: int,
) -> None: ...
