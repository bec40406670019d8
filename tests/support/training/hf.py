"""Hugging Face models and their batches."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

SIZES: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}


def build(kind: str) -> nn.Module:
    import transformers

    torch.default_generator.manual_seed(0)
    match kind:
        case "llama":
            config = transformers.LlamaConfig(**SIZES, intermediate_size=56, num_key_value_heads=2)
        case "llama-tied":
            config = transformers.LlamaConfig(**SIZES, intermediate_size=56, tie_word_embeddings=True)
        case "gpt2":
            quiet = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
            config = transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=3, n_head=4, n_positions=32, **quiet)
        case "mixtral":
            experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}
            config = transformers.MixtralConfig(**SIZES, intermediate_size=40, num_key_value_heads=2, **experts)
        case _:
            raise AssertionError(kind)
    return transformers.AutoModelForCausalLM.from_config(config)


def batches(step: int, world: int) -> list[torch.Tensor]:
    ids = torch.randint(0, 64, (2 * world, 12), generator=torch.Generator().manual_seed(step))
    return list(ids.chunk(world))


def assert_adapters_train_alike(
    model: Any, optim: torch.optim.Optimizer, reference: Any, plain: torch.optim.Optimizer, what: str
) -> None:
    """Train the adapters of a sharded model and those of one process beside each other, on the same data on every rank,
    so that means over ranks are exact; losses, gradients and outputs without adapters are equal in every bit."""
    for step in range(3):
        (ids,) = batches(step, 1)
        mine, its = (each(input_ids=ids, labels=ids).loss for each in (model, reference))
        assert torch.equal(mine, its), what
        mine.backward()
        its.backward()
        for (name, share), parameter in zip(model.named_parameters(), reference.parameters(), strict=True):
            if parameter.requires_grad:
                assert torch.equal(share.grad.full_tensor(), parameter.grad), (what, name)
        for each in (optim, plain):
            each.step()
            each.zero_grad()
    with torch.no_grad(), model.disable_adapter(), reference.disable_adapter():  # GRPO's reference
        assert torch.equal(model(input_ids=ids).logits, reference(input_ids=ids).logits), what


class Adapted(nn.Module):
    """A frozen layer plus a trainable product of two thin matrices."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer
        self.a = nn.Parameter(torch.randn(2, layer.in_features) / 8)
        self.b = nn.Parameter(torch.randn(layer.out_features, 2) / 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + x @ self.a.T @ self.b.T


def prepare(kind: str, *, adapted: bool) -> nn.Module:
    model = build(kind)
    if adapted:
        model.requires_grad_(False)
        for layer in model.model.layers:
            for name in ("q_proj", "v_proj"):
                setattr(layer.self_attn, name, Adapted(getattr(layer.self_attn, name)))
    return model.train()
