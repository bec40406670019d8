"""QLoRA with TRL's ``SFTTrainer`` over thinwire beside its own DDP: bases quantized by torchao and by bitsandbytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.frameworks.transformers import arguments, logged, over, reader, tokenizer_of, transformers
from tests.support.paths import ROOT
from tests.support.training.quantized import plain_tensors
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from thinwire.spec import Plan
from thinwire.testing import run_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.filterwarnings("default")]

TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
LIBRARIES = ("torchao", "bitsandbytes")


def save_base(directory: Path) -> Path:
    """A base that every rank loads."""
    base = directory / "base"
    if dist.get_rank() == 0:
        reader(len(tokenizer_of(TEXT))).save_pretrained(base)
    dist.barrier()
    return base


def quantized(base: Path, library: str) -> Any:
    if library == "torchao":
        from torchao.quantization import Int8WeightOnlyConfig

        how = transformers.TorchAoConfig(Int8WeightOnlyConfig())
    else:
        how = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    options = {"quantization_config": how, "device_map": "cpu", "dtype": torch.float32}
    return transformers.AutoModelForCausalLM.from_pretrained(base, **options)


def supervised(
    base: Path, directory: Path, library: str, plan: str | None, resume: str | None = None
) -> list[dict[str, float]]:
    import datasets
    import peft
    import trl

    torch.manual_seed(0)
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
    data = datasets.Dataset.from_dict({"text": [TEXT[i : i + 60] for i in range(0, 6000, 60)]})
    saving = {"save_strategy": "steps", "save_steps": 2}
    settings = arguments(directory, trl.SFTConfig, max_steps=4, max_length=64, bf16=False, **saving)
    options = {"train_dataset": data, "processing_class": tokenizer_of(TEXT), "peft_config": lora}
    trainer = over(plan, trl.SFTTrainer)(quantized(base, library), settings, **options)
    if plan is None:
        # DDP cannot broadcast wrappers.
        wrappers = [name for name, value in trainer.model.named_parameters() if hasattr(value, "__tensor_flatten__")]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(trainer.model, wrappers)
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model()
    return logged(trainer, "loss", "grad_norm")


def compare(directory: Path, library: str) -> None:
    base = save_base(directory)
    want = supervised(base, directory / "ddp", library, None)
    for plan in ("zero3", "zero1"):
        got = supervised(base, directory / plan, library, plan)
        exact = 2e-6 if library == "torchao" else 2e-2  # TRL's adapters beside bitsandbytes are in bf16
        for one, other in zip(got, want, strict=True):
            assert one["loss"] == pytest.approx(other["loss"], rel=min(exact, 1e-4))
            assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=exact)
        again = supervised(base, directory / plan, library, plan, str(directory / plan / "checkpoint-2"))
        assert again[2:] == got[2:]
        assert (directory / plan / "adapter_model.safetensors").exists()


@pytest.mark.slow
@pytest.mark.parametrize("library", LIBRARIES)
def test_adapters_train_as_under_ddp(library: str, tmp_path: Path) -> None:
    for needed in ("trl", "peft", "datasets", library):
        pytest.importorskip(needed)
    run_ranks(2, compare, tmp_path, library, timeout=250)


def save_and_load(directory: Path, library: str) -> None:
    """A quantized model is written as transformers does, from its shares."""
    base = save_base(directory)
    model = quantized(base, library).requires_grad_(False)
    want = plain_tensors(model.state_dict())
    model.model.norm.requires_grad_(True)
    tw.shard(model, Plan.preset("zero3", nodes=1, local=2, compute_dtype="float32"))
    model.save_pretrained(directory / "saved")
    got = plain_tensors(
        transformers.AutoModelForCausalLM.from_pretrained(directory / "saved", device_map="cpu").state_dict()
    )
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], value) for name, value in want.items())


@pytest.mark.slow
@pytest.mark.parametrize("library", LIBRARIES)
def test_what_is_saved_is_what_was_loaded(library: str, tmp_path: Path) -> None:
    pytest.importorskip(library)
    run_ranks(2, save_and_load, tmp_path, library, timeout=120)
