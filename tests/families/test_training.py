"""Hugging Face's architectures train sharded as they do in one process."""

from __future__ import annotations

import pytest
from tests.support.families.catalog import ARCHITECTURES
from tests.support.families.training import faults

from thinwire.testing import run_ranks

pytestmark = pytest.mark.ranks

FEW = ("gpt2", "mixtral", "mamba2", "t5", "vit", "whisper", "clip")
"""One of each kind, for every run of the tests."""

PLANS = ("zero3", "hpz", "zero1")


@pytest.mark.slow
def test_one_architecture_of_each_kind_trains_as_in_one_process() -> None:
    for rank, problems in enumerate(run_ranks(2, faults, FEW, ("zero3", "zero1"))):
        assert not problems, f"rank {rank}: " + "\n".join(problems)


def test_there_are_sixty_architectures_of_every_kind() -> None:
    assert len(ARCHITECTURES) >= 60
    assert len({architecture.model_class for architecture in ARCHITECTURES.values()}) == len(ARCHITECTURES)


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_trains_as_in_one_process(name: str) -> None:
    for rank, problems in enumerate(run_ranks(2, faults, [name], PLANS)):
        assert not problems, f"rank {rank}: " + "\n".join(problems)


@pytest.mark.slow
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_model_that_recomputes_its_blocks_itself_trains_as_in_one_process(reentrant: bool) -> None:
    for problems in run_ranks(2, faults, ["llama"], PLANS, 3, {"use_reentrant": reentrant}):
        assert not problems, "\n".join(problems)
