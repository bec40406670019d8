"""Saves of whole weights hold one tensor at a time, and write the files that one process would write."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.ranks import on_ranks
from torch import nn

import thinwire as tw
from thinwire.errors import CheckpointError

transformers = pytest.importorskip("transformers")

from tests.support.families.tiny import random_model  # noqa: E402
from tests.support.frameworks.transformers import Text, arguments, build  # noqa: E402

from thinwire.integrations.accelerate import ThinwireAccelerator  # noqa: E402
from thinwire.integrations.transformers import ThinwireArguments, ThinwireTrainer  # noqa: E402

pytestmark = pytest.mark.ranks

PLAN = tw.Plan.preset("zero3", nodes=1, local=2, compute_dtype="float32")


def check_equal(folder: Path, want: Path) -> None:
    """The files of two directories, byte for byte."""
    dist.barrier()
    names = sorted(file.name for file in want.iterdir())
    assert sorted(file.name for file in folder.iterdir()) == names
    for name in names:
        assert (folder / name).read_bytes() == (want / name).read_bytes(), name


def save_beside(folder: Path, model: nn.Module, **options: Any) -> None:
    """Save a model sharded, and beside it whole."""
    whole = copy.deepcopy(model)
    tw.shard(model, PLAN)
    model.save_pretrained(folder / "sharded", **options)
    if dist.get_rank() == 0:
        whole.save_pretrained(folder / "whole", **options)
    check_equal(folder / "sharded", folder / "whole")


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
@on_ranks(2)
def test_files_equal_those_of_one_process(family: str, tmp_path: Path) -> None:
    """With an index, tied embeddings (gpt2), and experts whose weights are cut apart for the files (mixtral)."""
    save_beside(tmp_path, random_model(family), max_shard_size="20KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2


@pytest.mark.parametrize("safe", [True, False])
@on_ranks(2)
def test_adapters_equal_those_of_one_process(safe: bool, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    save_beside(tmp_path, peft.get_peft_model(build(), config), safe_serialization=safe, save_embedding_layers=False)


@on_ranks(2)
def test_learned_prompts_equal_those_of_one_process(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    common = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 3}
    for config in (
        peft.PromptTuningConfig(**common),
        peft.PromptEncoderConfig(**common, encoder_hidden_size=8),
        peft.PrefixTuningConfig(**common, prefix_projection=True, encoder_hidden_size=8),
    ):
        save_beside(tmp_path / str(config.peft_type.value), peft.get_peft_model(build(), config))


@on_ranks(2)
def test_prompts_whose_encoder_is_read_equal_those_of_one_process(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    common = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 3}
    tasks = peft.MultitaskPromptTuningConfig(**common, num_tasks=2, num_ranks=2)
    save_beside(tmp_path / "tasks", peft.get_peft_model(build(), tasks))
    frozen = peft.PromptTuningConfig(**common, inference_mode=True)
    save_beside(tmp_path / "frozen", peft.get_peft_model(build(), frozen))


@on_ranks(2)
def test_adapters_of_lower_ranks_equal_those_of_one_process(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    config = peft.AdaLoraConfig(init_r=4, target_r=2, total_step=9, target_modules=["q_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(build(), config)
    layers = [name for name, module in model.base_model.model.named_modules() if hasattr(module, "lora_E")]
    model.peft_config["default"].rank_pattern = {f"{name}.lora_E": [True, False, True, False] for name in layers}
    save_beside(tmp_path, model)


@on_ranks(2)
def test_changes_of_an_initial_adapter_equal_those_of_one_process(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights="pissa")
    model = peft.get_peft_model(build(), config)
    if dist.get_rank() == 0:
        model.save_pretrained(tmp_path / "initial")
    dist.barrier()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0)
    names = [name for name, _ in model.named_parameters()]
    save_beside(tmp_path, model, path_initial_model_for_weight_conversion=str(tmp_path / "initial"))
    assert [name for name, _ in model.named_parameters()] == names
    model(input_ids=torch.ones(1, 4, dtype=torch.long)).logits.sum().backward()


@on_ranks(2)
def test_tensors_of_other_dtypes(tmp_path: Path) -> None:
    """Buffers of other dtypes are saved as they are."""
    model = build()
    model.register_buffer("seen", torch.arange(3))
    model.register_buffer("mask", torch.tensor([True, False, True]))
    model.register_buffer("phases", torch.tensor([1 + 2j, 3 - 1j]))
    save_beside(tmp_path, model)


def by_the_trainer(folder: Path) -> None:
    trainer = ThinwireTrainer(build(), arguments(folder, ThinwireArguments, max_steps=1), train_dataset=Text(8))
    trainer.train()
    trainer.save_model(str(folder / "sharded"))
    whole = build()
    whole.config = trainer.model.config  # which the trainer changes
    whole.load_state_dict(tw.full_state_dict(trainer.model))
    if dist.get_rank() == 0:
        whole.save_pretrained(folder / "whole")
        (folder / "sharded" / "training_args.bin").unlink()
    check_equal(folder / "sharded", folder / "whole")


def by_accelerate(folder: Path) -> None:
    accelerator, model = ThinwireAccelerator(cpu=True), random_model("gpt2")
    whole = copy.deepcopy(model)
    made, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.save_model(made, folder / "sharded", max_shard_size="20KB")
    if dist.get_rank() == 0:
        super(ThinwireAccelerator, accelerator).save_model(whole, folder / "whole", max_shard_size="20KB")
    check_equal(folder / "sharded", folder / "whole")


@pytest.mark.parametrize("course", [by_the_trainer, by_accelerate], ids=lambda course: course.__name__)
@on_ranks(2)
def test_plug_ins_write_the_same(course: Callable[[Path], None], tmp_path: Path) -> None:
    course(tmp_path)


@on_ranks(2)
def test_every_rank_learns_that_the_first_cannot_write(tmp_path: Path) -> None:
    model = tw.shard(build(), PLAN)
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="save_pretrained: "):
        model.save_pretrained(tmp_path / "file" / "below")
    model.save_pretrained(tmp_path / "saved")


def resident(which: str) -> int:
    """Resident memory of this process in bytes: ``VmRSS`` now, ``VmHWM`` at most since the last reset."""
    return int(re.search(rf"{which}:\s+(\d+)", Path("/proc/self/status").read_text(encoding="utf-8"))[1]) << 10


@on_ranks(2)
def test_no_rank_holds_the_whole_state(tmp_path: Path) -> None:
    """A model of 400 MiB in one file."""
    config = transformers.LlamaConfig(
        vocab_size=2048, hidden_size=768, intermediate_size=2048, num_hidden_layers=14, num_attention_heads=12
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():  # drawing so many values would take longer than the rest
            parameter.fill_(1.0)
    state = sum(item.numel() * 4 for item in model.parameters())
    largest = max(item.numel() * 4 for item in model.parameters())
    tw.shard(model, PLAN)
    (tmp_path / "first").mkdir(exist_ok=True)
    build().save_pretrained(tmp_path / "first" / str(dist.get_rank()))  # what libraries import when they save
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    before = resident("VmRSS")
    model.save_pretrained(tmp_path / "saved")
    extra = resident("VmHWM") - before
    # A gather takes some three times its tensor, and the C library keeps what was freed.
    assert extra < 15 * largest < state / 4, (extra, largest, state)
    assert (tmp_path / "saved" / "model.safetensors").stat().st_size > state
