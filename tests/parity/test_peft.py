"""Adapters by peft train under every preset as they do in one process, and are saved in peft's own format."""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.ranks import on_ranks
from tests.support.training.edge import ADAMW, TOLERANCE, gap, plan, whole
from tests.support.training.hf import batches
from tests.support.training.hf import build as build_model
from torch import nn

import thinwire as tw

pytestmark = pytest.mark.ranks

TARGETS = {"llama": ["q_proj", "v_proj"], "gpt2": ["c_attn"], "mixtral": ["q_proj", "v_proj"]}


def adapted(kind: str, *, checkpointing: bool = False, **options: Any) -> nn.Module:
    """A model with adapters; LoRA's second factor begins at zero, so its values are drawn to make them count."""
    import peft

    model = build_model(kind)
    lora = peft.LoraConfig(r=4, lora_alpha=8, target_modules=TARGETS[kind], task_type="CAUSAL_LM", **options)
    model = peft.get_peft_model(model, lora)
    torch.default_generator.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.05)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    return model.train()


def generate(model: nn.Module) -> torch.Tensor:
    model.eval()
    try:
        return model.generate(input_ids=torch.tensor([[5, 9, 2]]), max_new_tokens=4, do_sample=False, pad_token_id=0)
    finally:
        model.train()


def loss(model: nn.Module, part: torch.Tensor) -> torch.Tensor:
    return model(input_ids=part, labels=part).loss


def check_saved(model: nn.Module, reference: nn.Module, kind: str) -> None:
    """peft loads the files of ``save_pretrained`` into a fresh base model, which computes the same."""
    import peft

    states = tw.full_state_dict(model)
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder, src=0)
    if dist.get_rank() == 0:
        model.save_pretrained(folder[0], state_dict=states)
    dist.barrier()
    size = Path(folder[0], "adapter_model.safetensors").stat().st_size
    trained = sum(p.numel() for p in reference.parameters() if p.requires_grad)
    assert size < 4 * trained + 20_000, "only what was trained is saved"
    loaded = peft.PeftModel.from_pretrained(build_model(kind), folder[0]).eval()
    part = batches(9, 1)[0]
    with torch.no_grad():
        assert torch.allclose(loss(loaded, part), loss(reference.eval(), part), atol=TOLERANCE)
    reference.train()


def check(kind: str, name: str, *, checkpointing: bool = False, **options: Any) -> None:
    label = f"{kind} under {name}, {options}"
    rank, world = dist.get_rank(), dist.get_world_size()
    reference = adapted(kind, checkpointing=checkpointing, **options)
    model = tw.shard(adapted(kind, checkpointing=checkpointing, **options), plan(name))
    optim = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], **ADAMW)
    plain = torch.optim.AdamW([p for p in reference.parameters() if p.requires_grad], **ADAMW)
    for step in range(3):
        parts = batches(step, world)
        loss(model, parts[rank]).backward()
        optim.step()
        optim.zero_grad()
        for part in parts:
            (loss(reference, part) / world).backward()
        plain.step()
        plain.zero_grad()
    assert torch.equal(generate(model), generate(reference)), label
    with torch.no_grad(), model.disable_adapter(), reference.disable_adapter():
        assert torch.allclose(loss(model, parts[0]), loss(reference, parts[0]), atol=TOLERANCE), label
    with tw.full_parameters(model):
        assert torch.equal(generate(model), generate(reference)), label
    check_saved(model, reference, kind)
    error = gap(whole(model), list(reference.parameters()))
    assert error <= TOLERANCE, f"{label}: parameters differ by {error:.1e}"


@pytest.mark.slow
@on_ranks(4)
def test_lora_under_every_preset_and_with_its_options() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in ("ddp", "zero1", "zero2", "zero3", "hpz"):
            check("llama", name)
        check("llama", "zero3", checkpointing=True)
        check("llama", "zero3", use_dora=True)
        check("llama", "hpz", modules_to_save=["lm_head"])
        check("llama", "zero3", use_rslora=True, bias="all")
        check("gpt2", "zero3", fan_in_fan_out=True)
        check("mixtral", "zero3")


@pytest.mark.slow
@on_ranks(4)
def test_merging_without_gradients_is_exact_under_lossy_gathers() -> None:
    reference = adapted("llama")
    model = tw.shard(adapted("llama"), plan("zeropp"))
    with torch.no_grad():
        model.merge_adapter()
    reference.merge_adapter()
    assert gap(whole(model), list(reference.parameters())) <= 1e-6
