"""Shards a Hugging Face model, trains it on real text, and saves it in the format of transformers.

torchrun --nproc-per-node 4 examples/huggingface_model.py DIRECTORY

The text is a module of Python's standard library, with one byte per token, so the script downloads nothing. To start
from existing weights, replace the configuration by ``LlamaForCausalLM.from_pretrained(DIRECTORY)``.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import thinwire as tw

TEXT = Path(argparse.__file__)


def train(directory: str, steps: int = 30) -> list[float]:
    """Train, and save the model to the directory; losses of this rank."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=128,
    )  # fmt: skip
    model = tw.shard(LlamaForCausalLM(config), tw.Plan.preset("zeropp", nodes=2, local=2))
    optim = tw.optimizer(model, torch.optim.AdamW, lr=3e-3)

    text = torch.tensor(list(TEXT.read_bytes()))
    data = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(steps):
        ids = text[torch.randint(len(text) - 64, (8, 1), generator=data) + torch.arange(64)]
        loss = model(input_ids=ids, labels=ids).loss  # transformers shifts labels by itself
        loss.backward()
        tw.clip_grad_norm_(model, 1.0)
        optim.step()
        optim.zero_grad()
        losses.append(loss.item())

    with tw.full_parameters(model):
        if dist.get_rank() == 0:
            model.save_pretrained(directory)
    return losses


if __name__ == "__main__":
    directory = sys.argv[1]
    losses = train(directory)
    if dist.get_rank() == 0:
        print("loss", *(f"{loss:.2f}" for loss in losses[::5]))
        print(f"wrote {directory}")
    dist.destroy_process_group()
