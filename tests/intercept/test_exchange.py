"""torch's all-to-all on a compressed axis: uneven pieces, each encoded by itself, forward and backward."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from thinwire import intercept
from thinwire.collectives import group
from thinwire.collectives.job.torch_groups import exchange_counts, exchange_rows
from thinwire.testing import run_ranks

pytestmark = pytest.mark.ranks

WIDTH = 128
ROWS = torch.tensor([[3, 40, 0], [64, 2, 9], [0, 0, 17]])
"""Rows from each rank to each other: none, a few, and many, so that some messages are too small to be encoded."""


def exchange(codec: str) -> tuple[float, float, int, int, str]:
    rank = group.control().rank
    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("ep",))
    compressed = intercept.compress_axis(mesh, "ep", codec)
    sent, received = ROWS[rank].tolist(), ROWS[:, rank].tolist()
    everyone = [
        torch.randn(int(ROWS[source].sum()), WIDTH, generator=torch.Generator().manual_seed(source))
        for source in range(3)
    ]
    rows = everyone[rank].clone().requires_grad_()
    with intercept.step_scope():
        counts = exchange_counts(ROWS[rank].view(3, 1), mesh.get_group("ep"))
        assert counts.flatten().tolist() == received
        arrived = exchange_rows(rows, received, sent, mesh.get_group("ep"))
        expected = torch.cat([part.split(ROWS[source].tolist())[rank] for source, part in enumerate(everyone)])
        (arrived * arrived.detach()).sum().backward()
    assert rows.grad is not None
    error, back = float((arrived - expected).norm()), float((rows.grad - rows.detach()).norm())
    own = slice(sum(received[:rank]), sum(received[: rank + 1]))
    torch.testing.assert_close(arrived[own], expected[own], rtol=0, atol=0)
    traffic = compressed.traffic()
    coded = [row for row in traffic.rows if row.codec == codec and codec != "none"]
    return error / float(expected.norm()), back / float(rows.norm()), traffic.sent, traffic.plain, str(coded)


@pytest.mark.parametrize(
    ("codec", "bound"), [("none", 0.0), ("int8:256", 0.01), ("int4:256,stochastic", 0.2), ("mpc", 0.0)]
)
def test_every_piece_arrives_and_its_gradient_returns(codec: str, bound: float) -> None:
    results = run_ranks(3, exchange, codec)
    for rank, (error, back, sent, plain, coded) in enumerate(results):
        assert error <= bound
        assert back <= 2 * bound
        others = int(ROWS[rank].sum() - ROWS[rank, rank] + ROWS[:, rank].sum() - ROWS[rank, rank])
        assert plain == others * WIDTH * 4 + 2 * 8  # forward and backward, and the counts
        assert sent == plain if codec == "none" else sent < plain or not others
        assert bool(coded != "[]") == (codec != "none")
