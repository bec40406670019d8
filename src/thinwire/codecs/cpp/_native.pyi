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

def zfp_encode(
    x_address: int, dtype: int, numel: int, maxbits: int, wire_address: int, wire_bytes: int, threads: int
) -> None: ...
def zfp_decode(
    wire_address: int,
    wire_bytes: int,
    numel: int,
    maxbits: int,
    out_address: int,
    dtype: int,
    add: bool,
    threads: int,
) -> None: ...
