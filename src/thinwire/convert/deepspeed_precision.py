"""Rules for DeepSpeed's dtypes and loss scale: ``fp16``, ``bf16``, ``communication_data_type``, ``data_types``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from thinwire.convert.outcome import Judgement, ignored, mapped, refused
from thinwire.convert.source import (
    AUTO,
    Rule,
    Rules,
    Source,
    at_least_1,
    because,
    flag,
    named,
    number,
    off,
    switch,
    to_plan,
    to_recipe,
    where,
    whole,
)

_DTYPES: Final = {
    "fp32": "float32",
    "float32": "float32",
    "float": "float32",
    "torch.float32": "float32",
    "fp16": "float16",
    "float16": "float16",
    "half": "float16",
    "torch.float16": "float16",
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
    "torch.bfloat16": "bfloat16",
}
_BYTES: Final = {"float32": 4, "float16": 2, "bfloat16": 2}


def compute_dtype(source: Source) -> str:
    """The dtype of parameters in forward and backward: the one that is enabled; the default of plans if one is
    ``"auto"`` and none is enabled; otherwise float32."""
    if _enabled(source, "fp16"):
        return "float16"
    sections = [source.table.get(section) for section in ("fp16", "bf16", "bfloat16")]
    is_auto = any(isinstance(section, Mapping) and section.get("enabled") == AUTO for section in sections)
    return "bfloat16" if is_auto or _enabled(source, "bf16") or _enabled(source, "bfloat16") else "float32"


def compute_itemsize(source: Source) -> int:
    """Bytes of one parameter element in forward and backward."""
    return _BYTES[compute_dtype(source)]


def wire_itemsize(source: Source) -> int:
    """Bytes of one gradient element on the wire."""
    named = source.get("communication_data_type")
    dtype = _DTYPES.get(named.lower()) if isinstance(named, str) else None
    return _BYTES[dtype or compute_dtype(source)]


def _enabled(source: Source, section: str) -> bool:
    return source.get(f"{section}.enabled", False) is True


def _half(dtype: str, others: tuple[str, ...]) -> Rule:
    """The rule for ``enabled`` of a 16-bit dtype."""

    def rule(_value: bool, source: Source) -> Judgement:
        both = [other for other in others if _enabled(source, other)]
        if both:
            return refused(f"{both[0]}.enabled is true as well; enable one of them")
        recipe = _left_out_scale(source) if dtype == "float16" else {}
        return mapped(plan={"compute_dtype": dtype}, recipe=recipe, note="masters are fp32")

    return switch(rule)


def _left_out_scale(source: Source) -> dict[str, Any]:
    """What DeepSpeed's dynamic loss scale has by default and a recipe's has not."""
    given = "loss_scale_window" in source.keys("fp16") or source.get("fp16.loss_scale", 0)
    return {} if given else {"loss_scale.growth_interval": 1000}


def _with_fp16(rule: Rule) -> Rule:
    """Apply a rule of the loss scale where fp16 is enabled."""

    def checked(value: Any, source: Source) -> Judgement:
        return rule(value, source) if _enabled(source, "fp16") else ignored("fp16 is off")

    return checked


def _dynamic(rule: Rule) -> Rule:
    """Apply a rule of the dynamic loss scale where fp16 is enabled and the scale is not constant."""

    def checked(value: Any, source: Source) -> Judgement:
        return ignored("the loss scale is constant") if source.get("fp16.loss_scale", 0) else rule(value, source)

    return _with_fp16(checked)


def _constant_scale(value: float, _source: Source) -> Judgement:
    if value == 0:
        return ignored("0 is the dynamic loss scale, the default")
    if value < 0:
        return refused("expected 0, for a dynamic scale, or a number above 0")
    keys = {"initial": value, "growth": 1.0, "backoff": 1.0, "floor": min(1.0, value)}
    return mapped(recipe={f"loss_scale.{key}": item for key, item in keys.items()})


def _initial_scale(value: int, source: Source) -> Judgement:
    if value > 127:
        return refused("expected at most 127: a loss scale is an fp32 number")
    least = source.get("fp16.min_loss_scale", 1)
    if isinstance(least, int | float) and 2.0**value < least:
        return refused(f"2^{value} is below fp16.min_loss_scale = {least}")
    return mapped(recipe={"loss_scale.initial": 2.0**value})


def _hysteresis(value: int, _source: Source) -> Judgement:
    return ignored("every overflow lowers the scale" + ("" if value <= 1 else ", without tolerating the first ones"))


def _overflow_check(value: bool, _source: Source) -> Judgement:
    if value:
        return mapped(recipe={"train.on_nonfinite": "skip"})
    return mapped(recipe={"train.on_nonfinite": "stop"}, note="a step that is not finite is never applied")


def _accumulate_dtype(dtype: str, _source: Source) -> Judgement:
    if dtype == "float16":
        return refused("gradients accumulate in bf16 or fp32; use --set data_types.grad_accum_dtype=fp32")
    return mapped(plan={"accumulate_dtype": dtype})


def _param_dtype(dtype: str, source: Source) -> Judgement:
    if dtype == compute_dtype(source):
        return ignored("the compute dtype")
    return refused(f"parameters have the compute dtype, {compute_dtype(source)}; enable bf16 or fp16 to change it")


def _fp32_modules(value: Any, _source: Source) -> Judgement:
    if value == []:
        return ignored("off")
    return refused('write [[units]] with match = NAME and dtype = "float32" into the plan instead')


_FLOOR: Final = where(
    lambda value: value > 0, "a number above 0; loss_scale.floor is 1.0 by default", to_recipe("loss_scale.floor")
)
_BF16: Final[Rules] = {
    "enabled": _half("bfloat16", ("fp16",)),
    "immediate_grad_update": because("gradients are reduced as soon as the backward produces them"),
    "check_grad_overflow": flag(_overflow_check),
    "bf16_master_weights_and_grads": off("masters are fp32", "leave it out"),
    "bf16_optimizer_states": off("optimizer states are fp32", "leave it out"),
}

PRECISION_RULES: Final[Rules] = {
    "fp16": {
        "enabled": _half("float16", ("bf16", "bfloat16")),
        "auto_cast": because("inputs of units are always cast"),
        "loss_scale": number(_with_fp16(_constant_scale)),
        "initial_scale_power": whole(_dynamic(_initial_scale)),
        "loss_scale_window": whole(_dynamic(at_least_1(to_recipe("loss_scale.growth_interval")))),
        "hysteresis": whole(_dynamic(_hysteresis)),
        "consecutive_hysteresis": because("every overflow lowers the scale"),
        "min_loss_scale": number(_dynamic(_FLOOR)),
        "fp16_master_weights_and_grads": off("masters are fp32", "leave it out"),
    },
    "bf16": _BF16,
    "bfloat16": _BF16,
    "torch_autocast": {
        "enabled": off("there is no autocast; units compute in one dtype", "enable bf16 instead"),
        "dtype": because("it applies where torch_autocast is enabled"),
        "lower_precision_safe_modules": because("it applies where torch_autocast is enabled"),
    },
    "communication_data_type": named(to_plan("reduce_dtype"), _DTYPES),
    "seq_parallel_communication_data_type": because("there is no sequence parallelism beside tp"),
    "data_types": {
        "grad_accum_dtype": named(_accumulate_dtype, _DTYPES),
        "param_dtype": named(_param_dtype, _DTYPES),
        "buffer_dtype": because("buffers keep the dtype of the model"),
        "keep_in_fp32_modules": _fp32_modules,
    },
}
