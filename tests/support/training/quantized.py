"""Models whose frozen weights are quantized: by torchao, by bitsandbytes, and by a tensor subclass of our own; or that
have the values which a codec leaves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.training.hf import build
from torch import nn

from thinwire import codecs
from thinwire.spec import CodecSpec

KINDS = ("own", "int8", "nf4", "bnb", "bnb-bf16")
"""What weights are kept in."""


class Coded(torch.Tensor):
    """A weight in float8, with one scale for each row: a wrapper that needs no library."""

    codes: torch.Tensor
    scales: torch.Tensor

    @staticmethod
    def __new__(cls: type[Coded], codes: torch.Tensor, scales: torch.Tensor) -> Coded:
        made: Coded = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scales.dtype, device=codes.device)
        made.codes, made.scales = codes, scales
        return made

    @classmethod
    def of(cls, weight: torch.Tensor) -> Coded:
        scales = weight.abs().amax(1, keepdim=True) / 448
        return cls((weight / scales).to(torch.float8_e4m3fn), scales)

    def dequantize(self) -> torch.Tensor:
        return self.codes.to(self.scales.dtype) * self.scales

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scales"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], settings: None, size: Any, stride: Any) -> Coded:
        return Coded(inner["codes"], inner["scales"])

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.linear:
            x, weight, *_ = args
            return x @ weight.dequantize().to(x.dtype).T
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default):
            return cls(*(func(each, **(kwargs or {})) for each in (args[0].codes, args[0].scales)))
        raise NotImplementedError(func)


def quantized(kind: str) -> nn.Module:
    """A Llama whose linear layers are frozen and quantized, except the head."""
    model = build("llama").requires_grad_(False)
    for module in list(model.model.modules()):
        for name, linear in list(module.named_children()):
            if isinstance(linear, nn.Linear):
                setattr(module, name, _quantized(linear, kind))
    return model


def _quantized(linear: nn.Linear, kind: str) -> nn.Linear:
    match kind:
        case "own":
            linear.weight = nn.Parameter(Coded.of(linear.weight), requires_grad=False)
        case "int8":
            torchao = pytest.importorskip("torchao.quantization")
            torchao.quantize_(linear, torchao.Int8WeightOnlyConfig())
        case "nf4":
            nf4 = pytest.importorskip("torchao.quantization.quantize_.workflows.nf4.nf4_tensor")
            blocks = min(256, linear.weight.numel() // 32)
            linear.weight = nn.Parameter(nf4.to_nf4(linear.weight.data, 32, blocks), requires_grad=False)
        case "bnb" | "bnb-bf16":
            bnb = pytest.importorskip("bitsandbytes")
            storage = torch.bfloat16 if kind == "bnb-bf16" else torch.uint8
            options = {"quant_type": "nf4", "quant_storage": storage}
            layer = bnb.nn.Linear4bit(linear.in_features, linear.out_features, False, torch.float32, **options)
            layer.weight = bnb.nn.Params4bit(linear.weight.data, requires_grad=False, module=layer, **options)
            layer.support_avx512bf16_for_cpu = False  # it would compute in bf16 where a CPU can
            return layer.to("cpu")
        case _:
            raise AssertionError(kind)
    return linear


def adapted(kind: str) -> nn.Module:
    """The same with adapters by peft that change its outputs."""
    import peft

    lora = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(quantized(kind), lora)
    torch.default_generator.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.05)
    return model.train()


def rounded(model: nn.Module, codec: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The model with the values that a codec of whole blocks leaves of its frozen matrices."""
    spec = CodecSpec(codec)
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.requires_grad and parameter.dim() > 1:
                flat = parameter.to(dtype).flatten()
                blocks = nn.functional.pad(flat, (0, -len(flat) % spec.block))
                wire = codecs.get(spec).encode(blocks)
                values = codecs.get(spec).decode(wire, blocks.numel(), dtype)
                parameter.copy_(values[: len(flat)].view_as(parameter))
    return model


def plain_tensors(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of a state dict with those inside wrappers in their places, as bytes."""
    found = {}
    for name, value in state.items():
        if hasattr(value, "__tensor_flatten__"):
            inner, _ = value.__tensor_flatten__()
            found |= plain_tensors({f"{name}.{each}": getattr(value, each) for each in inner})
        else:
            flat = value.detach().reshape(-1)
            found[name] = torch.empty(len(flat), dtype=flat.dtype).copy_(flat).view(torch.uint8)
    return found
