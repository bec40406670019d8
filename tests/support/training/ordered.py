"""Steps on simulated streams, where every access to memory is ordered."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import torch.distributed as dist
from tests.support.training.parity import STEPS, Case, Gap, alone, gap, sharded

import thinwire as tw
from thinwire.program import shares
from thinwire.testing.nccl import Issue, compare_issues
from thinwire.testing.simulated import Answer
from thinwire.testing.streams import StreamCheck, check_streams


def preset(name: str, **fields: object) -> tw.Plan:
    return tw.Plan.preset(name, nodes=2, local=2, compute_dtype="float32", **fields)


def checked(case: Case, answers: Answer) -> tuple[StreamCheck, Gap]:
    """Train a case on simulated streams, and compare it with training alone."""
    with check_streams(answers) as check:
        curve = sharded(case)
    return check, gap(curve, alone(dist.get_world_size(), case.micro_batches))


Outcome = tuple[list[str], dict[str, list[Issue]]]
"""What is wrong on a rank, and its calls of NCCL in each case."""


def check_cases(cases: dict[str, Case], answers: Answer) -> Outcome:
    problems, issues = [], {}
    for name, case in cases.items():
        check, difference = checked(case, answers)
        assert check.launches.total() > 50 * STEPS
        problems += [f"{name}: {hazard}" for hazard in check.hazards]
        is_exact = case.plan.wire.is_none and case.plan.accumulate_dtype == "float32"
        if is_exact and not difference.closed:
            problems.append(f"{name}: {difference}")
        issues[name] = check.issues
    return problems, issues


def assert_ordered(outcomes: list[Outcome]) -> None:
    """Every access is ordered, and all ranks call NCCL in one order."""
    for rank, (problems, _) in enumerate(outcomes):
        assert not problems, f"rank {rank}: {len(problems)} problems\n" + "\n".join(problems[:5])
    for name in outcomes[0][1]:
        logs = [issues[name] for _, issues in outcomes]
        assert any(issue.what != "create" for issue in logs[0]), name
        assert compare_issues(logs) == [], name


@contextlib.contextmanager
def small_chunks() -> Iterator[None]:
    """Let chunks of a few elements count, as large ones do."""
    with mock.patch.object(shares, "CHUNK_MULTIPLE", 8):
        yield
