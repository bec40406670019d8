"""Compression policies by name: the hybrid schemes of arXiv 2409.02423 as codecs per collective.

Gradients across data-parallel ranks are close to low rank and take aggressive compression (rate B below);
parameters, activations and optimizer shards are dense and need precision (rate A).
``NAMES`` lists the policies; without numbers ``naive-zfp`` and ``mzhybrid`` mean rate 8 and ``zhybrid`` 24-8,
the published choices.
"""

from __future__ import annotations

from thinwire.errors import SpecError
from thinwire.spec.codec import CodecSpec

NAMES = ("naive-zfp", "naive-zfp:RATE", "naive-mpc", "mzhybrid", "mzhybrid:RATE", "zhybrid", "zhybrid:A-B")

_DENSE = ("gather", "spread", "tp", "pp")
_GRADIENTS = ("reduce_intra", "reduce_inter")


def policy_codecs(policy: str) -> dict[str, CodecSpec]:
    """The codec of every field of ``Wire`` under a policy.

    Raises:
        SpecError: if no policy has that name, or its rates are malformed.
    """
    name, _, rates = policy.partition(":")
    match name:
        case "naive-zfp":
            dense = gradients = f"zfp:{rates or 8}"
        case "naive-mpc" if not rates:
            dense = gradients = "mpc"
        case "mzhybrid":
            dense, gradients = "mpc", f"zfp:{rates or 8}"
        case "zhybrid":
            dense_rate, _, gradient_rate = (rates or "24-8").partition("-")
            dense, gradients = f"zfp:{dense_rate}", f"zfp:{gradient_rate}"
        case _:
            raise SpecError("policy", [f"{policy!r} is not a policy: valid are {', '.join(NAMES)}"])
    try:
        codecs = CodecSpec(dense), CodecSpec(gradients)
    except SpecError as error:
        raise SpecError("policy", [f"{policy!r} is not a policy: {error.problems[0]}"]) from None
    return dict.fromkeys(_DENSE, codecs[0]) | dict.fromkeys(_GRADIENTS, codecs[1])
