"""Rules for DeepSpeed's ``optimizer`` and ``scheduler``. Recipes train with AdamW, linear warm-up and cosine decay."""

from __future__ import annotations

from typing import Any, Final

from thinwire.convert.outcome import Judgement, ignored, mapped, refused
from thinwire.convert.source import Rule, Rules, Source, at_least_1, because, flag, number, off, to_recipe, where, whole

_DEFAULTS: Final[dict[str, Any]] = {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}
"""Those of DeepSpeed's Adam."""

_TORCH_DECAY: Final = 0.01
"""``weight_decay`` of torch's AdamW, the class under ``torch_adam``, where it is left out; other defaults are alike."""

_PEAK: Final = 0.001
"""``warmup_max_lr`` of WarmupDecayLR where it is left out, and of WarmupLR before DeepSpeed 0.17.2."""

_ONE_BIT: Final = ("onebitadam", "onebitlamb", "zerooneadam")
_OTHERS: Final = ("adagrad", "lamb", "muadam", "muadamw", "musgd", "lion", "muon", "sgd")


def _type(value: Any, source: Source) -> Judgement:
    name = value.lower() if isinstance(value, str) else ""
    if name in _ONE_BIT:
        return refused(
            "thinwire compresses gradients and keeps plain AdamW: --set optimizer.type=AdamW, then wire.dp with a 2- "
            "to 4-bit codec and wire.error_feedback = true in the plan"
        )
    if name not in ("adam", "adamw"):
        known = "DeepSpeed's optimizer" if name in _OTHERS else "this optimizer"
        return refused(
            f"a recipe trains with AdamW; keep {known} in your own loop with tw.optimizer(model, CLASS, ...), or "
            "--set optimizer.type=AdamW"
        )
    decay = source.get("optimizer.params.weight_decay", 0.0)
    is_l2 = name == "adam" and not source.get("optimizer.params.adam_w_mode", True)
    if is_l2 and decay:
        return refused(
            "Adam with L2 regularization is not AdamW; keep it in your own loop with tw.optimizer(model, "
            "torch.optim.Adam, ...), or --set optimizer.params.adam_w_mode=true"
        )
    given = {*source.keys("optimizer.params")}
    if source.get("scheduler.params.warmup_max_lr") is not None:
        given.add("lr")
    is_torch = source.get("optimizer.params.torch_adam", False)
    defaults = _DEFAULTS | ({"weight_decay": _TORCH_DECAY} if is_torch and not is_l2 else {})
    values = {f"optimizer.{key}": item for key, item in defaults.items() if key not in given}
    whose = "torch" if is_torch else "DeepSpeed"
    return mapped(recipe=values, note="AdamW" + (f", with {whose}'s defaults" if values else ""))


def _positive(rule: Rule) -> Rule:
    return number(where(lambda value: value > 0, "a number above 0", rule))


def _lr(value: float, source: Source) -> Judgement:
    if source.get("scheduler.params.warmup_max_lr") is not None:
        return ignored("scheduler.params.warmup_max_lr replaces it")
    is_peak = source.get("scheduler.type") == "WarmupLR" and "warmup_max_lr" not in source.keys("scheduler.params")
    note = f"DeepSpeed before 0.17.2 took {_PEAK} instead: --set scheduler.params.warmup_max_lr={_PEAK} for that"
    return mapped(recipe={"optimizer.lr": value}, note=note if is_peak and value != _PEAK else "")


def _betas(value: Any, _source: Source) -> Judgement:
    if not isinstance(value, list) or len(value) != 2:
        return refused("expected two numbers")
    return mapped(recipe={"optimizer.betas": value})


def _bias_correction(value: bool, _source: Source) -> Judgement:
    return ignored("always on") if value else refused("AdamW corrects the bias of its moments; leave it out")


_TOGETHER: Final = because("another implementation of the same update")

_OF_ONE_BIT: Final = dict.fromkeys(
    (
        "freeze_step", "cuda_aware", "comm_backend_name", "var_freeze_step", "var_update_scaler", "local_step_scaler",
        "local_step_clipper",
    ),
    because("a parameter of the 1-bit optimizers"),
)  # fmt: skip

