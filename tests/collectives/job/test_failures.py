"""Errors of the transport become sentences that say what a user needs, and nothing else."""

from __future__ import annotations

from unittest import mock

import pytest
import torch.distributed as dist

from thinwire.collectives.job import failures
from thinwire.collectives.job.current import job

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
