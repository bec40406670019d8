"""Follows one weight of a small model through a training step on four CPU ranks.

    python examples/journey.py

The ranks form two logical nodes. The plan shards optimizer states inside a node and keeps parameters whole
(``zero1-node``). The script prints every stage as rank 0 sees it, and checks it: it computes each printed number a
second time without thinwire.
"""

from __future__ import annotations

import torch
from torch import nn

import thinwire as tw
from thinwire.agreement import Typed
from thinwire.collectives.group import control, recording
from thinwire.program import Axis, Lane, Scope, axis_members
from thinwire.sharding.api import runtime
from thinwire.testing import run_ranks

NODES, LOCAL = 2, 2


def journey() -> list[str]:
    """Run one training step and describe the stages of ``2.weight``.

    Returns:
        The description, one line per stage.
    """
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    before = net[2].weight.detach().clone()
    plan = tw.Plan.preset("zero1-node", nodes=NODES, local=LOCAL, compute_dtype="float32", bucket_bytes=1)
    story = [f"plan       {plan.describe()}"]

    model = tw.shard(net, plan)
    optim = tw.optimizer(model, torch.optim.SGD, lr=0.1)
    engine = runtime(model)
    unit = next(unit for unit in engine.units if unit.name == "2")
    buffer = unit.buffers[0]
    slot = buffer.layout.slot_by_name["2.weight"]
    story.append(
        f"layout     2.weight {tuple(slot.shape)} is elements {slot.offset}..{slot.offset + slot.numel} of unit "
        f"'{unit.name}': {sum(slot.numel for slot in buffer.layout.slots)} elements, padded to {buffer.layout.numel}"
    )
    for owned in optim.fragments:
        if owned.fragment.slot.name == "2.weight":
            first = owned.fragment.offset
            story.append(
                f"ownership  rank {engine.sharded.rank} updates elements {first}..{first + owned.fragment.length} of it"
            )

    rank = control().rank
    inputs = torch.randn(6, 8, generator=torch.Generator().manual_seed(rank))
    with recording() as records:
        model(inputs).square().mean().backward()
        engine.close_step(measure=True)  # waits until every gradient is reduced
        gradient = engine.sharded.gradients[unit.index][0].owned.values.clone()
        optim.step()
        engine.join_spreads()
    where = {Scope.INSIDE: "inside the node", Scope.ACROSS: "across nodes"}
    story += [
        f"{record.lane:<10} {record.kind} {where[record.scope]}, ranks {list(record.ranks)}: {record.sent} bytes sent"
        for record in records
        if record.lane is not Lane.CONTROL
    ]

    # The same step by hand: the mean of all ranks' gradients, then plain SGD.
    reference = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    torch.manual_seed(0)
    for layer in (reference[0], reference[2]):
        layer.reset_parameters()
    for other in range(NODES * LOCAL):
        batch = torch.randn(6, 8, generator=torch.Generator().manual_seed(other))
        (reference(batch).square().mean() / (NODES * LOCAL)).backward()
    expected = reference[2].weight.grad
    assert expected is not None
    mine = next(o for o in optim.fragments if o.fragment.slot.name == "2.weight").fragment
    piece = gradient[mine.position : mine.position + mine.length]
    torch.testing.assert_close(piece, expected.view(-1)[mine.offset : mine.offset + mine.length])
    story.append(f"gradient   mean over {NODES * LOCAL} ranks, fp32, first elements {_numbers(piece)}")

    with tw.full_parameters(model):
        after = model[2].weight.detach().clone()  # the tensor that the module computes with
    torch.testing.assert_close(after, before - 0.1 * expected)
    story.append(f"updated    2.weight[0] was {_numbers(before[0])}, is {_numbers(after[0])} on every rank")
    neighbours = axis_members(plan, Axis.SHARD, rank)
    story.append(f"replicas   the share of rank {rank} is spread to ranks {list(neighbours.inside)} of its node")
    rows: Typed[list[list[float]]] = Typed(list[list[float]])
    everyone = control().all_gather_typed(after.tolist(), rows)
    assert all(weights == everyone[0] for weights in everyone)
    return story


def _numbers(tensor: torch.Tensor) -> str:
    return "[" + ", ".join(f"{value:.4f}" for value in tensor.flatten()[:3].tolist()) + ", ...]"


if __name__ == "__main__":
    print("\n".join(run_ranks(NODES * LOCAL, journey)[0]))
