"""Runs the Python code of the documentation and the example of a tensor's journey."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from examples.journey import journey
from tests.support.paths import ROOT
from tests.support.small import TORCHRUN, thinwire
from torch import nn

import thinwire as tw
from thinwire.spec import Plan
from thinwire.testing import run_ranks
from thinwire.train.models.common import CausalOutput

pytestmark = pytest.mark.ranks


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)


class Toy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

    def forward(self, x: torch.Tensor) -> CausalOutput:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return CausalOutput(loss=x.square().mean(), logits=x)


def run_code(code: str, directory: str) -> list[float]:
    """Run a page's Python on this rank; the weights it leaves."""
    os.chdir(directory)
    torch.manual_seed(0)
    micro_batches = [{"x": torch.randn(2, 6)} for _ in range(2)]
    names: dict[str, Any] = {"model": Toy(), "batches": 4 * [micro_batches], "micro_batches": micro_batches}
    before = names["model"].layers[0].weight.detach().clone()
    exec(compile(code, "page", "exec"), names)
    names["optim"].runtime.join_spreads()
    after = names["model"].layers[0].weight.detach()
    assert not torch.equal(before.to(after.dtype), after)
    return [float(value) for value in after.flatten()]


@pytest.mark.slow
def test_the_script_of_the_readme_runs_as_pasted(tmp_path: Path) -> None:
    [script] = blocks("README.md", "python")
    [command] = [line for block in blocks("README.md", "console") for line in block.splitlines() if "torchrun" in line]
    (tmp_path / "train.py").write_text(script)
    torchrun, *words = command.removeprefix("$ ").split()
    assert torchrun == "torchrun"
    output = thinwire(*words, launcher=TORCHRUN, cwd=tmp_path)  # on a free port
    losses = [float(loss) for loss in re.findall(r"loss (\d\.\d{3})", output)]  # lines of two ranks may mix
    assert len(losses) == 2, output
    assert max(losses) < 0.2, "of inputs with a variance of 1, halved"


SEVERAL_MODELS, SEVERAL_OPTIMIZERS, FLOAT16, AVERAGE, GENERATE = blocks("docs/loops.md", "python")


@pytest.mark.parametrize("code", [*blocks("docs/quickstart.md", "python"), FLOAT16], ids=["quickstart", "float16"])
def test_the_library_code_of_a_page_trains(code: str, tmp_path: Path) -> None:
    [plan] = blocks("docs/quickstart.md", "toml")
    (tmp_path / "plan.toml").write_text(plan)
    weights = run_ranks(4, run_code, code, str(tmp_path))
    assert all(other == weights[0] for other in weights)


def test_the_quickstart_s_plan_is_valid() -> None:
    [plan] = blocks("docs/quickstart.md", "toml")
    assert Plan.from_toml(plan).optimizer.ranks == 2


def test_the_journey_names_every_stage_and_matches_its_page() -> None:
    stories = run_ranks(4, journey)
    first_words = [line.split()[0] for line in stories[0]]
    for stage in ("plan", "layout", "ownership", "reduce", "sync", "spread", "gradient", "updated"):
        assert stage in first_words
    assert all(story[-2] == stories[0][-2] for story in stories), "ranks disagree on the updated weight"
    [told] = blocks("docs/architecture.md", "text")
    # Lanes run concurrently, so the order of their transfers may vary.
    assert sorted(line for line in told.splitlines() if "[-" not in line) == sorted(
        line for line in stories[0] if "[-" not in line
    )


def several_models(directory: str) -> list[bool]:
    """Run the code for several models on this rank; whether each model has changed and is in its checkpoint."""
    os.chdir(directory)
    torch.manual_seed(0)
    nets = {name: nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)) for name in ("actor", "critic", "teacher")}
    nets["teacher"].requires_grad_(False)
    before = {name: net[0].weight.detach().clone() for name, net in nets.items()}
    names: dict[str, Any] = {"tw": tw, "torch": torch, "batches": [torch.randn(4, 6) for _ in range(3)], **nets}
    exec(compile(SEVERAL_MODELS, "page", "exec"), names)
    found = []
    for name in ("actor", "critic"):
        trained = tw.full_state_dict(names[name])
        found.append(not torch.equal(trained["0.weight"], before[name]))
        tw.load(names[name], names[f"of_{name}"], f"step-2/{name}")
        found.append(torch.equal(tw.full_state_dict(names[name])["0.weight"], trained["0.weight"]))
    names["model"] = tw.shard(Toy(), Plan.preset("zero3", nodes=1, local=2, compute_dtype="float32"))
    exec(compile(SEVERAL_OPTIMIZERS, "page", "exec"), names)
    return found


def test_the_code_for_several_models_runs(tmp_path: Path) -> None:
    assert run_ranks(2, several_models, str(tmp_path)) == [[True] * 4] * 2


class Talker(Toy):
    def generate(self, prompts: torch.Tensor, max_new_tokens: int) -> torch.Tensor:
        for _ in range(max_new_tokens // 100):
            prompts = self(prompts).logits
        return prompts


def averaged_and_generating(directory: str) -> tuple[list[float], bool]:
    """Run the code for averages and generation on this rank; the averaged weights, and whether output is as usual."""
    os.chdir(directory)
    torch.manual_seed(0)
    model = tw.shard(Talker(), Plan.preset("zero3", nodes=1, local=2, compute_dtype="float32"))
    optim = tw.optimizer(model, torch.optim.AdamW, lr=1e-3)
    names: dict[str, Any] = {"tw": tw, "torch": torch, "model": model, "optim": optim}
    names |= {"batches": list(torch.randn(3, 2, 6)), "validation": torch.randn(2, 6), "prompts": torch.randn(2, 6)}
    exec(compile(AVERAGE.replace("...", "model(batch).loss.backward()"), "page", "exec"), names)
    averaged = [float(value) for weight in names["weights"].values() for value in weight.flatten()]
    exec(compile(GENERATE, "page", "exec"), names)
    with torch.no_grad():
        return averaged, torch.equal(names["tokens"], model.generate(names["prompts"], 200))


def test_the_code_for_averages_and_generation_runs(tmp_path: Path) -> None:
    (first, same), other = run_ranks(2, averaged_and_generating, str(tmp_path))
    assert same
    assert other == (first, True)
