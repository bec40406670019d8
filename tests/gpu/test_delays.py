"""Real streams, some of which are late: a missing wait changes the losses. And torch's own sanitizer over a step.

A job of one rank queues nothing on lanes. So four processes share the card, each of which exchanges with itself
(:class:`~tests.support.training.delayed.Loopback`).
"""

from __future__ import annotations

import contextlib
import math
from unittest import mock

import pytest
import torch
from tests.support.training.delayed import PRESETS, STEPS, WORLD, Loopback, planted, train, train_on_streams

from thinwire.collectives.links.nccl import replace_nccl
from thinwire.errors import UsageError
from thinwire.testing import RankPool, run_ranks
from thinwire.testing.delays import Place

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch finds no CUDA device"),
]


def delay_card(name: str, places: tuple[Place, ...]) -> list[tuple[list[float], int]]:
    """Losses and delays: without any, then for each place."""
    return [train_on_streams(name, "cuda", place) for place in (None, *places)]


@pytest.mark.parametrize("name", PRESETS)
def test_delays_change_no_loss(name: str) -> None:
    for (losses, _), *delayed in run_ranks(WORLD, delay_card, name, ("lanes", "home"), timeout=240):
        assert all(map(math.isfinite, losses))
        for others, number in delayed:
            assert others == losses
            assert number > 4 * STEPS


def miss_waits(name: str, fault: str, place: Place) -> bool:
    """Whether losses change under delays if a wait is left out, or a step refuses the values that it finds."""
    losses, _ = train_on_streams(name, "cuda", None)
    with planted(fault):
        try:
            delayed, _ = train_on_streams(name, "cuda", place)
        except UsageError:
            return True
        finally:
            torch.cuda.synchronize()  # lanes that nobody has waited for
    return losses != delayed


@pytest.mark.parametrize(
    ("name", "fault", "place"),
    [
        ("zero1", "computation does not wait for lanes", "lanes"),
        ("zero3", "computation does not wait for lanes", "lanes"),
        ("amsp-30b", "gathers do not wait for spreads", "lanes"),
        ("ddp", "a backward does not wait for the one before", "lanes"),
        ("zero1", "lanes do not wait for computation", "home"),
        ("zero3", "lanes do not wait for computation", "home"),
    ],
)
def test_missing_waits_change_losses(name: str, fault: str, place: Place) -> None:
    assert any(run_ranks(WORLD, miss_waits, name, fault, place))


def sanitize() -> list[float]:
    """A step of each preset under torch's sanitizer, which raises an error at accesses that nothing orders."""
    from torch.cuda._sanitizer import enable_cuda_sanitizer

    enable_cuda_sanitizer()
    losses = []
    for name in PRESETS:
        # It does not see that the host has found an event reached. So none is, and streams wait for each of them.
        with replace_nccl(Loopback), mock.patch.object(torch.cuda.Event, "query", return_value=False):
            losses += train(name, "cuda", steps=1)
    return losses


def test_torchs_sanitizer_finds_nothing() -> None:
    with contextlib.closing(RankPool(WORLD)) as fresh:  # it has to be there before CUDA is
        for losses in fresh.run(sanitize, timeout=240):
            assert all(map(math.isfinite, losses))
