"""Silent data corruption: one bit of one rank is flipped, and the rank, the unit and the step are named."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from thinwire.errors import ReplicaError, UsageError
from thinwire.parallel import ParallelModel, ParallelOptimizer, parallelize
from thinwire.spec import Plan
from thinwire.spec.plan_parts.presets import PRESETS
from thinwire.testing import run_ranks
from thinwire.train.observing.replicas import ReplicaChecks

pytestmark = pytest.mark.ranks

HOSTS = ("a", "b", "c", "d")


class Tokens(NamedTuple):
    input_ids: Tensor
    labels: Tensor


class Tiny(nn.Module):
    """Predicts a token from the one before, through two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(8, 16)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        x = self.words(input_ids)
        for block in self.blocks:
            x = x + block(x)
        return SimpleNamespace(loss=nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten()))


class Job:
    """Real ranks that train, and compare replicas in every step."""

    def __init__(self, plan: Plan) -> None:
        torch.default_generator.manual_seed(0)
        self.model: ParallelModel = parallelize(Tiny(), plan, loss=nn.functional.cross_entropy)
        self.optim: ParallelOptimizer = self.model.optimizer(torch.optim.AdamW, lr=0.1, skip_nonfinite=True)
        self.checks = ReplicaChecks(self.model, self.optim, HOSTS, every=1)
        self.number = 0

    def forward_backward(self) -> list[Tokens]:
        self.number += 1
        drawn = torch.Generator().manual_seed(100 * self.number + dist.get_rank())
        ids = torch.randint(16, (2, 5), generator=drawn)
        batches = [Tokens(ids, ids.roll(-1, 1))]
        self.model.step(batches)
        return batches

    def finish(self, batches: list[Tokens]) -> None:
        assert self.checks.due(self.number)
        self.checks.compare(self.number, batches)
        self.model.clip_grad_norm_(1.0)
        self.optim.step()
        self.optim.zero_grad()

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.finish(self.forward_backward())

    def flip(self, what: str) -> str:
        """Turn the lowest bit of one value on this rank; returns the unit's name."""
        part = self.optim.parts[0]
        owned = part.fragments[0]
        part.runtime.join_spreads()
        part.runtime.reducer.join()
        if what == "parameters":
            held = part.runtime.units[owned.unit].buffers[0].shard
        else:
            held = owned.grad if what == "gradients" else owned.value
        held.detach().view(-1)[:1].view(torch.int32).bitwise_xor_(1)
        return part.runtime.units[owned.unit].name


def small(name: str) -> Plan:
    return Plan.preset(name, nodes=2, local=2, compute_dtype="float32")


def check_presets(names: list[str]) -> dict[str, str]:
    """What the checks say of sound ranks, by preset; empty where they agree."""
    said = {}
    for name in names:
        job = Job(small(name))
        try:
            job.steps(3)
            said[name] = ""
        except (ReplicaError, UsageError) as error:
            said[name] = str(error)
    return said


@pytest.mark.slow
def test_sound_ranks_agree_under_every_preset() -> None:
    (said, *others) = run_ranks(4, check_presets, list(PRESETS))
    assert others == [said] * 3
    silent = {name for name, text in said.items() if text}
    assert silent == {"zero3", "hpz", "zeropp", "zeropp-8bit"}, said
    assert all("train.check_replicas compares nothing" in said[name] for name in silent)


def first_comparison(name: str) -> str:
    """What is said in the first step of a run that compares replicas every hundredth; empty if they agree."""
    job = Job(small(name))
    job.checks = ReplicaChecks(job.model, job.optim, HOSTS, every=100)
    try:
        job.steps(1)
    except UsageError as error:
        return str(error)
    assert not job.checks.due(2)
    assert job.checks.due(100)
    return ""


def test_a_plan_without_replicas_is_refused_in_the_first_step() -> None:
    assert run_ranks(4, first_comparison, "zero1") == [""] * 4
    assert all("compares nothing" in text for text in run_ranks(4, first_comparison, "zero3"))


def check_flips(name: str, what: str, bad: int) -> tuple[str, str]:
    """What the checks say after a flip in step 3, and the unit in which it was."""
    job = Job(
        small(name) if dist.get_world_size() == 4 else Plan.preset(name, nodes=1, local=2, compute_dtype="float32")
    )
    job.steps(2)
    unit = ""
    before = job.flip(what) if what != "gradients" and dist.get_rank() == bad else ""
    batches = job.forward_backward()
    if what == "gradients" and dist.get_rank() == bad:
        unit = job.flip(what)
    with pytest.raises(ReplicaError) as caught:
        job.finish(batches)
    return str(caught.value), unit or before


@pytest.mark.parametrize(("name", "what"), [("ddp", "gradients"), ("ddp", "parameters"), ("zero1", "parameters")])
def test_a_flipped_bit_is_named_by_majority(name: str, what: str) -> None:
    told = run_ranks(4, check_flips, name, what, 2)
    unit = told[2][1]
    for text, _ in told:
        assert text == told[0][0]
        assert f"{what} of {unit} differ between replicas in step 3: rank 2 on c is wrong (3 of 4 ranks agree)" in text
        assert "rank 0 " not in text
        assert "take that host out" in text


@pytest.mark.parametrize("bad", [0, 1])
def test_of_two_ranks_the_one_with_another_gradient_the_second_time_is_wrong(bad: int) -> None:
    told = run_ranks(2, check_flips, "ddp", "gradients", bad)
    right = (
        f"gradients of {told[bad][1]} differ between replicas in step 3: rank {bad} on {HOSTS[bad]} is wrong (the step"
    )
    assert [right in text for text, _ in told] == [True, True], told


def test_of_two_ranks_with_other_parameters_both_are_named() -> None:
    for text, _ in run_ranks(2, check_flips, "zero1", "parameters", 1):
        assert "rank 0 on a and rank 1 on b disagree, and nothing tells which is wrong" in text
