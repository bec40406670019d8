"""What the program of each preset predicts to cross a host's link in a step: no network is needed, and none is used.

    python benchmarks/volume.py --presets zero3,zeropp,zero1-node,thinwire

`thinwire bench step` measures the same model; its `link/step` is what the kernel counted.
"""

from __future__ import annotations

import argparse

import torch

import thinwire as tw
from thinwire.lab.peers.workload import make_model
from thinwire.program import Scope
from thinwire.shard.api import runtime
from thinwire.testing import run_ranks


def predicted(preset: str, nodes: int, local: int, model_name: str, seq: int) -> int:
    """Bytes this rank sends to other nodes in a step, after one step that shows the order of units."""
    plan = tw.Plan.preset(preset, nodes=nodes, local=local)
    model = tw.shard(make_model({"model": model_name, "seq": seq}), plan)
    optim = tw.optimizer(model, torch.optim.AdamW, lr=1e-3)
    tokens = torch.zeros(1, seq, dtype=torch.long)
    model(tokens, labels=tokens).loss.backward()
    optim.step()
    return sum(sent[Scope.ACROSS] for sent in runtime(model).schedule.program(1).traffic().values())


def main() -> None:
    """Print a line for each preset."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", default="zero3,zeropp,zero1-node,thinwire")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=2, help="ranks of each node")
    parser.add_argument("--model", default="llama-17m")
    parser.add_argument("--seq", type=int, default=128)
    options = parser.parse_args()
    for preset in options.presets.split(","):
        sent = run_ranks(
            options.nodes * options.ranks, predicted, preset, options.nodes, options.ranks, options.model, options.seq
        )
        busiest = max(sum(sent[node * options.ranks : (node + 1) * options.ranks]) for node in range(options.nodes))
        print(f"{preset:12} {busiest / 2**20:8.2f} MiB")


if __name__ == "__main__":
    main()
