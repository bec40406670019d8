"""Converts DeepSpeed's JSON: every key of DeepSpeed 0.19.8, and those that 0.19 removed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from thinwire.convert.deepspeed_optimizer import OPTIMIZER_RULES, SCHEDULER_RULES
from thinwire.convert.deepspeed_precision import PRECISION_RULES, compute_dtype
from thinwire.convert.deepspeed_zero import ZERO_RULES, data_parallel_mesh, factors
from thinwire.convert.outcome import Conversion, Judgement, ignored, mapped, refused
from thinwire.convert.source import (
    Rules,
    Source,
    always,
    at_least_1,
    because,
    flag,
    judge,
    named,
    number,
    off,
    switch,
    to_plan,
    to_recipe,
    where,
    whole,
)
from thinwire.spec import Factor


def from_deepspeed(table: Mapping[str, Any], ranks: Factor, what: str = "ds_config.json") -> Conversion:
    """Convert a DeepSpeed configuration, as nested dictionaries, with one row for each key."""
    source = Source(table, ranks)
    base = {**factors(source), "compute_dtype": compute_dtype(source)}
    return Conversion(what, ranks, base, judge(source, DEEPSPEED_RULES, _DEFAULTS))


_TRAIN: Final = "train_batch_size"
_MICRO: Final = "train_micro_batch_size_per_gpu"
_STEPS: Final = "gradient_accumulation_steps"


def _train_batch(value: int, source: Source) -> Judgement:
    """The whole batch gives the size that is left out, as in DeepSpeed, where any two of three sizes give the third; it
    has to divide evenly."""
    given = (source.get(key) for key in (_MICRO, _STEPS))
    micro, steps = (size if isinstance(size, int) and size > 0 else None for size in given)
    world = data_parallel_mesh(source).ranks
    product = world * (micro or 1) * (steps or 1)
    if micro is not None and steps is not None:
        if value != product:
            return refused(
                f"{_MICRO} = {micro}, {_STEPS} = {steps} and {world} data-parallel ranks make {product}; change "
                "--nodes and --nproc, or one of the sizes"
            )
        return mapped(note=f"{micro} x {steps} on {world} ranks")
    if value % product:
        return refused(f"{value} is no multiple of {product}, the sequences that {world} ranks take at once")
    rest = value // product
    return mapped(plan={"micro_batches": rest} if micro is not None else {"micro_batch": rest})


def _tensor_parallel(value: int, source: Source) -> Judgement:
    if value <= 1:
        return ignored("off")
    if source.ranks.local % value:
        return refused(f"tensor-parallel ranks share a node; choose a divisor of {source.ranks.local} ranks")
    # Its row-parallel layers end in an all-reduce (deepspeed.module_inject.layers.LinearAllreduce).
    return mapped(plan={"tp": value, "sequence_parallel": False}, note="sequence_parallel = true takes less memory")


def _stages(value: Any, _source: Source) -> Judgement:
    if value in (1, None):
        return ignored("off")
    return refused("a PipelineModule has no counterpart; set pp in the plan, which cuts Llama, GPT and Hugging Face's")


def _recompute(value: Any, _source: Source) -> Judgement:
    if value in (False, None, 0):
        return ignored("if the model calls deepspeed.checkpointing, set recompute = true in the plan")
    return mapped(plan={"recompute": True}, note="each block is recomputed from its input")


_BATCH: Final[Rules] = {
    _TRAIN: whole(at_least_1(_train_batch)),
    _MICRO: whole(at_least_1(to_plan("micro_batch"))),
    _STEPS: whole(at_least_1(to_plan("micro_batches"))),
}

_IN_METRICS: Final = because("metrics.jsonl records times, exposed communication, bytes and memory of every step")
_RUN_DIRECTORY: Final = because("events and metrics are in the directory of the run")
_NO_OTHER_LOGGER: Final = because("metrics go to metrics.jsonl and TensorBoard")
_PLANNER: Final = because("thinwire plan and --plan auto choose the configuration")
_OFFLOAD_FILES: Final = because("nothing is offloaded to files")
_DEEPSPEED_DETAIL: Final = because("an implementation detail of DeepSpeed")
_RECOMPUTED: Final = because("each block is recomputed from its input, which stays on its rank")
_CHECKPOINTS: Final = because("checkpoints are sharded, verified and written in parallel, and load on any ranks")
_HANDS_OFF: Final = "tensor parallelism cuts Llama, GPT and Hugging Face models by their own names"
_OWN_CUT: Final = off(_HANDS_OFF, "leave it out, and check the model with thinwire doctor", harmless=(None, {}, False))

_LOGGERS: Final[Rules] = {
    "tensorboard": {
        "enabled": flag(to_recipe("train.tensorboard")),
        "output_path": _RUN_DIRECTORY,
        "job_name": _RUN_DIRECTORY,
    },
    "wandb": {
        "enabled": switch(always(mapped(recipe={"train.trackers": ["wandb"]}))),
        **dict.fromkeys(
            ("group", "team", "project"), because("WANDB_RUN_GROUP, WANDB_ENTITY and WANDB_PROJECT say it")
        ),
    },
    "comet": _NO_OTHER_LOGGER,
    "csv_monitor": _NO_OTHER_LOGGER,
    "wall_clock_breakdown": _IN_METRICS,
    "memory_breakdown": _IN_METRICS,
    "flops_profiler": because("metrics.jsonl records TFLOP/s and MFU; train.trace_steps records operations"),
    "comms_logger": _IN_METRICS,
    "timers": _IN_METRICS,
    "steps_per_print": whole(at_least_1(to_recipe("train.log_every"))),
    "dump_state": because("the run's directory holds its recipe and plan"),
    "log_level": because("there is one level of messages"),
}

_ACTIVATIONS: Final[Rules] = {
    "partition_activations": _recompute,
    "number_checkpoints": _recompute,
    "contiguous_memory_optimization": _RECOMPUTED,
    "synchronize_checkpoint_boundary": _RECOMPUTED,
    "profile": _IN_METRICS,
    "cpu_checkpointing": off("activations stay on the device", "set recompute = true in the plan"),
}

_OF_ELASTICITY: Final = dict.fromkeys(
    (
        "max_train_batch_size", "micro_batch_sizes", "min_gpus", "max_gpus", "min_time", "prefer_larger_batch",
        "ignore_non_elastic_batch_info", "num_gpus_per_node", "model_parallel_size", "version",
    ),
    because("an elastic run keeps its global batch on any number of ranks"),
)  # fmt: skip

_REMOVED: Final[Rules] = {
    "amp": off("Apex AMP is not supported", "enable bf16 or fp16"),
    "nebula": off("checkpoints go to the run's directory", "leave it out", harmless=(False, None, {})),
    "compression_training": off("models train unquantized", "leave it out", harmless=(None, {}, False)),
    "quantize_training": off("models train unquantized", "leave it out", harmless=(None, {}, False)),
    "eigenvalue": off("it belongs to quantize_training", "leave it out"),
    "sparse_attention": off("attention is the model's own", "choose it in the model", harmless=(None, {}, False)),
    "sparse_gradients": because("embeddings' gradients travel dense, which gives the same sums"),
    "elasticity": {"enabled": flag(to_recipe("cluster.elastic", "removed from DeepSpeed 0.19")), **_OF_ELASTICITY},
    "graph_harvesting": _DEEPSPEED_DETAIL,
    "curriculum_learning": off("samples keep their order", "prepare the data in the order of the curriculum"),
    "progressive_layer_drop": off("layers are never dropped", "drop them in the model, in your own loop"),
}

_PARALLEL: Final[Rules] = {
    "tensor_parallel": {
        "autotp_size": whole(_tensor_parallel),
        "tp": off("autotp_size sets the number of ranks", "use tensor_parallel.autotp_size", harmless=(None, {})),
        "tensor_parallel": off("autotp_size sets the number of ranks", "use autotp_size", harmless=(None, {})),
        "dtype": because("the compute dtype holds for all ranks"),
        "tp_overlap_comm": _DEEPSPEED_DETAIL,
        "vocab_parallel_lm_head": _DEEPSPEED_DETAIL,
        "vocab_parallel_ce_backend": _DEEPSPEED_DETAIL,
        "injection_policy_tuple": _OWN_CUT,
        "partition_config": _OWN_CUT,
        "preset_model": because("the model is recognized by its modules"),
        "keep_module_on_host": off("modules are on the device", "leave it out"),
        "replace_with_kernel_inject": off("kernels are the model's own", "leave it out"),
        "kernel_inject": off("kernels are the model's own", "leave it out"),
    },
    "expert_parallel": off("there is no expert parallelism", "shard experts by the plan's factors"),
    "use_data_before_expert_parallelism": because("there is no expert parallelism"),
    "sequence_parallel_size": off("there is no sequence parallelism of its own", "use tp", harmless=(1, None)),
    "pipeline": {
        "stages": _stages,
        "activation_checkpoint_interval": _recompute,
        **dict.fromkeys(
            ("partition", "seed_layers", "pipe_partitioned", "grad_partitioned"),
            because("it applies to pipeline stages"),
        ),
    },
}

_OF_DEEPCOMPILE: Final = dict.fromkeys(
    (
        "autoep_non_moe", "free_activation", "free_activation_threshold", "offload_activation", "offload_opt_states",
        "offload_activation_pin_memory", "double_buffer", "symmetric_memory", "debug_log", "offload_parameters",
        "sync_before_reduce", "sync_after_reduce", "sync_before_allgather", "sync_after_allgather",
        "keep_int_input_tensors", "keep_all_input_tensors", "passes",
    ),
    because("it applies to DeepCompile"),
)  # fmt: skip

_DEFAULTS: Final[Mapping[str, Judgement]] = {
    "gradient_clipping": mapped(recipe={"optimizer.clip": 0.0}, note="without it, DeepSpeed does not clip"),
    "optimizer.type": ignored("without it, your code makes the optimizer: write [optimizer] into the recipe"),
    "scheduler.type": mapped(recipe={"optimizer.final_lr_share": 1.0}, note="without it, the rate is constant"),
}

DEEPSPEED_RULES: Final[Rules] = {
    **_BATCH,
    **PRECISION_RULES,
    **_LOGGERS,
    **_REMOVED,
    **_PARALLEL,
    "zero_optimization": ZERO_RULES,
    "optimizer": OPTIMIZER_RULES,
    "scheduler": SCHEDULER_RULES,
    "gradient_clipping": number(where(lambda value: value >= 0, "0 or more", to_recipe("optimizer.clip"))),
    "prescale_gradients": because("gradients are summed in fp32, so that the order of division does not matter"),
    "gradient_predivide_factor": because("gradients are summed in fp32, so that the order of division does not matter"),
    "gradient_allreduce_op": named(to_plan("grad_reduce"), {"mean": "mean", "sum": "sum"}),
    "managed_gradient_accumulation": because("micro_batches makes the loop accumulate"),
    "activation_checkpointing": _ACTIVATIONS,
    "zero_allow_untested_optimizer": because("AdamW is tested under every plan"),
    "zero_force_ds_cpu_optimizer": because("torch's optimizers update, wherever states live"),
    "disable_allgather": _DEEPSPEED_DETAIL,
    "disable_python_gc": because("set gc.disable() in your own loop"),
    "vocabulary_size": because("model.vocab or the tokenizer sets it"),
    "dataloader_drop_last": because("every batch is full"),
    "autotuning": _PLANNER,
    "hybrid_engine": off("there is no second engine", "generate inside thinwire.generating(model)"),
    "data_efficiency": off("samples keep their order and length", "prepare the data beforehand"),
    "aio": _OFFLOAD_FILES,
    "checkpoint": {
        "use_node_local_storage": off("all nodes write to one directory", "name one that all nodes see"),
        **dict.fromkeys(
            ("tag_validation", "load_universal", "parallel_write", "checkpoint_serialization", "writer"), _CHECKPOINTS
        ),
    },
    "datastates_ckpt": _CHECKPOINTS,
    "weight_quantization": off("it applies to inference", "leave it out", harmless=(None, {})),
    "compile": {
        "deepcompile": off("DeepCompile has no counterpart", "torch.compile each block in your own loop"),
        **_OF_DEEPCOMPILE,
    },
}
