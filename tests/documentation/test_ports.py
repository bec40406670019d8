"""Loops that are ported to thinwire by changing a few lines train as they did before."""

from __future__ import annotations

import difflib
import importlib
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from tests.support.paths import ROOT

from thinwire.testing import run_ranks

pytestmark = pytest.mark.ranks

EXAMPLES = ROOT / "examples"
PORTS = ("nanogpt_port", "huggingface_no_trainer")


def part(port: str, name: str) -> ModuleType:
    return importlib.import_module(f"examples.{port}.{name}")


def train(port: str, name: str, folder: str) -> list[float]:
    numbers: list[float] = part(port, name).train(folder)
    dist.barrier()
    return numbers


@pytest.mark.parametrize("port", PORTS)
def test_a_port_changes_at_most_six_lines(port: str) -> None:
    before, after = ((EXAMPLES / port / f"{name}.py").read_text().splitlines() for name in ("before", "after"))
    changes = [line for line in difflib.ndiff(before, after) if line[2:].strip()]
    removed, added = (sum(line.startswith(sign) for line in changes) for sign in ("- ", "+ "))
    assert 0 < removed <= 6
    assert 0 < added <= 6


@pytest.mark.slow
def test_nanogpt_trains_as_before(tmp_path: Path) -> None:
    losses, states = {}, {}
    for name in ("before", "after"):
        losses[name] = run_ranks(2, train, "nanogpt_port", name, str(tmp_path))[0]
        states[name] = torch.load(tmp_path / "model.pt", weights_only=True)
    assert losses["after"] == pytest.approx(losses["before"], rel=1e-4)
    assert losses["after"][-1] < 0.8 * losses["after"][0]
    assert list(states["after"]) == list(states["before"])
    for key, value in states["before"].items():
        assert torch.allclose(states["after"][key], value, atol=1e-3), key


@pytest.mark.slow
def test_a_loop_without_trainer_trains_as_before(tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    perplexities, weights = {}, {}
    for name in ("before", "after"):
        perplexities[name] = run_ranks(2, train, "huggingface_no_trainer", name, str(tmp_path / name))[0]
        weights[name] = LlamaForCausalLM.from_pretrained(tmp_path / name).state_dict()
    assert perplexities["after"] == pytest.approx(perplexities["before"], rel=1e-3)
    assert perplexities["after"][-1] < perplexities["after"][0] < 256
    for key, value in weights["before"].items():
        assert torch.allclose(weights["after"][key], value, atol=1e-3), key
