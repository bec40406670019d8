"""A loop like transformers' examples without Trainer: data loader, scheduler, evaluation, save_pretrained.

torchrun --nproc-per-node 2 -m examples.huggingface_no_trainer.NAME
"""

import math
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from transformers import LlamaConfig, LlamaForCausalLM, get_scheduler

BLOCK, ACCUMULATION, EPOCHS = 32, 2, 2
CONFIG = LlamaConfig(
    vocab_size=256,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
)


def blocks(first: int, count: int) -> list[torch.Tensor]:
    """Consecutive blocks of torch's own source, ``[BLOCK]`` each."""
    text = Path(nn.__file__).with_name("functional.py").read_bytes()
    return [torch.tensor(list(text[n * BLOCK : (n + 1) * BLOCK])) for n in range(first, first + count)]


def perplexity(model: nn.Module, loader: DataLoader[torch.Tensor]) -> float:
    """Perplexity of the validation data over all ranks."""
    model.eval()
    losses = []
    for batch in loader:
        with torch.no_grad():
            losses.append(model(input_ids=batch, labels=batch).loss.detach())
    mean = torch.stack(losses).mean()
    dist.all_reduce(mean)
    model.train()
    return math.exp(mean.item() / dist.get_world_size())


def train(folder: str) -> list[float]:
    """Train, and write the model to a folder; the perplexity after each epoch."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    torch.manual_seed(1)
    train_data, validation_data = blocks(0, 64), blocks(64, 16)
    sampler: DistributedSampler[torch.Tensor] = DistributedSampler(train_data, seed=3)
    train_loader = DataLoader(train_data, batch_size=4, sampler=sampler)
    validation_loader = DataLoader(validation_data, batch_size=4, sampler=DistributedSampler(validation_data))
    model = LlamaForCausalLM(CONFIG)
    model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    num_steps = EPOCHS * len(train_loader) // ACCUMULATION
    scheduler = get_scheduler("linear", optimizer, num_warmup_steps=2, num_training_steps=num_steps)
    perplexities = []
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for number, batch in enumerate(train_loader):
            loss = model(input_ids=batch, labels=batch).loss / ACCUMULATION
            loss.backward()
            if (number + 1) % ACCUMULATION == 0:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        perplexities.append(perplexity(model, validation_loader))
    states = model.module.state_dict()
    if dist.get_rank() == 0:
        model.module.save_pretrained(folder, state_dict=states)
    return perplexities


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        perplexities = train(folder)
    if dist.get_rank() == 0:
        print("perplexity", *(f"{value:.1f}" for value in perplexities))
    dist.destroy_process_group()
