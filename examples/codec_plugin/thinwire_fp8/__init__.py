"""fp8: a byte per value, as PyTorch's 8-bit floating point. What the planner knows; no torch is imported here."""

from thinwire.spec import CodecPlugin

FORMATS = ("e4m3", "e5m2")


def _format(parameters: str) -> str:
    if parameters not in FORMATS:
        raise ValueError(f"expected fp8:e4m3 (range 448) or fp8:e5m2 (range 57344), not {parameters!r}")
    return parameters


PLUGIN = CodecPlugin(
    name="fp8",
    version="1",
    implementation="thinwire_fp8.codec:Fp8Codec",
    canonical=_format,
    wire_bytes=lambda parameters, numel, itemsize: numel,
    examples=("fp8:e4m3", "fp8:e5m2"),
    max_error=0.125,  # two bits of mantissa: half a place is an eighth of the value
    bytes_per_second=1e9,
)
