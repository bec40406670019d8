"""GRPO whose generators are far away: two trainers under zero3, and two generators that follow by exact deltas.

The policy, a small Llama with random weights, learns to count. In each step, a generator takes the newest weights, goes
on from some digits several times, and rewards every digit that follows the one before. The trainers move the policy
towards the better continuations of each start (the group-relative advantages of GRPO, without a reference model), and
publish its weights. These cross the generators' links; continuations, a few kB, go back through files.

    thinwire lab --nodes 4 --ranks 1 --bandwidth 1gbit,1gbit,50mbit,50mbit -- python examples/grpo.py
    thinwire lab --nodes 4 --ranks 1 --bandwidth 1gbit,1gbit,50mbit,50mbit -- python examples/grpo.py --whole
    python examples/grpo.py --picture runs/grpo.png
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers

import thinwire as tw

TRAINERS = GENERATORS = 2
STARTS, TRIES = 8, 8  # of a generator and step
PROMPT, LENGTH = 4, 12
PORT = 29520
PATIENCE = 300.0  # seconds
RUNS = {"deltas": Path("runs/grpo-deltas.json"), "whole": Path("runs/grpo-whole.json")}


def build() -> Any:
    """A Llama of 5.1M parameters over ten digits."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=10, hidden_size=256, intermediate_size=768, num_hidden_layers=6, num_attention_heads=8
    )
    return transformers.LlamaForCausalLM(config)


def generate(policy: Any, seed: int) -> dict[str, torch.Tensor]:
    """Continuations of some digits, ``[STARTS * TRIES, PROMPT + LENGTH]``, and their rewards."""
    torch.manual_seed(seed)
    starts = torch.randint(10, (STARTS, PROMPT)).repeat_interleave(TRIES, 0)
    length = {"max_new_tokens": LENGTH, "min_new_tokens": LENGTH, "eos_token_id": None, "pad_token_id": 0}
    tokens = policy.generate(starts, attention_mask=torch.ones_like(starts), do_sample=True, top_k=0, **length)
    follows = (tokens[:, 1:] - tokens[:, :-1]) % 10 == 1
    return {"tokens": tokens, "rewards": follows[:, PROMPT - 1 :].float().mean(1)}


def loss_of(policy: Any, tokens: torch.Tensor, rewards: torch.Tensor) -> torch.Tensor:
    """The loss whose gradient is that of the policy, with group-relative advantages."""
    groups = rewards.view(-1, TRIES)
    advantages = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
    logits = policy(input_ids=tokens).logits[:, PROMPT - 1 : -1].float()
    chosen = logits.log_softmax(-1).gather(-1, tokens[:, PROMPT:, None])[..., 0]
    loss: torch.Tensor = -(advantages.view(-1, 1) * chosen).mean()
    return loss


def train(rank: int, folder: Path, options: argparse.Namespace) -> dict[str, list[float]]:
    """Learn from the continuations of one generator, and publish after every step."""
    os.environ["WORLD_SIZE"] = str(TRAINERS)
    policy = tw.shard(build(), tw.Plan.preset("zero3", nodes=TRAINERS, local=1, compute_dtype="bfloat16"))
    optim = tw.optimizer(policy, torch.optim.AdamW, lr=options.rate, weight_decay=0.0)
    store = str(folder / "weights")
    publisher = tw.publisher(policy, store, fold_every=0)
    published, rewards = [time.time()], list[float]()
    publisher.step()
    for step in range(options.steps):
        answers = torch.load(wait_for(folder / f"{step}-{rank}.pt"), weights_only=True)
        loss_of(policy, **answers).backward()
        optim.step()
        optim.zero_grad()
        if options.whole:
            publisher.close()
            publisher = tw.publisher(policy, store)  # which begins with all weights
        published.append(time.time())
        publisher.step()
        rewards.append(float(answers["rewards"].mean()))
        if rank == 0:
            seconds = published[-1] - published[-2]
            print(f"step {step + 1}/{options.steps}  reward {rewards[-1]:.3f}  {seconds:.2f} s", flush=True)
    publisher.close()
    return {"published": published, "rewards": rewards}


