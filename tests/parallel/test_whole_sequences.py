"""Tensor parallelism without sequence parallelism: Megatron's all-reduces instead of their halves.

``test_model.py`` compares its training with that of one process.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.training.grids import LENGTH, VOCABULARY, batches, build, start, train, whole_parameters
from tests.support.training.grids import plan_for as grid_plan
from torch.distributed.tensor import DTensor

import thinwire as tw
from thinwire.cost import largest_memory
from thinwire.cost.rates import wire_bytes_per_value
from thinwire.spec import CodecSpec, ModelSpec
from thinwire.testing import run_ranks
from thinwire.train.models.common import cross_entropy

pytestmark = pytest.mark.ranks

SHAPE = ModelSpec(kind="gpt", vocab=VOCABULARY, hidden=32, layers=4, heads=4, ffn=48, seq=LENGTH)

SUMS = 2 * (2 * SHAPE.layers + 1)
"""In a forward: after the embedding, and twice in a block; in the backward: twice in a block, and before the head."""

SEQUENCES = 16


def plan_for(dp: int, tp: int, *, whole: bool = True, **fields: Any) -> tw.Plan:
    return grid_plan(dp, tp, 1, sequence_parallel=not whole, **fields)


def rank_counts(plan: tw.Plan) -> tuple[dict[tuple[str, str], tuple[int, int]], float]:
    """Calls and sent bytes of a step on the axis by operation and codec, and its loss."""
    model, optimizer = start("llama", plan)
    model.axis_traffic()
    losses, _ = train(model, optimizer, batches(plan, model.grid.data, sequences=SEQUENCES)[:1])
    return {(row.op, row.codec): (row.calls, row.sent) for row in model.axis_traffic()["tp"].rows}, losses[0]


@pytest.mark.parametrize("codec", ["none", "int8:256"])
def test_all_reduces_send_what_their_halves_do(codec: str) -> None:
    """As many bytes as the cost model counts, with and without a codec."""
    fields: dict[str, Any] = {"micro_batches": 1, "wire": {"tp": codec}}
    (whole, loss), (cut, same) = (
        run_ranks(2, rank_counts, plan_for(1, 2, whole=form, **fields))[0] for form in (True, False)
    )
    values = SEQUENCES * LENGTH * SHAPE.hidden
    half = round(values / 2 * wire_bytes_per_value(CodecSpec(codec), "float32"))
    assert cut["reduce_scatter", codec] == cut["all_gather", codec] == (SUMS, SUMS * half)
    assert not {op for op, _ in whole} & {"reduce_scatter", "all_gather"}
    losses_sums = 3, 3 * SEQUENCES * LENGTH * 4  # of the loss: a maximum, a sum, and the label's logit for each token
    if codec == "none":
        assert whole["all_reduce", codec] == (SUMS + losses_sums[0], 2 * SUMS * half + losses_sums[1])
    else:
        assert whole["all_reduce", codec] == (SUMS, 2 * SUMS * half)
        assert whole["all_reduce", "none"] == losses_sums
    assert loss == pytest.approx(same, rel=2e-6 if codec == "none" else 1e-3)


def rank_trains(plan: tw.Plan) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses, and the parameters that every tensor-parallel rank holds whole."""
    model, optimizer = start("llama", plan)
    losses, _ = train(model, optimizer, batches(plan, model.grid.data, sequences=SEQUENCES))
    return losses, {name: value for name, value in whole_parameters(model).items() if "norm" in name}


def test_codecs_keep_copies_alike_and_losses_near() -> None:
    """Norms see the same sums on all ranks, to the bit: nothing else keeps their copies together."""
    exact, _ = run_ranks(4, rank_trains, plan_for(2, 2))[0]
    wire = {"tp": "int8:256", "reduce_intra": "int8:256", "spread": "int8:256"}
    (losses, first), *others = run_ranks(4, rank_trains, plan_for(2, 2, wire=wire))
    assert losses != exact
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(exact), rtol=1e-3, atol=0)
    assert first
    for also, other in others:
        assert also == losses
        assert all(torch.equal(value, other[name]) for name, value in first.items())


def rank_keeps(plan: tw.Plan) -> int:
    """Bytes that the forward of a micro-batch keeps for the backward, without parameters."""
    model = tw.parallelize(build("gpt"), plan, loss=cross_entropy)
    parameters: set[int] = set()
    kept: dict[int, torch.Tensor] = {}

    def note(module: torch.nn.Module, _inputs: Any) -> None:
        for parameter in module._parameters.values():
            if isinstance(parameter, DTensor) or type(parameter) is torch.nn.Parameter:
                parameters.add(stored(parameter).data_ptr())

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_floating_point():
            kept[stored(tensor).data_ptr()] = tensor
        return tensor

    for module in model.chunks[0].modules():
        module.register_forward_pre_hook(note)
    (batch,) = batches(plan, 0, sequences=SEQUENCES)[0]
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.chunks[0](batch.input_ids)
    return sum(stored(tensor).nbytes() for address, tensor in kept.items() if address not in parameters)


def stored(tensor: torch.Tensor) -> torch.UntypedStorage:
    """The memory of a tensor, or of this rank's part of it."""
    while (inner := getattr(tensor, "_local_tensor", getattr(tensor, "elem", None))) is not None:
        tensor = inner
    return tensor.untyped_storage()


def test_activations_take_what_the_memory_model_says() -> None:
    predicted, measured = {}, {}
    for whole in (True, False):
        plan = plan_for(1, 2, whole=whole, micro_batches=1).with_(micro_batch=SEQUENCES)
        measured[whole] = run_ranks(2, rank_keeps, plan)[0]
        predicted[whole] = largest_memory(SHAPE, plan, seq=LENGTH, overhead=0).activations
        assert predicted[whole] == pytest.approx(measured[whole], rel=0.07)
    assert measured[False] < 0.95 * measured[True]
    assert predicted[False] < 0.9 * predicted[True]
