"""LoRA of PEFT in a ``LightningModule`` trains over thinwire as over DDP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from tests.support.frameworks.lightning import trainer, weights
from tests.support.ranks import on_ranks

pytest.importorskip("transformers")
peft = pytest.importorskip("peft")


class Adapted(pl.LightningModule):
    """A small Llama with adapters."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
        )
        self.model = peft.get_peft_model(
            LlamaForCausalLM(config), peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
        )
        self.losses: list[float] = []

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = self.model(input_ids=batch[0], labels=batch[0]).loss
        self.losses.append(float(self.trainer.strategy.reduce(loss.detach().clone())))
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW((p for p in self.parameters() if p.requires_grad), lr=0.05)


@pytest.mark.slow
@on_ranks(2)
def test_adapters_equal_ddp(tmp_path: Path) -> None:
    results = []
    tokens = (torch.arange(16) + torch.arange(64)[:, None]) % 64
    for strategy in ("ddp", "thinwire"):
        model = Adapted()
        data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(tokens), batch_size=4)
        trainer(2, strategy, str(tmp_path), gradient_clip_val=1.0, accumulate_grad_batches=2).fit(model, data)
        results.append((model.losses, weights(model)))
    (reference, whole), (losses, sharded) = results
    assert losses == pytest.approx(reference, rel=1e-5)
    assert losses[-1] < losses[0]
    adapters = [name for name in whole if "lora_" in name]
    assert len(adapters) == 8
    for name, value in whole.items():
        torch.testing.assert_close(sharded[name], value, rtol=1e-4, atol=1e-5, msg=name)
