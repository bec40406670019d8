"""Trains a small Llama on 4 ranks: two pipeline stages, each with its matrices divided over two tensor-parallel ranks.

torchrun --nproc-per-node 4 examples/parallel.py hybrid
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

import thinwire as tw
from thinwire.intercept import AxisTraffic
from thinwire.train.data.samples import Batch
from thinwire.train.models.common import cross_entropy
from thinwire.train.models.llama import Llama, LlamaConfig

VOCABULARY, LENGTH = 256, 32


def counting(generator: torch.Generator) -> Batch:
    """Sequences that count up from a random number, which the model can learn."""
    start = torch.randint(0, VOCABULARY, (8, 1), generator=generator)
    tokens = (start + torch.arange(LENGTH + 1)) % VOCABULARY
    return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def train(policy: str = "none", steps: int = 8) -> tuple[list[float], dict[str, AxisTraffic]]:
    """Losses of the steps, zero on ranks without the last stage, and the traffic of this rank."""
    plan = tw.Plan.preset(
        "zero1", nodes=1, local=1, tp=2, pp=2, micro_batches=4, compute_dtype="float32", wire={"policy": policy}
    )
    whole = Llama(LlamaConfig(vocab=VOCABULARY, hidden=64, layers=4, heads=4, kv_heads=2, ffn=192, seq=LENGTH))
    model = tw.parallelize(whole, plan, loss=cross_entropy)
    optim = model.optimizer(torch.optim.AdamW, lr=3e-3)
    # Ranks that hold the model together see the same samples; other data-parallel ranks would see others.
    samples = torch.Generator().manual_seed(model.grid.data)
    losses = []
    for _ in range(steps):
        loss = model.step([counting(samples) for _ in range(plan.micro_batches)])
        model.clip_grad_norm_(1.0)
        optim.step()
        optim.zero_grad()
        losses.append(float(loss))
    return losses, model.axis_traffic()


if __name__ == "__main__":
    losses, traffic = train(*sys.argv[1:2])
    if dist.get_rank() == dist.get_world_size() - 1:
        print("loss", *(f"{loss:.4f}" for loss in losses))
        print(*traffic.values(), sep="\n")
    dist.destroy_process_group()
