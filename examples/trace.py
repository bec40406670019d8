"""Writes a trace of one training step for Perfetto, with every lane of every rank.

    thinwire lab --nodes 2 --ranks 2 --bandwidth 200mbit -- torchrun examples/trace.py zeropp trace.json

In the trace, the first hop of a reduction overlaps the second hop of the previous one, and codecs overlap both.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import torch
import torch.distributed as dist

import thinwire as tw
from thinwire.program.timeline import chrome_trace
from thinwire.train.models.llama import Llama, LlamaConfig


def main() -> None:
    """Train three steps and record the last."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("preset", help="preset of the plan, for example zeropp or thinwire")
    parser.add_argument("out", type=Path, help="JSON to write")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=256, help="width of the model")
    parser.add_argument(
        "--bucket-bytes", type=int, default=1 << 20, help="bytes of gradients that are reduced together"
    )
    options = parser.parse_args()

    world = int(os.environ["WORLD_SIZE"])
    plan = tw.Plan.preset(options.preset, nodes=options.nodes, local=world // options.nodes)
    plan = plan.with_(bucket_bytes=options.bucket_bytes)
    config = LlamaConfig(
        vocab=2048, hidden=options.hidden, layers=6, heads=4, kv_heads=4, ffn=3 * options.hidden, seq=64
    )
    model = tw.shard(Llama(config, seed=0), plan)
    optim = tw.optimizer(model, torch.optim.AdamW, lr=1e-3)
    ids = torch.randint(0, 2048, (2, 65), generator=torch.Generator().manual_seed(dist.get_rank()))

    def step() -> None:
        model(ids[:, :-1], labels=ids[:, 1:]).loss.backward()
        optim.step()
        optim.zero_grad()

    step()
    step()
    with tw.timeline(model) as timeline:
        step()
        with tw.full_parameters(model):  # transfers that are still under way belong to the step
            pass
    spans = [None] * world
    dist.all_gather_object(spans, timeline.spans)
    if dist.get_rank() == 0:
        options.out.write_text(json.dumps(chrome_trace(dict(enumerate(spans)))))
        print(f"wrote {options.out}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