OPTIMIZER_RULES: Final[Rules] = {
    "type": _type,
    "params": {
        "lr": _positive(_lr),
        "betas": _betas,
        "eps": number(to_recipe("optimizer.eps")),
        "weight_decay": number(to_recipe("optimizer.weight_decay", "norms, biases and other vectors do not decay")),
        "bias_correction": flag(_bias_correction),
        "adam_w_mode": because("optimizer.type decides"),
        "torch_adam": _TOGETHER,
        "fused": _TOGETHER,
        "foreach": _TOGETHER,
        "set_grad_none": because("gradients are freed after the step"),
        "amsgrad": off("AMSGrad is not supported in a recipe", "leave it out"),
        "max_grad_norm": off("DeepSpeed does not support it either", "use gradient_clipping"),
        **_OF_ONE_BIT,
        "max_coeff": because("a parameter of LAMB"),
        "min_coeff": because("a parameter of LAMB"),
        "momentum": because("a parameter of SGD and Muon"),
    },
    "legacy_fusion": _TOGETHER,
}


def _scheduler(value: Any, source: Source) -> Judgement:
    given = source.keys("scheduler.params")
    if value not in ("WarmupLR", "WarmupCosineLR"):
        is_left_out = value == "WarmupDecayLR" and "warmup_max_lr" not in given
        peak = f" with its peak, --set scheduler.params.warmup_max_lr={_PEAK}" if is_left_out else ""
        return refused(
            "a recipe's learning rate warms up linearly, then stays or decays by a cosine: --set "
            f"scheduler.type=WarmupCosineLR or WarmupLR{peak}, or keep the scheduler in your own loop and "
            "--drop scheduler"
        )
    if source.get("scheduler.params.warmup_type", "log") != "linear":
        return refused(
            "DeepSpeed warms up by a logarithm unless warmup_type says otherwise, a recipe linearly: --set "
            "scheduler.params.warmup_type=linear, or --drop scheduler"
        )
    # Without the key, DeepSpeed warms up for 1000 steps; with "auto", for as many as the Trainer computes.
    warmup = {} if "warmup_num_steps" in given else {"optimizer.warmup": 1000}
    if value == "WarmupLR":
        return mapped(recipe={"optimizer.final_lr_share": 1.0, **warmup}, note="constant after the warm-up")
    share = source.get("scheduler.params.cos_min_ratio", 0.0001)
    return mapped(recipe={"optimizer.final_lr_share": share, **warmup})


def _from_zero(value: float, _source: Source) -> Judgement:
    return ignored("the warm-up starts near 0") if value == 0 else refused("a recipe warms up from 0; set it to 0")


_WITH_TYPE: Final = because("scheduler.type covers it")

_OF_OTHERS: Final = dict.fromkeys(
    (
        "lr_range_test_min_lr", "lr_range_test_step_size", "lr_range_test_step_rate", "lr_range_test_staircase",
        "cycle_min_lr", "cycle_max_lr", "decay_lr_rate", "cycle_first_step_size", "cycle_second_step_size",
        "cycle_first_stair_count", "cycle_second_stair_count", "decay_step_size", "cycle_momentum", "cycle_min_mom",
        "cycle_max_mom", "decay_mom_rate",
    ),
    because("a parameter of LRRangeTest or OneCycle"),
)  # fmt: skip

SCHEDULER_RULES: Final[Rules] = {
    "type": _scheduler,
    "params": {
        "warmup_min_lr": number(_from_zero),
        "warmup_min_ratio": number(_from_zero),
        "warmup_max_lr": _positive(to_recipe("optimizer.lr")),
        "warmup_num_steps": whole(to_recipe("optimizer.warmup", "DeepSpeed's first step has a learning rate of 0")),
        "warmup_type": _WITH_TYPE,
        "cos_min_ratio": _WITH_TYPE,
        "total_num_steps": whole(at_least_1(to_recipe("train.steps"))),
        "last_batch_iteration": because("a run resumes from its checkpoint"),
        **_OF_OTHERS,
    },
}
