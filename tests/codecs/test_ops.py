"""The operators agree with the codecs, pass torch's own checks, and trace."""

from __future__ import annotations

import pytest
import torch

from thinwire import codecs
from thinwire.codecs import ops


@pytest.mark.parametrize(("name", "dtype"), [("int4:256", torch.float32), ("exp3", torch.bfloat16)])
def test_operators_pass_torchs_checks(name: str, dtype: torch.dtype) -> None:
    x = torch.randn(300).to(dtype)
    wire = codecs.get(name).encode(x)
    torch.library.opcheck(ops.encode, (x, name))
    torch.library.opcheck(ops.decode, (wire, 300, dtype, name))
    torch.library.opcheck(ops.decode_add, (wire, torch.zeros(300), name))


@pytest.mark.slow
def test_a_compiled_function_encodes_and_decodes_in_one_graph() -> None:
    codec = codecs.get("int8:256")

    @torch.compile(backend="aot_eager", fullgraph=True)
    def through_the_wire(x: torch.Tensor) -> torch.Tensor:
        wire = torch.ops.thinwire.encode(2 * x, "int8:256")
        total = torch.ones_like(x)
        torch.ops.thinwire.decode_add(wire, total, "int8:256")
        return total + torch.ops.thinwire.decode(wire, x.numel(), torch.float32, "int8:256")

    x = torch.randn(1000)
    value = codec.decode(codec.encode(2 * x), 1000, torch.float32)
    assert torch.equal(through_the_wire(x), torch.ones(1000) + value + value)
