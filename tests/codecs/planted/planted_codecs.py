"""Codecs that each break one rule of the contract, and one that breaks none (``good``)."""

from thinwire.spec import CodecPlugin


def plugin(name: str, **changes: object) -> CodecPlugin:
    declared = {
        "name": name,
        "version": "1",
        "implementation": f"planted_arithmetic:{name.title().replace('_', '')}",
        "wire_bytes": lambda parameters, numel, itemsize: 2 * numel,
        "examples": (name,),
        "max_error": 2.0**-8,
    }
    return CodecPlugin(**(declared | changes))


GOOD = plugin("good")
WRITES_OUTSIDE = plugin("writes_outside")
HAS_STATE = plugin("has_state")
LOSES_NAN = plugin("loses_nan")
WRONG_SIZE = plugin("wrong_size")
IMPRECISE = plugin("imprecise")
CHANGES_INPUT = plugin("changes_input")
WRONG_SUM = plugin("wrong_sum")
RAISES = plugin("raises")
NOT_LOSSLESS = plugin("not_lossless", lossless=True, max_error=None)
UNPRICED = plugin("unpriced", implementation="planted_arithmetic:Good")
SLOW = plugin("slow", implementation="planted_arithmetic:Good", bytes_per_second=1000.0)
MISSING = plugin("missing", implementation="planted_arithmetic:Nowhere")
NO_CODEC = plugin("no_codec", implementation="planted_arithmetic:torch")
NAMELESS = plugin("Name", version="", examples=(), max_error=None)
NOT_A_PLUGIN = "text"
MPC = plugin("mpc")