def follow(number: int, folder: Path, options: argparse.Namespace) -> dict[str, list[float]]:
    """Take the weights of every step, and go on from some digits with them."""
    url, policy = f"http://{os.environ['MASTER_ADDR']}:{PORT}", build().bfloat16()
    subscriber, applied, nbytes = tw.Subscriber(url), list[float](), list[float]()
    for step in range(options.steps + 1):
        before = subscriber.nbytes
        if subscriber.follow(PATIENCE, interval=0.02) is None:
            raise TimeoutError(f"no new weights came from {url} in {PATIENCE:.0f} s")
        subscriber.load_into(policy)
        applied.append(time.time())
        nbytes.append(subscriber.nbytes - before)
        with torch.no_grad():
            save(generate(policy, GENERATORS * step + number), folder / f"{step}-{number}.pt")
    return {"applied": applied, "bytes": nbytes}


def summary(trained: dict[str, list[float]], followed: list[dict[str, list[float]]]) -> dict[str, list[float]]:
    """What the steps after the first version sent, and when."""
    arrived = map(max, zip(*(one["applied"] for one in followed), strict=True))
    began, *published = trained["published"]
    return {
        "megabytes": [nbytes / 1e6 for nbytes in followed[0]["bytes"][1:]],
        "pauses": [end - begin for begin, end in zip(published, list(arrived)[1:], strict=True)],
        "seconds": [moment - began for moment in published],
        "rewards": trained["rewards"],
    }


def save(value: object, path: Path) -> None:
    """Write a file that appears as a whole."""
    draft = path.with_suffix(".part")
    torch.save(value, draft)
    draft.rename(path)


def wait_for(path: Path) -> Path:
    """Wait for a file."""
    until = time.monotonic() + PATIENCE
    while not path.exists():
        if time.monotonic() > until:
            raise TimeoutError(f"{path} did not appear in {PATIENCE:.0f} s")
        time.sleep(0.01)
    return path


def picture(path: Path) -> None:
    """Draw what both runs sent, how long generators waited for weights, and how the reward rose."""
    from matplotlib import pyplot

    runs = {name: json.loads(file.read_text(encoding="utf-8")) for name, file in RUNS.items() if file.exists()}
    figure, (sent, waited, learnt) = pyplot.subplots(1, 3, figsize=(11, 3.2), layout="constrained")
    for axis, key, title in ((sent, "megabytes", "MB to a generator, per step"), (waited, "pauses", "pause, s")):
        bars = axis.bar(runs.keys(), [statistics.median(run[key]) for run in runs.values()], color=["C0", "C1"])
        axis.bar_label(bars, fmt="%.2f")
        axis.margins(y=0.15)
        axis.set_title(title)
    for name, run in runs.items():
        learnt.plot(run["seconds"], run["rewards"], label=name)
    learnt.set_title("reward, over seconds")
    learnt.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--rate", type=float, default=1e-4, help="learning rate")
    parser.add_argument("--whole", action="store_true", help="send all weights after every step")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the runs, and do nothing else")
    options = parser.parse_args()
    if options.picture is not None:
        return picture(options.picture)
    rank, out = int(os.environ["RANK"]), RUNS["whole" if options.whole else "deltas"]
    folder = out.with_suffix("") / os.environ["MASTER_PORT"]
    (folder / "weights").mkdir(parents=True, exist_ok=True)
    if rank >= TRAINERS:
        number = rank - TRAINERS
        save(follow(number, folder, options), folder / f"followed-{number}.pt")
        return None
    serve = [sys.executable, "-m", "thinwire.cli.main", "serve-weights", str(folder / "weights"), "--host", "0.0.0.0"]
    server = subprocess.Popen([*serve, "--port", str(PORT)]) if rank == 0 else None
    try:
        trained = train(rank, folder, options)
        followed = [torch.load(wait_for(folder / f"followed-{number}.pt")) for number in range(GENERATORS)]
    finally:
        if server is not None:
            server.terminate()
    if rank == 0:
        result = summary(trained, followed)
        out.write_text(json.dumps(result), encoding="utf-8")
        sent, pause = (statistics.median(result[key]) for key in ("megabytes", "pauses"))
        print(f"{sent:.2f} MB to each generator for a step, {pause:.2f} s until both had them")
    return None


if __name__ == "__main__":
    main()
