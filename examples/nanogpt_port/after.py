"""A loop in nanoGPT's style: accumulation, clipping, a schedule, evaluation, a checkpoint.

torchrun --nproc-per-node 2 -m examples.nanogpt_port.NAME
"""

import math
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from examples.nanogpt_port.model import CONTEXT, GPT
from torch import nn

import thinwire as tw

BATCH, ACCUMULATION, EVALUATE_EVERY, CLIP = 4, 2, 5, 1.0
LEARNING_RATE, WARMUP, DECAY = 3e-3, 3, 0.1


def learning_rate(step: int, steps: int) -> float:
    """A linear warm-up, then a cosine."""
    if step < WARMUP:
        return LEARNING_RATE * (step + 1) / WARMUP
    return LEARNING_RATE * 0.5 * (1.0 + math.cos(math.pi * (step - WARMUP) / max(1, steps - WARMUP)))


def batch_of(text: torch.Tensor, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Random windows, ``[BATCH, CONTEXT]``, and the same windows shifted by one byte."""
    windows = text[torch.randint(len(text) - CONTEXT - 1, (BATCH, 1), generator=generator) + torch.arange(CONTEXT + 1)]
    return windows[:, :-1], windows[:, 1:]


@torch.no_grad()
def evaluate(model: nn.Module, text: torch.Tensor) -> float:
    """The mean loss of some windows, the same on every rank."""
    model.eval()
    generator = torch.Generator().manual_seed(7)
    losses = [model(*batch_of(text, generator))[1].item() for _ in range(3)]
    model.train()
    return sum(losses) / len(losses)


def train(folder: str, steps: int = 20) -> list[float]:
    """Train, and write ``model.pt``; the losses of the evaluations."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    rank = dist.get_rank()
    text = torch.tensor(list(Path(nn.__file__).with_name("functional.py").read_bytes()))
    torch.manual_seed(1)
    model = GPT()
    plan = tw.Plan.preset("zero3", nodes=1, local=dist.get_world_size(), compute_dtype="float32")
    model = tw.shard(model, plan)
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": DECAY},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.95))
    generator, losses = torch.Generator().manual_seed(100 + rank), list[float]()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps)
        if step % EVALUATE_EVERY == 0:
            losses.append(evaluate(model, text))
        for micro_step in range(ACCUMULATION):
            model.require_backward_grad_sync = micro_step == ACCUMULATION - 1
            _, loss = model(*batch_of(text, generator))
            (loss / ACCUMULATION).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    states = tw.full_state_dict(model)
    if rank == 0:
        torch.save(states, Path(folder) / "model.pt")
    return losses


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        losses = train(folder)
    if dist.get_rank() == 0:
        print("loss", *(f"{loss:.3f}" for loss in losses))
    dist.destroy_process_group()
