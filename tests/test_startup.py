"""The environment that CUDA starts with: set by importing thinwire, unless the user has chosen or CUDA runs already."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

import thinwire as tw
from thinwire import startup
from thinwire.startup import CUDA_VARIABLES, prepare_cuda
from thinwire.testing import check_streams


@pytest.fixture
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable is set, as where thinwire has not been imported yet."""
    for name in CUDA_VARIABLES:
        monkeypatch.setenv(name, "")  # so that the variable is restored
        monkeypatch.delenv(name)
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.setattr(startup, "_is_late", False)


@pytest.mark.parametrize(
    "module",
    [
        "thinwire.integrations.common.plans",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("thinwire", "benchmarks.gpu.scale")),
    ],
)
@pytest.mark.usefixtures("unset")
def test_any_import_prepares_cuda_and_does_not_start_it(module: str) -> None:
    code = f"import {module}, json, os, torch; print(json.dumps([dict(os.environ), torch.cuda.is_initialized()]))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    environment, is_initialized = json.loads(result.stdout)
    assert environment.items() >= CUDA_VARIABLES.items()
    assert not is_initialized


@pytest.mark.usefixtures("unset")
def test_variables_of_the_user_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "backend:cudaMallocAsync")
    prepare_cuda()
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert "PYTORCH_CUDA_ALLOC_CONF" not in os.environ
    assert os.environ["NCCL_LAUNCH_ORDER_IMPLICIT"] == "1"


def shard_twice(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What two models on streams log."""
    with caplog.at_level(logging.WARNING, logger="thinwire"), check_streams():
        for _ in range(2):
            tw.shard(nn.Linear(4, 4), tw.Plan.preset("zero1", nodes=1, local=1))
    return [record.getMessage() for record in caplog.records]


@pytest.mark.usefixtures("unset")
def test_who_starts_cuda_before_thinwire_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    prepare_cuda()
    (sentence,) = shard_twice(caplog)
    assert "CUDA was in use before thinwire was imported" in sentence
    assert "CUDA_DEVICE_MAX_CONNECTIONS=32" in sentence


@pytest.mark.parametrize(("number", "is_initialized"), [("8", True), (None, False)])
@pytest.mark.usefixtures("unset")
def test_nobody_else_is_told(
    number: str | None, is_initialized: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A user who has chosen a number has chosen."""
    if number is not None:
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", number)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: is_initialized)
    prepare_cuda()
    assert shard_twice(caplog) == []
