"""Train a small Llama in a loop of one's own with accelerate over thinwire.

torchrun --nproc-per-node 4 examples/accelerate_loop.py --plan zero3
"""

from __future__ import annotations

import argparse

import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, get_scheduler

from thinwire.integrations.accelerate import ThinwireAccelerator


def sequences(number: int, vocabulary: int = 64, length: int = 16) -> list[torch.Tensor]:
    """Sequences that count upwards from a random number, modulo the vocabulary; ``[length]`` each."""
    starts = torch.randint(0, vocabulary, (number, 1), generator=torch.Generator().manual_seed(0))
    return list((starts + torch.arange(length)) % vocabulary)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", default="zero3", help="a preset or a plan file")
    parser.add_argument("--batches", type=int, default=60, help="micro-batches of each rank")
    parser.add_argument("--out", default="runs/accelerate")
    options = parser.parse_args()
    torch.manual_seed(0)
    accelerator = ThinwireAccelerator(
        plan=options.plan, gradient_accumulation_steps=2, cpu=not torch.cuda.is_available()
    )
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
    )
    batches = options.batches * accelerator.num_processes
    training = DataLoader(sequences(4 * batches), batch_size=4, shuffle=True)
    validation = DataLoader(sequences(30), batch_size=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = get_scheduler("linear", optimizer, num_warmup_steps=10, num_training_steps=len(training))
    model, optimizer, training, validation, scheduler = accelerator.prepare(
        model, optimizer, training, validation, scheduler
    )

    for number, batch in enumerate(training):
        with accelerator.accumulate(model):
            loss = model(input_ids=batch, labels=batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if (number + 1) % 20 == 0:
            accelerator.print(f"batch {number + 1}, loss {loss.item():.3f}")
    accelerator.save_state(f"{options.out}/state")

    model.eval()
    right = total = 0
    for batch in validation:
        with torch.no_grad():
            guesses = model(input_ids=batch).logits.argmax(-1)
        guesses, batch = accelerator.gather_for_metrics((guesses, batch))
        right += int((guesses[:, :-1] == batch[:, 1:]).sum())
        total += batch[:, 1:].numel()
    accelerator.print(f"accuracy {right / total:.3f} over {total} tokens")
    weights = accelerator.get_state_dict(model)
    accelerator.unwrap_model(model).save_pretrained(
        options.out, state_dict=weights, is_main_process=accelerator.is_main_process
    )
    accelerator.end_training()


if __name__ == "__main__":
    main()
