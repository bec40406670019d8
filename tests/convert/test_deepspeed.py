"""DeepSpeed's JSON becomes a plan and a recipe: every key has a rule, and values arrive where they should."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.deepspeed_keys import REMOVED, SECTIONS, TOP

from thinwire.convert import Conversion, Row, from_deepspeed
from thinwire.convert.deepspeed import DEEPSPEED_RULES
from thinwire.convert.source import read_source
from thinwire.errors import SpecError, UsageError
from thinwire.spec import Factor, Plan
from thinwire.spec.plan_parts.residence import Residence
from thinwire.spec.recipe import OptimizerRecipe, Recipe

RANKS = Factor(local=4, nodes=2)


def convert(ranks: Factor = RANKS, **table: Any) -> Conversion:
    return from_deepspeed(table, ranks)


def zero(stage: int, **keys: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **keys}}


def row(conversion: Conversion, key: str) -> Row:
    (found,) = [row for row in conversion.rows if row.key == key]
    return found


def refusal(conversion: Conversion, key: str) -> str:
    judgement = row(conversion, key).judgement
    assert judgement.action == "refused"
    with pytest.raises(SpecError) as error:
        conversion.plan()
    assert judgement.text in str(error.value)
    return judgement.text


def recipe(conversion: Conversion, **needs: Any) -> Recipe:
    return Recipe.from_toml(conversion.recipe_toml(**{"model": "llama-7b", "steps": 3, **needs}))


@pytest.mark.parametrize("key", TOP)
def test_every_key_has_a_rule(key: str) -> None:
    assert key in DEEPSPEED_RULES


@pytest.mark.parametrize(("section", "key"), [(section, key) for section in SECTIONS for key in SECTIONS[section]])
def test_every_key_of_a_section_has_a_rule(section: str, key: str) -> None:
    rules = DEEPSPEED_RULES[section]
    assert not callable(rules)
    assert key in rules


@pytest.mark.slow
def test_the_names_of_keys_are_those_of_an_installed_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("deepspeed", reason="make bench-peers installs it")
    monkeypatch.setitem(os.environ, "DS_ACCELERATOR", "cpu")

    class Recorder(dict[str, Any]):
        """Remembers the keys that DeepSpeed looks up."""

        def __init__(self, *values: Any) -> None:
            super().__init__(*values)
            self.seen: set[str] = set()

        def get(self, key: str, default: Any = None) -> Any:
            self.seen.add(key)
            return super().get(key, default)

        def __contains__(self, key: object) -> bool:
            self.seen.add(str(key))
            return super().__contains__(key)

        def keys(self) -> Any:
            return self

        def __copy__(self) -> Recorder:
            return self

    config = importlib.import_module("deepspeed.runtime.config")
    recorder = Recorder({"train_batch_size": 1})
    config.DeepSpeedConfig(recorder)
    assert recorder.seen - {"sequence_parallel_size"} == set(TOP)
    models = {
        "zero_optimization": ("deepspeed.runtime.zero.config", "DeepSpeedZeroConfig"),
        "fp16": ("deepspeed.runtime.precision_config", "DeepSpeedFP16Config"),
        "bf16": ("deepspeed.runtime.precision_config", "DeepSpeedBF16Config"),
        "compile": ("deepspeed.compile.config", "CompileConfig"),
        "tensor_parallel": ("deepspeed.runtime.tensor_parallel.config", "TPTrainingConfig"),
        "tensorboard": ("deepspeed.monitor.config", "TensorBoardConfig"),
    }
    for section, (module, name) in models.items():
        fields = getattr(importlib.import_module(module), name).model_fields
        assert {field.alias or key for key, field in fields.items()} == set(SECTIONS[section]), section
    assert set(REMOVED) == set(config._REMOVED_ZERO_CONFIG_KEYS)


@pytest.mark.parametrize(("stage", "preset"), [(0, "ddp"), (1, "zero1"), (2, "zero2"), (3, "zero3")])
def test_a_stage_has_the_factors_of_its_preset(stage: int, preset: str) -> None:
    expected = Plan.preset(preset, nodes=2, local=4, compute_dtype="float32")
    assert convert(**zero(stage)).plan() == expected


def test_without_zero_optimization_nothing_is_sharded_and_dtypes_are_fp32() -> None:
    assert convert().plan() == Plan.preset("ddp", nodes=2, local=4, compute_dtype="float32")


def test_all_of_zeropp_is_the_preset() -> None:
    keys = {"zero_hpz_partition_size": 4, "zero_quantized_weights": True, "zero_quantized_gradients": True}
    plan = convert(bf16={"enabled": True}, **zero(3, **keys)).plan()
    assert plan.fingerprint() == Plan.preset("zeropp", nodes=2, local=4).fingerprint()


def test_quantized_frozen_weights_are_kept_in_blocks() -> None:
    plan = convert(bf16={"enabled": True}, **zero(3, zero_quantized_nontrainable_weights=True)).plan()
    assert plan == Plan.preset("zero3", nodes=2, local=4, frozen={"storage": "int8:256"})


@pytest.mark.parametrize(
    "key",
    [
        "zero_hpz_partition_size", "zero_quantized_weights", "zero_quantized_gradients",
        "zero_quantized_nontrainable_weights",
    ],
)  # fmt: skip
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_zeropp_has_no_effect_below_stage_3(stage: int, key: str) -> None:
    conversion = convert(**zero(stage, **{key: 4 if key == "zero_hpz_partition_size" else True}))
    assert row(conversion, f"zero_optimization.{key}").judgement.action == "ignored"
    assert conversion.plan() == convert(**zero(stage)).plan()


@pytest.mark.parametrize(("size", "factor"), [(2, "2x1"), (4, "4x1"), (8, "4x2")])
def test_mics_shards_within_a_group(size: int, factor: str) -> None:
    plan = convert(bf16={"enabled": True}, **zero(3, mics_shard_size=size, mics_hierarchical_params_gather=True)).plan()
    assert plan.fingerprint() == Plan.preset("mics", nodes=2, local=4, group=factor).fingerprint()


@pytest.mark.parametrize("key", ["mics_shard_size", "zero_hpz_partition_size"])
def test_a_group_that_fits_no_factor_is_refused(key: str) -> None:
    text = refusal(convert(**zero(3, **{key: 3})), f"zero_optimization.{key}")
    assert "valid are 1, 2, 4, 8" in text


def test_loco_is_error_feedback() -> None:
    loco = {"zero_quantized_gradients": True, "zeropp_loco_param": {"err_beta": 0.8, "reset_T": 1024}}
    assert convert(**zero(3, **loco)).plan().wire.error_feedback
    assert not convert(**zero(2, **loco)).plan().wire.error_feedback


def test_buckets_are_bytes_of_the_dtype_on_the_wire() -> None:
    bucket = zero(1, reduce_bucket_size=5e6)
    assert convert(**bucket).plan().bucket_bytes == 20_000_000
    assert convert(bf16={"enabled": True}, **bucket).plan().bucket_bytes == 10_000_000
    wide = convert(bf16={"enabled": True}, communication_data_type="fp32", **bucket).plan()
    assert (wide.bucket_bytes, wide.reduce_dtype) == (20_000_000, "float32")
    over_params = convert(**zero(3, reduce_bucket_size=5e6)).plan()
    assert (over_params.reduce_bytes, over_params.bucket_bytes) == (20_000_000, 4 << 20)
    replicated = convert(**zero(3, reduce_bucket_size=5e6, mics_shard_size=2)).plan()
    assert replicated.reduce_bytes == replicated.bucket_bytes == 20_000_000


def test_overlap_prefetch_and_live_parameters_can_be_switched_off() -> None:
    keys = {"overlap_comm": False, "stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 0}
    plan = convert(**zero(3, **keys)).plan()
    assert not any(getattr(plan.overlap, lane) for lane in ("gather", "reduce", "sync", "spread"))
    assert (plan.prefetch, plan.kept_unit) == (0, "none")
    assert convert(**zero(3, overlap_comm=True)).plan() == convert(**zero(3)).plan()


def test_batches_and_retention_of_stage_3_are_bytes_of_parameters() -> None:
    keys = {
        "stage3_prefetch_bucket_size": 5e7,
        "stage3_param_persistence_threshold": 1e5,
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 2e8,
    }
    plan = convert(bf16={"enabled": True}, **zero(3, **keys)).plan()
    assert (plan.prefetch_bytes, plan.gather_bytes) == (100_000_000, 100_000_000)
    assert (plan.persist_bytes, plan.live_bytes, plan.reuse_bytes) == (200_000, 2_000_000_000, 400_000_000)
    assert convert(**zero(2, **keys)).plan() == convert(**zero(2)).plan()
    assert convert(**zero(3, overlap_comm=False, stage3_prefetch_bucket_size=5e7)).plan().prefetch_bytes is None


def test_two_sizes_of_a_batch_give_the_third() -> None:
    def sizes(train: int | None, micro: int | None, steps: int | None) -> tuple[int, int]:
        given = {
            "train_batch_size": train,
            "train_micro_batch_size_per_gpu": micro,
            "gradient_accumulation_steps": steps,
        }
        plan = convert(**{key: value for key, value in given.items() if value is not None}).plan()
        return plan.micro_batch, plan.micro_batches

    assert sizes(64, 4, 2) == sizes(64, 4, None) == sizes(64, None, 2) == sizes(None, 4, 2) == (4, 2)
    assert sizes(64, None, None) == (8, 1)
    assert sizes(None, 4, None) == (4, 1)


def test_sizes_of_a_batch_that_do_not_fit_the_ranks_are_refused() -> None:
    batch = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 4}
    assert "8 data-parallel ranks make 128" in refusal(convert(**batch), "train_batch_size")
    assert "no multiple of 8" in refusal(convert(train_batch_size=63), "train_batch_size")


def test_auto_is_left_to_thinwire_until_it_is_set() -> None:
    conversion = convert(train_batch_size="auto", gradient_clipping="auto", bf16={"enabled": "auto"})
    assert [row.judgement.action for row in conversion.rows if row.value is not None] == ["ignored"] * 3
    assert "--set" in conversion.rows[0].judgement.text
    assert conversion.plan().compute_dtype == Plan.model_fields["compute_dtype"].default
    assert convert(bf16={"enabled": "auto"}, fp16={"enabled": True}).plan().compute_dtype == "float16"


def test_auto_parameters_of_adam_have_the_recipe_s_defaults() -> None:
    optimizer = recipe(convert(optimizer={"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}})).optimizer
    assert (optimizer.lr, optimizer.betas) == (OptimizerRecipe().lr, OptimizerRecipe().betas)
    assert (optimizer.eps, optimizer.weight_decay) == (1e-8, 0.0)


@pytest.mark.parametrize(
    ("kind", "params", "decay"),
    [
        ("AdamW", {}, 0.01),
        ("AdamW", {"adam_w_mode": False}, 0.01),
        ("Adam", {}, 0.01),
        ("Adam", {"adam_w_mode": False}, 0.0),
        ("AdamW", {"weight_decay": 0.0}, 0.0),
        ("AdamW", {"torch_adam": False}, 0.0),
    ],
    ids=str,
)
def test_torch_adam_has_the_weight_decay_of_torch(kind: str, params: dict[str, Any], decay: float) -> None:
    table = {"type": kind, "params": {"torch_adam": True, **params}}
    assert recipe(convert(optimizer=table)).optimizer.weight_decay == decay


@pytest.mark.parametrize(
    "absent", [{}, {"gradient_clipping": None, "scheduler": {"type": None}}], ids=["absent", "null"]
)
def test_an_absent_key_has_deepspeed_s_default(absent: dict[str, Any]) -> None:
    conversion = convert(fp16={"enabled": True}, **absent)
    result = recipe(conversion)
    assert (result.optimizer.clip, result.optimizer.final_lr_share, result.loss_scale.growth_interval) == (0, 1, 1000)
    assert "does not clip" in row(conversion, "gradient_clipping").judgement.shown
    assert "is constant" in row(conversion, "scheduler.type").judgement.shown
    assert "your code makes" in row(conversion, "optimizer.type").judgement.shown


def test_an_auto_key_has_the_recipe_s_default() -> None:
    optimizer = recipe(convert(gradient_clipping="auto", scheduler={"type": "auto"})).optimizer
    assert (optimizer.clip, optimizer.final_lr_share) == (OptimizerRecipe().clip, OptimizerRecipe().final_lr_share)


def test_a_dynamic_loss_scale() -> None:
    fp16 = {"enabled": True, "loss_scale": 0, "initial_scale_power": 12, "loss_scale_window": 500, "min_loss_scale": 2}
    conversion = convert(fp16={**fp16, "hysteresis": 2})
    scale = recipe(conversion).loss_scale
    assert conversion.plan().compute_dtype == "float16"
    assert (scale.initial, scale.growth_interval, scale.floor, scale.growth, scale.backoff) == (4096, 500, 2, 2, 0.5)


def test_a_constant_loss_scale() -> None:
    scale = recipe(convert(fp16={"enabled": True, "loss_scale": 128, "initial_scale_power": 16})).loss_scale
    assert (scale.initial, scale.growth, scale.backoff) == (128, 1, 1)


@pytest.mark.parametrize("turned", [False, True])
def test_the_order_of_keys_changes_nothing(turned: bool) -> None:
    def ordered(**table: Any) -> Conversion:
        return convert(**dict(reversed(table.items())) if turned else table)

    warmup = {"type": "WarmupLR", "params": {"warmup_type": "linear", "warmup_max_lr": 5e-3}}
    assert recipe(ordered(optimizer={"type": "AdamW"}, scheduler=warmup)).optimizer.lr == 5e-3
    plan = ordered(train_batch_size=64, train_micro_batch_size_per_gpu=4.0).plan()
    assert (plan.micro_batch, plan.micro_batches) == (4, 2)
    bf16 = {"enabled": True, "check_grad_overflow": True}
    both = ordered(bf16=bf16, bfloat16={**bf16, "check_grad_overflow": False})
    assert [row.judgement.text for row in both.refusals] == [
        f"{'bfloat16' if turned else 'bf16'}.check_grad_overflow sets train.on_nonfinite = "
        f'"{"stop" if turned else "skip"}"; leave one of the two out'
    ]


def test_both_dtypes_are_refused() -> None:
    text = refusal(convert(fp16={"enabled": True}, bf16={"enabled": True}), "bf16.enabled")
    assert "fp16.enabled is true as well" in text


def test_adam_with_its_scheduler() -> None:
    conversion = convert(
        optimizer={"type": "Adam", "params": {"lr": 2e-4, "weight_decay": 0.01}},
        scheduler={
            "type": "WarmupCosineLR",
            "params": {"warmup_num_steps": 20, "total_num_steps": 400, "warmup_type": "linear", "cos_min_ratio": 0.05},
        },
        gradient_clipping=0.5,
        steps_per_print=5,
    )
    result = recipe(conversion, steps=None)
    optimizer = result.optimizer
    assert (optimizer.lr, optimizer.betas, optimizer.eps) == (2e-4, (0.9, 0.999), 1e-8)
    assert (optimizer.weight_decay, optimizer.clip) == (0.01, 0.5)
    assert (optimizer.warmup, optimizer.final_lr_share) == (20, 0.05)
    assert (result.train.steps, result.train.log_every) == (400, 5)


def test_a_constant_learning_rate() -> None:
    scheduler = {"type": "WarmupLR", "params": {"warmup_type": "linear", "warmup_max_lr": 1e-3}}
    optimizer = recipe(convert(optimizer={"type": "AdamW", "params": {"lr": 5e-4}}, scheduler=scheduler)).optimizer
    assert (optimizer.lr, optimizer.warmup, optimizer.final_lr_share) == (1e-3, 1000, 1.0)


@pytest.mark.parametrize(
    ("peak", "note"), [({}, "DeepSpeed before 0.17.2 took 0.001 instead"), ({"warmup_max_lr": "auto"}, "")], ids=str
)
def test_another_learning_rate_of_older_releases_is_said(peak: dict[str, Any], note: str) -> None:
    scheduler = {"type": "WarmupLR", "params": {"warmup_type": "linear", **peak}}
    conversion = convert(optimizer={"type": "AdamW", "params": {"lr": 5e-4}}, scheduler=scheduler)
    assert recipe(conversion).optimizer.lr == 5e-4
    text = row(conversion, "optimizer.params.lr").judgement.text
    assert text.startswith(note)
    assert bool(text) == bool(note)


OFFLOADED = "zero_optimization.offload_optimizer"
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    (zero(4), "zero_optimization.stage", "expected 0, 1, 2 or 3"),
    (zero(3, offload_optimizer={"device": "nvme"}), f"{OFFLOADED}.device", "shard more"),
    (zero(3, offload_param={"device": "nvme"}), "zero_optimization.offload_param.device", "shard more"),
    (zero(2, offload_optimizer={"devcie": "cpu"}), f"{OFFLOADED}.devcie", "did you mean device"),
    (zero(2, offload_optimizer={"device": "cpu", "ratio": 2}), f"{OFFLOADED}.ratio", "from 0 to 1"),
    (zero(2, offload_optimizer="cpu"), OFFLOADED, "expected a table with the keys device"),
    (zero(0, offload_optimizer={"device": "cpu"}), f"{OFFLOADED}.device", "zero_optimization.stage=1"),
    (zero(0, cpu_offload=True), "zero_optimization.cpu_offload", "zero_optimization.stage=1"),
    (zero(3, zeropp_loco_param={"beta": 1}), "zero_optimization.zeropp_loco_param", "keys err_beta, reset_T"),
    (zero(2, zenflow={"topk_ratio": 0.1}), "zero_optimization.zenflow", "use offload_optimizer alone"),
    ({"optimizer": {"type": "OneBitAdam"}}, "optimizer.type", "wire.error_feedback = true"),
    ({"optimizer": {"type": "Lamb"}}, "optimizer.type", "tw.optimizer(model, CLASS, ...)"),
    (
        {"optimizer": {"type": "Adam", "params": {"adam_w_mode": 0, "weight_decay": 0.1}}},
        "optimizer.type",
        "torch.optim.Adam",
    ),
    ({"scheduler": {"type": "WarmupDecayLR"}}, "scheduler.type", "WarmupCosineLR"),
    ({"scheduler": {"type": "WarmupDecayLR"}}, "scheduler.type", "scheduler.params.warmup_max_lr=0.001"),
    ({"scheduler": {"type": "WarmupLR", "params": {}}}, "scheduler.type", "warmup_type=linear"),
    ({"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}, "bf16.bf16_master_weights_and_grads", "fp32"),
    ({"data_types": {"grad_accum_dtype": "fp16"}}, "data_types.grad_accum_dtype", "grad_accum_dtype=fp32"),
    ({"torch_autocast": {"enabled": True}}, "torch_autocast.enabled", "enable bf16"),
    ({"amp": {"enabled": True}}, "amp", "bf16 or fp16"),
    ({"compression_training": {"weight_quantization": {}}}, "compression_training", "leave it out"),
    ({"hybrid_engine": {"enabled": True}}, "hybrid_engine", "thinwire.generating(model)"),
    ({"tensor_parallel": {"autotp_size": 3}}, "tensor_parallel.autotp_size", "divisor of 4"),
    ({"pipeline": {"stages": 2}}, "pipeline.stages", "set pp"),
    ({"gradient_clipping": True}, "gradient_clipping", "expected a number"),
    ({"zero_optimization": True}, "zero_optimization", "expected a table"),
    ({"fp16": {"enabled": True, "initial_scale_power": 5000}}, "fp16.initial_scale_power", "at most 127"),
    ({"gradient_acumulation_steps": 2}, "gradient_acumulation_steps", "did you mean gradient_accumulation_steps"),
    (zero(3, overlap_com=True), "zero_optimization.overlap_com", "did you mean overlap_comm"),
]


@pytest.mark.parametrize(("table", "key", "remedy"), REFUSED, ids=[key for _, key, _ in REFUSED])
def test_what_cannot_be_done_is_refused_with_a_remedy(table: dict[str, Any], key: str, remedy: str) -> None:
    assert remedy in refusal(convert(**table), key)


@pytest.mark.parametrize("offload", [{"offload_optimizer": {"device": "cpu"}}, {"cpu_offload": True}], ids=str)
def test_an_offloaded_optimizer_lives_on_the_host(offload: dict[str, Any]) -> None:
    assert convert(**zero(2, **offload)).plan().residence == Residence(optimizer="host-stream", gradients="host")


def test_everything_that_is_offloaded_lives_on_the_host() -> None:
    offloaded = zero(3, offload_optimizer={"device": "cpu"}, offload_param={"device": "cpu"})
    everything = Residence(optimizer="host-stream", gradients="host", params="host")
    assert convert(**offloaded).plan().residence == everything
    assert convert(**zero(3, cpu_offload_param=True)).plan().residence == Residence(params="host")


@pytest.mark.parametrize("offload", [{"offload_param": {"device": "cpu"}}, {"cpu_offload_param": True}], ids=str)
def test_parameters_are_offloaded_at_stage_3_only(offload: dict[str, Any]) -> None:
    conversion = convert(**zero(2, **offload))
    assert conversion.plan().residence == Residence()
    assert "DeepSpeed uses it at stage 3 only" in {row.judgement.text for row in conversion.rows}


def test_how_deepspeed_offloads_is_ignored_key_by_key() -> None:
    offload = {"device": "cpu", "ratio": 0.3, "super_offload": True, "pin_memory": True, "fast_init": False}
    conversion = convert(**zero(3, offload_optimizer=offload))
    assert conversion.plan().residence == Residence(optimizer="host-stream", gradients="host")
    actions = [row(conversion, f"{OFFLOADED}.{key}").judgement.action for key in offload]
    assert actions == ["mapped", *["ignored"] * 4]


def test_features_that_are_off_are_not_refused() -> None:
    table = {
        **zero(2, offload_optimizer={"device": "none"}, cpu_offload=False, zenflow=None),
        "amp": {"enabled": False},
        "hybrid_engine": {"enabled": False},
        "data_efficiency": {"enabled": False},
        "pipeline": {"stages": "auto"},
        "activation_checkpointing": {"partition_activations": False, "cpu_checkpointing": False},
    }
    conversion = convert(**table)
    assert conversion.refusals == ()
    assert not conversion.plan().recompute


def test_other_keys_arrive() -> None:
    conversion = convert(
        activation_checkpointing={"number_checkpoints": 4},
        gradient_allreduce_op="SUM",
        data_types={"grad_accum_dtype": "bf16"},
        tensor_parallel={"autotp_size": 2},
        bf16={"enabled": True, "check_grad_overflow": True},
        tensorboard={"enabled": False, "output_path": "logs"},
        wandb={"enabled": True, "project": "mine"},
        elasticity={"enabled": True, "max_train_batch_size": 64},
    )
    plan, result = conversion.plan(), recipe(conversion)
    assert (plan.recompute, plan.grad_reduce, plan.accumulate_dtype) == (True, "sum", "bfloat16")
    assert (plan.tp, plan.sequence_parallel, plan.mesh) == (2, False, Factor(local=2, nodes=2))
    assert (result.train.on_nonfinite, result.train.tensorboard, result.cluster.elastic) == ("skip", False, True)
    assert result.train.trackers == ("wandb",)
    assert (result.cluster.nodes, result.cluster.nproc) == (2, 4)


@pytest.mark.parametrize(
    ("needs", "missing"), [({"model": None}, "--model"), ({"steps": None}, "--steps")], ids=["model", "steps"]
)
def test_a_recipe_needs_what_the_source_does_not_contain(needs: dict[str, Any], missing: str) -> None:
    with pytest.raises(UsageError, match=missing):
        recipe(convert(), **needs)


def test_a_model_that_is_nowhere_is_refused() -> None:
    with pytest.raises(SpecError, match="llama-8b is neither a path nor a published shape"):
        recipe(convert(), model="llama-8b")


def test_rules_are_functions_or_tables() -> None:
    def walk(rules: Any) -> int:
        return 1 if isinstance(rules, Callable) else sum(walk(rule) for rule in rules.values())  # type: ignore[arg-type]

    assert walk(DEEPSPEED_RULES) > 150


def test_a_checkpoints_directory_is_no_configuration(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"is a directory; expected .* zero_to_fp32\.py"):
        read_source(tmp_path)
