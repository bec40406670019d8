"""Train a small Llama with Hugging Face's Trainer over thinwire.

torchrun --nproc-per-node 4 examples/trainer.py --plan zero3
"""

from __future__ import annotations

import argparse

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from thinwire.integrations.transformers import ThinwireArguments, ThinwireTrainer


class Counting(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Sequences that count upwards from a random number, modulo the vocabulary."""

    def __init__(self, vocabulary: int, length: int, number: int) -> None:
        starts = torch.randint(0, vocabulary, (number, 1), generator=torch.Generator().manual_seed(0))
        self.tokens = (starts + torch.arange(length)) % vocabulary

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", default="zero3", help="a preset or a plan file")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--out", default="runs/trainer")
    options = parser.parse_args()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    arguments = ThinwireArguments(
        options.out,
        plan=options.plan,
        max_steps=options.steps,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        logging_steps=10,
        eval_strategy="steps",
        eval_steps=10,
        save_steps=options.steps,
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
        dataloader_pin_memory=torch.cuda.is_available(),
        disable_tqdm=True,
    )
    trainer = ThinwireTrainer(
        LlamaForCausalLM(config), arguments, train_dataset=Counting(64, 16, 4096), eval_dataset=Counting(64, 16, 64)
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
