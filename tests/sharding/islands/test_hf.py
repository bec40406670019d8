"""Islands of Hugging Face models, whole or with adapters on frozen weights."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from tests.support.training.edge import TOLERANCE, gap, whole
from tests.support.training.hf import batches, prepare

import thinwire as tw
from thinwire.testing import run_ranks

pytestmark = pytest.mark.ranks

MEANS = {"count": 2, "every": 1, "outer": {"name": "sgd", "lr": 1.0, "momentum": 0.0}}


def check(kind: str, preset: str, *, adapted: bool) -> None:
    """With an exchange of means after every step of SGD, islands train like one process."""
    plan = tw.Plan.preset(preset, nodes=1, local=2, compute_dtype="float32").with_(islands=MEANS)
    rank, reference = dist.get_rank(), prepare(kind, adapted=adapted, reentrant=None)
    model = tw.shard(prepare(kind, adapted=adapted, reentrant=None), plan)
    frozen = [p.detach().clone() for p in reference.parameters() if not p.requires_grad]
    optim = tw.optimizer(model, torch.optim.SGD, lr=0.1)
    plain = torch.optim.SGD([p for p in reference.parameters() if p.requires_grad], lr=0.1)
    for step in range(3):
        parts = batches(step, plan.data_ranks)
        model(input_ids=parts[rank], labels=parts[rank]).loss.backward()
        optim.step()
        optim.zero_grad()
        for part in parts:
            (reference(input_ids=part, labels=part).loss / len(parts)).backward()
        plain.step()
        plain.zero_grad()
    assert bool(frozen) is adapted
    assert gap(whole(model), list(reference.parameters())) <= TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "preset", "adapted"), [("llama-tied", "zero1", False), ("llama", "zero3", True)])
def test_whole_models_and_adapters(kind: str, preset: str, adapted: bool) -> None:
    run_ranks(4, partial(check, kind, preset, adapted=adapted))
