"""Converts the configuration file of accelerate, as ``accelerate config`` writes it, with its FSDP section."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from thinwire.convert.fsdp2 import offloading, resharding
from thinwire.convert.outcome import Conversion, Judgement, mapped, refused
from thinwire.convert.source import Rules, Source, because, flag, judge, named, off, switch, to_plan, whole
from thinwire.spec import Factor

_ONE: Final = Factor()


def from_accelerate(table: Mapping[str, Any], ranks: Factor, what: str = "accelerate.yaml") -> Conversion:
    """Convert accelerate's configuration file, as nested dictionaries, with one row for each key."""
    source = Source(table, ranks)
    sharded = _is_sharded(source)
    factors = dict.fromkeys(("params", "grads", "optimizer"), ranks if sharded else _ONE)
    base = {"name": "accelerate", "mesh": ranks, **factors, "compute_dtype": "float32"}
    return Conversion(what, ranks, base, judge(source, _RULES if sharded else _WITHOUT_FSDP))


def _is_sharded(source: Source) -> bool:
    """Whether FSDP trains; accelerate writes an empty ``fsdp_config`` for other kinds too."""
    kind = source.get("distributed_type")
    return kind == "FSDP" or (kind is None and bool(source.keys("fsdp_config")))


def _computing(dtype: str, source: Source) -> Judgement:
    if dtype == "float32" or _is_sharded(source):
        return mapped(plan={"compute_dtype": dtype})
    return mapped(
        plan={"compute_dtype": dtype, "reduce_dtype": "float32"}, note="DDP reduces the gradients of autocast"
    )


def _distributed(value: Any, _source: Source) -> Judgement:
    if value in ("FSDP", "MULTI_GPU", "MULTI_CPU", "NO"):
        return mapped(note="fsdp_config sets the factors" if value == "FSDP" else "preset ddp")
    remedy = "see deepspeed_config" if value == "DEEPSPEED" else "use FSDP, MULTI_GPU or MULTI_CPU"
    return refused(f"this kind cannot be converted from accelerate's file; {remedy}")


def _deepspeed(value: Any, source: Source) -> Judgement:
    file = value.get("deepspeed_config_file") if isinstance(value, dict) else None
    remedy = f"convert {file}" if file else 'write it to a JSON as {"zero_optimization": {"stage": 3}}; convert that'
    return off("it cannot be converted from accelerate's file", remedy, harmless=({},))(value, source)


def _processes(value: int, source: Source) -> Judgement:
    if value == source.ranks.ranks:
        return mapped(note="--nodes x --nproc")
    return refused(f"--nodes and --nproc make {source.ranks.ranks} ranks")


def _machines(value: int, source: Source) -> Judgement:
    return mapped(note="--nodes") if value == source.ranks.nodes else refused(f"--nodes is {source.ranks.nodes}")


def _reshard(value: Any, source: Source) -> Judgement:
    if isinstance(value, bool):
        return resharding(value, source.ranks)
    return _strategy(value, source)


def _strategy(value: Any, source: Source) -> Judgement:
    """FSDP1's strategies, which accelerate also accepts as ``fsdp_reshard_after_forward``."""
    ranks = source.ranks
    node = Factor(local=ranks.local)
    shardings = {  # by name, in the order of their numbers
        "FULL_SHARD": (ranks, ranks, ranks),
        "SHARD_GRAD_OP": (_ONE, ranks, ranks),
        "NO_SHARD": (_ONE, _ONE, _ONE),
        "HYBRID_SHARD": (node, node, node),
        "HYBRID_SHARD_ZERO2": (_ONE, node, node),
    }
    name = [*shardings][value - 1] if isinstance(value, int) and 1 <= value <= 5 else value
    sharding = shardings.get(name) if isinstance(name, str) else None
    if sharding is None:
        return refused(f"expected one of {', '.join(shardings)}")
    return mapped(plan=dict(zip(("params", "grads", "optimizer"), sharding, strict=True)))


_WRAPPED: Final = because("tw.shard finds the blocks; units= names other modules")
_SAVED: Final = because("thinwire export writes whole weights; checkpoints are sharded and load on any ranks")
_PREFETCHED: Final = because("prefetch gathers units ahead, 1 by default")

_COMPILED: Final = ("blocks are not compiled in a recipe", "call torch.compile in your own loop")

_PARALLEL: Final = off("tp and pp are keys of the plan", "set them there", harmless=({},))

_OF_LAUNCHERS: Final = dict.fromkeys(
    (
        "command_file", "commands", "compute_environment", "debug", "enable_cpu_affinity", "gpu_ids", "ipex_config",
        "machine_rank", "main_process_ip", "main_process_port", "main_training_function", "mpirun_config",
        "rdzv_backend", "same_network", "tpu_env", "tpu_name", "tpu_use_cluster", "tpu_use_sudo", "tpu_vm", "tpu_zone",
        "use_cpu",
    ),
    because("the launcher sets it"),
)  # fmt: skip

_RULES: Final[Rules] = {
    "distributed_type": _distributed,
    "mixed_precision": named(_computing, {"no": "float32", "fp16": "float16", "bf16": "bfloat16"}),
    "num_processes": whole(_processes),
    "num_machines": whole(_machines),
    "fsdp_config": {
        "fsdp_version": because("plans have factors of their own"),
        "fsdp_reshard_after_forward": _reshard,
        "fsdp_sharding_strategy": _strategy,
        "fsdp_offload_params": flag(offloading),
        "fsdp_activation_checkpointing": switch(to_plan("recompute")),
        "fsdp_auto_wrap_policy": _WRAPPED,
        "fsdp_transformer_layer_cls_to_wrap": _WRAPPED,
        "fsdp_min_num_params": _WRAPPED,
        "fsdp_backward_prefetch": _PREFETCHED,
        "fsdp_backward_prefetch_policy": _PREFETCHED,
        "fsdp_forward_prefetch": _PREFETCHED,
        "fsdp_cpu_ram_efficient_loading": because("weights are read shard by shard"),
        "fsdp_sync_module_states": because("ranks always start from the same weights"),
        "fsdp_state_dict_type": _SAVED,
        "fsdp_use_orig_params": because("parameters keep their names and shapes"),
    },
    "downcast_bf16": because("it applies to TPUs"),
    "dynamo_config": off(*_COMPILED, harmless=({},)),
    "dynamo_backend": off(*_COMPILED, harmless=("NO", "no")),
    "deepspeed_config": _deepspeed,
    "fp8_config": off("there is no FP8", "use mixed_precision: bf16", harmless=({},)),
    "megatron_lm_config": _PARALLEL,
    "parallelism_config": _PARALLEL,
    **_OF_LAUNCHERS,
}
_WITHOUT_FSDP: Final[Rules] = {**_RULES, "fsdp_config": because("distributed_type is not FSDP")}
