"""Errors of the transport become sentences that say what a user needs, and nothing else."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tests.support.ranks import on_ranks
from torch.distributed.device_mesh import init_device_mesh

from thinwire import intercept
from thinwire.collectives.group import Meter, Subgroup, control
from thinwire.collectives.job import failures
from thinwire.collectives.job.current import job
from thinwire.program import Lane
from thinwire.program.stages import Stage

pytestmark = pytest.mark.ranks

CLOSED = "[pair.cc:539] Connection closed by peer [127.0.0.1]:29500"
ADVICE = ". This is typically caused by a remote worker crashing. Review the logs. GLHF!"
SILENT = f"Rank 1 {failures._SILENT}."


@pytest.mark.parametrize(
    ("text", "others", "hints"),
    [
        (CLOSED + ADVICE, SILENT, True),
        (CLOSED + ADVICE, "Rank 1 failed in gather.", False),
        ("Timed out waiting 4000ms for recv operation" + ADVICE, SILENT, False),
    ],
)
def test_a_reason_is_given_without_advice_of_others(text: str, others: str, hints: bool) -> None:
    with (
        mock.patch.object(failures, "_publish_and_ask", return_value=others),
        mock.patch.object(dist, "get_rank", return_value=0),
        mock.patch.object(job, "has_failed", False),
    ):
        sentence = str(failures.failure_of(RuntimeError(text), 0.0, "gather", "gather", (0, 1)))
    assert f"{text.removesuffix(ADVICE)}. {others}" in sentence
    assert "typically" not in sentence
    assert ("thinwire.join(model, batches)" in sentence) is hints


def on_control() -> Callable[[], object]:
    return control().barrier


def on_lane() -> Callable[[], object]:
    subgroup, pieces = Subgroup((0, 1), Lane.CONTROL, Stage.GATHER_INSIDE, None, Meter()), [torch.zeros(8)] * 2
    return lambda: subgroup.gather(pieces)


def on_axis() -> Callable[[], object]:
    mesh, values = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)), torch.ones(4096)
    intercept.compress_axis(mesh, "dp", "int8:256")

    def exchange() -> None:
        with intercept.step_scope():
            dist.all_reduce(values, group=mesh.get_group("dp"))

    return exchange


@pytest.mark.parametrize("prepare", [on_control, on_lane, on_axis])
@on_ranks(2)
def test_an_error_of_a_signal_handler_stays_what_it_is(
    prepare: Callable[[], Callable[[], object]],
) -> None:
    """As that of torch's DataLoader, whose worker was killed."""

    def handle(*_: object) -> None:
        raise RuntimeError("a worker is killed")

    exchange = prepare()
    exchange()
    if dist.get_rank() == 0:
        time.sleep(0.6)
        exchange()
        return
    signal.signal(signal.SIGALRM, handle)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    with pytest.raises(RuntimeError) as caught:
        exchange()
    assert (type(caught.value), str(caught.value)) == (RuntimeError, "a worker is killed")
