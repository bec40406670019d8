"""Fine-tune adapters (LoRA) of a small Llama on a text with TRL's SFTTrainer over thinwire.

torchrun --nproc-per-node 4 examples/sft_lora.py --text README.md
"""

from __future__ import annotations

import argparse
from pathlib import Path

import datasets
import tokenizers
import torch
from peft import LoraConfig
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from thinwire.integrations.transformers import ThinwireTrainerMixin


class ThinwireSFTTrainer(ThinwireTrainerMixin, SFTTrainer):
    """TRL's trainer over thinwire."""


def characters(text: str) -> PreTrainedTokenizerFast:
    """A tokenizer of the characters of a text."""
    symbols = ["<unknown>", "<end>", *sorted(set(text))]
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({symbol: number for number, symbol in enumerate(symbols)}, "<unknown>")
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>", unk_token="<unknown>"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, default=Path("README.md"))
    parser.add_argument("--plan", default="zero3", help="a preset or a plan file")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--out", default="runs/sft")
    options = parser.parse_args()
    torch.manual_seed(0)
    text = options.text.read_text()
    tokenizer = characters(text)
    data = datasets.Dataset.from_dict({"text": [text[start : start + 60] for start in range(0, len(text) - 60, 60)]})
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
        )
    )
    trainer = ThinwireSFTTrainer(
        model,
        SFTConfig(
            options.out,
            max_steps=options.steps,
            per_device_train_batch_size=4,
            learning_rate=3e-2,
            max_length=64,
            logging_steps=10,
            save_steps=options.steps,
            report_to=[],
            bf16=False,
            use_cpu=not torch.cuda.is_available(),
            dataloader_pin_memory=torch.cuda.is_available(),
            disable_tqdm=True,
        ),
        train_dataset=data,
        processing_class=tokenizer,
        # The model has random weights: the embeddings and the output are trained whole.
        peft_config=LoraConfig(r=8, target_modules="all-linear", modules_to_save=["embed_tokens", "lm_head"]),
        plan=options.plan,
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
