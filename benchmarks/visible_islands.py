"""Measures islands that send what bf16 shows of their changes beside islands that send all of them.

Four islands of one rank go on from a small Llama that was trained on the documentation's bytes here, at the rates of
fine-tuning and reinforcement learning, and exchange every 32 steps. Both arms of a seed see the same data. Bytes are
those that a rank sends to other islands.

    python benchmarks/visible_islands.py --json FILE
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
import transformers

import thinwire as tw
from thinwire.testing import run_ranks

COMMAND: Final = "python benchmarks/visible_islands.py"
DOCS: Final = Path(__file__).parents[1] / "docs"
ISLANDS, LENGTH, BATCH = 4, 64, 8
ARMS: Final[dict[str, dict[str, Any]]] = {"all": {}, "visible": {"outer_wire": "visible"}}


def texts() -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes to train on, and to measure on."""
    text = "".join(path.read_text(encoding="utf-8") for path in sorted(DOCS.glob("*.md")))
    data = torch.tensor(list(text.encode()), dtype=torch.long)
    return data[: len(data) * 9 // 10], data[len(data) * 9 // 10 :]


def build() -> Any:
    """A Llama of 381,600 parameters."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=96, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4,
        max_position_embeddings=LENGTH,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def batch(data: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    starts = torch.randint(0, len(data) - LENGTH, (BATCH,), generator=generator)
    return torch.stack([data[start : start + LENGTH] for start in starts])


def trunk(path: Path, steps: int) -> None:
    """Train the model that islands go on from."""
    model, (data, _) = build(), texts()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(1)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 1e-3 * min(1, (step + 1) / 50, 2 * (steps - step) / steps)
        tokens = batch(data, generator)
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.save(model.state_dict(), path)


def measured(model: Any) -> float:
    """Validation loss."""
    _, data = texts()
    tokens = data[: len(data) // LENGTH * LENGTH].view(-1, LENGTH)[:512]
    with torch.no_grad():
        return statistics.fmean(float(model(input_ids=part, labels=part).loss) for part in tokens.split(64))


def train(path: str, arm: str, seed: int, rate: float, exchanges: int, every: int) -> tuple[float, float, int]:
    """Validation loss before and after, and the bytes sent to other islands."""
    model = build()
    model.load_state_dict(torch.load(path, weights_only=True))
    outer = {"name": "sgd", "lr": 1.0, "momentum": 0.0}
    plan = tw.Plan.preset("ddp", nodes=1, local=1)
    plan = plan.with_(islands={"count": ISLANDS, "every": every, "codec": "none", "outer": outer, **ARMS[arm]})
    tw.shard(model, plan)
    optimizer = tw.optimizer(model, torch.optim.AdamW, lr=rate)
    before, (data, _) = measured(model), texts()
    generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    for _ in range(exchanges * every):
        tokens = batch(data, generator)
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return before, measured(model), sum(tw.traffic(model)["outer"].values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rates", type=float, nargs="+", default=[3e-6])
    parser.add_argument("--exchanges", type=int, default=12)
    parser.add_argument("--every", type=int, default=32)
    parser.add_argument("--trunk", type=int, default=1500, help="steps of the model that islands go on from")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    runs = []
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "trunk.pt")
        trunk(path, options.trunk)
        for rate in options.rates:
            for seed in range(options.seeds):
                run: dict[str, Any] = {"rate": rate, "seed": seed}
                for arm in ARMS:
                    before, after, sent = run_ranks(
                        ISLANDS, train, str(path), arm, seed, rate, options.exchanges, options.every, timeout=900
                    )[0]
                    run |= {"before": before, arm: {"loss": after, "bytes": sent}}
                gap = 100 * (run["visible"]["loss"] / run["all"]["loss"] - 1)
                gain = 100 * (1 - run["all"]["loss"] / run["before"])
                fewer = run["all"]["bytes"] / run["visible"]["bytes"]
                print(
                    f"{rate:g}, seed {seed}: {gap:+.4f} % of {gain:.3f} % gained, {fewer:.1f} x fewer bytes", flush=True
                )
                runs.append(run)
    if options.json is not None:
        settings = {key: value for key, value in vars(options).items() if key != "json"}
        about = {
            "command": COMMAND,
            "settings": settings,
            "torch": torch.__version__,
            "date": time.strftime("%Y-%m-%d"),
        }
        options.json.write_text(json.dumps({**about, "runs": runs}, indent=1) + "\n")


if __name__ == "__main__":
    main()
