"""Rules for DeepSpeed's ``zero_optimization``: factors, codecs, buckets and overlap.

The names are those of DeepSpeed 0.19.8 and of the releases before it, which had MiCS and LoCo.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from thinwire.convert.deepspeed_precision import compute_itemsize, wire_itemsize
from thinwire.convert.outcome import ON_HOST, PARAMS_ON_HOST, Judgement, ignored, mapped, refused
from thinwire.convert.source import Rule, Rules, Source, always, because, flag, number, off, switch, whole
from thinwire.spec import Factor
from thinwire.spec.plan_parts.chain import groups

QWZ: Final = "int8:256"
QGZ: Final = "int4:256"
_ONE: Final = Factor()
_MORE_SHARDING: Final = "shard more, recompute activations, or use pipeline stages (thinwire plan chooses)"


def stage_of(source: Source) -> int:
    """The stage of ZeRO; 0 where the configuration leaves it out."""
    stage = source.get("zero_optimization.stage", 0)
    return stage if stage in (0, 1, 2, 3) else 0


def data_parallel_mesh(source: Source) -> Factor:
    """The data-parallel mesh: all ranks, divided by the tensor-parallel ones, which share a node."""
    ways = source.get("tensor_parallel.autotp_size", 0)
    ways = ways if isinstance(ways, int) and ways > 1 and source.ranks.local % ways == 0 else 1
    return Factor(local=source.ranks.local // ways, nodes=source.ranks.nodes)


def factors(source: Source) -> dict[str, Any]:
    """The plan's name, mesh and factors P, G and OS."""
    mesh, stage = data_parallel_mesh(source), stage_of(source)
    group = _group(source.get("zero_optimization.mics_shard_size", -1), mesh) if stage == 3 else None
    whole_mesh = group or mesh
    sharded = {"params": stage >= 3, "grads": stage >= 2, "optimizer": stage >= 1}
    name = "mics" if group else ("ddp", "zero1", "zero2", "zero3")[stage]
    return {"name": name, "mesh": mesh, **{key: whole_mesh if cut else _ONE for key, cut in sharded.items()}}


def _group(size: Any, mesh: Factor) -> Factor | None:
    """The factor of ``size`` neighbouring ranks; None where no factor has as many or ``size`` is no such number."""
    return mesh.group(size) if isinstance(size, int) and not isinstance(size, bool) and size > 0 else None


def _no_group(size: int, mesh: Factor) -> Judgement:
    return refused(
        f"{size} ranks do not divide the mesh of {mesh.nodes} nodes of {mesh.local}; valid are {groups(mesh)}"
    )


def _stage(value: Any, source: Source) -> Judgement:
    if isinstance(value, bool) or value not in (0, 1, 2, 3):
        return refused("expected 0, 1, 2 or 3")
    return mapped(plan={key: factor for key, factor in factors(source).items() if key != "name"})


def _mics(value: Any, source: Source) -> Judgement:
    if value == -1:
        return ignored("-1 is off")
    if stage_of(source) != 3:
        return ignored("DeepSpeed used it at stage 3 only")
    group = _group(value, mesh := data_parallel_mesh(source))
    if group is None:
        return _no_group(value, mesh)
    return mapped(
        plan={"params": group, "grads": group, "optimizer": group}, note="preset mics; removed from DeepSpeed 0.19"
    )


def _at_stage_3(rule: Rule) -> Rule:
    """Apply a rule at stage 3, below which DeepSpeed ignores the key."""

    def checked(value: Any, source: Source) -> Judgement:
        return rule(value, source) if stage_of(source) == 3 else ignored("DeepSpeed uses it at stage 3 only")

    return checked


@_at_stage_3
def _secondary(value: int, source: Source) -> Judgement:
    group = _group(value, mesh := data_parallel_mesh(source))
    return _no_group(value, mesh) if group is None else mapped(plan={"secondary": group}, note="hpZ")


def _codecs(plan: Mapping[str, Any], note: str) -> Rule:
    """The rule of a flag of ZeRO++ that sets codecs."""
    return switch(_at_stage_3(always(mapped(plan=plan, note=note))))


def _loco(value: Any, source: Source) -> Judgement:
    if not isinstance(value, Mapping) or value.keys() - {"err_beta", "reset_T"}:
        return refused("expected a table with the keys err_beta, reset_T")
    if stage_of(source) != 3 or not source.get("zero_optimization.zero_quantized_gradients", False):
        return ignored("it has an effect with quantized gradients at stage 3 only")
    note = "its share takes the place of err_beta; nothing is reset; removed from DeepSpeed 0.19"
    return mapped(plan={"wire.error_feedback": True}, note=note)


def _bucket(value: int, source: Source) -> Judgement:
    if value < 1:
        return refused("expected a number of elements of at least 1")
    nbytes = value * wire_itemsize(source)
    if stage_of(source) < 3:
        return mapped(plan={"bucket_bytes": nbytes}, note="elements become bytes")
    replicated = factors(source)["name"] == "mics"
    plan = {"reduce_bytes": nbytes} | ({"bucket_bytes": nbytes} if replicated else {})
    return mapped(plan=plan, note="elements become bytes")


def _overlap(value: bool, _source: Source) -> Judgement:
    if value:
        return ignored("overlap is the default")
    return mapped(plan={f"overlap.{lane}": False for lane in ("gather", "reduce", "sync", "spread")})


@_at_stage_3
def _prefetch(value: int, source: Source) -> Judgement:
    if source.get("zero_optimization.overlap_comm", True) is False:
        return ignored("without overlap_comm, nothing is gathered ahead")
    nbytes = value * compute_itemsize(source)
    return mapped(plan={"prefetch_bytes": nbytes, "gather_bytes": nbytes}, note="elements become bytes")


def _elements(key: str, note: str = "elements become bytes") -> Rule:
    """A rule of stage 3 that sets a number of bytes of parameters."""
    return _at_stage_3(lambda value, source: mapped(plan={key: value * compute_itemsize(source)}, note=note))


def _unless_0(plan: Mapping[str, Any], rule: Rule) -> Rule:
    """Apply a rule to numbers of elements above 0; 0 sets keys of the plan."""
    return whole(lambda value, source: rule(value, source) if value else mapped(plan=plan))


def _live(key: str) -> Rule:
    """A rule for a limit of what stays gathered; 0 lets nothing stay."""
    return _unless_0({"kept_unit": "none"}, _elements(key))


def _device(rule: Rule) -> Rule:
    """Apply a rule to states that DeepSpeed keeps on the host; those in files are refused."""

    def checked(value: Any, source: Source) -> Judgement:
        if value == "none":
            return ignored("off")
        if value == "cpu":
            return rule(value, source)
        return refused(f"states live on the device or on the host, in no files; use device: cpu, or {_MORE_SHARDING}")

    return checked


def _optimizer_on_host(_value: Any, source: Source) -> Judgement:
    if stage_of(source) == 0:
        return refused("DeepSpeed offloads the optimizer at stages 1, 2 and 3; --set zero_optimization.stage=1")
    return mapped(plan=ON_HOST, note="updated on the device, through which the states pass")


def _ratio(value: float, _source: Source) -> Judgement:
    if not 0 <= value <= 1:
        return refused("expected a number from 0 to 1")
    return ignored("optimizer states are offloaded whole, or not at all")


_PARAMS_ON_HOST: Final = _at_stage_3(always(mapped(plan=PARAMS_ON_HOST)))
_LOCKED: Final = because("what lives on the host is always locked in its place")
_ON_DEVICE: Final = because("the device updates, through which the states pass")
_FILES: Final = because("nothing is offloaded to files")
_OFFLOAD_PARAM: Final[Rules] = {
    "device": _device(_PARAMS_ON_HOST),
    "pin_memory": _LOCKED,
    **dict.fromkeys(("nvme_path", "buffer_count", "buffer_size", "max_in_cpu"), _FILES),
}
_OFFLOAD_OPTIMIZER: Final[Rules] = {
    "device": _device(_optimizer_on_host),
    "pin_memory": _LOCKED,
    **dict.fromkeys(("nvme_path", "buffer_count", "pipeline_read", "pipeline_write", "fast_init"), _FILES),
    "ratio": number(_ratio),
    "super_offload": _ON_DEVICE,
    "cpuadam_cores_perc": _ON_DEVICE,
}


_SAVED: Final = because("thinwire export writes whole weights; in Python, tw.full_state_dict(model)")
_OWN_BUCKETS: Final = because("each unit, usually a block, is one gather")
_STAGE_3: Final = because("an implementation detail of DeepSpeed's stage 3")
_ANY_LOAD: Final = because("checkpoints load under any plan and any number of ranks")

_OF_STAGE_3: Final[Rules] = {
    "prefetch_bucket_size": _unless_0({"prefetch": 0}, _prefetch),
    "param_persistence_threshold": whole(
        _elements("persist_bytes", 'whole units stay; granularity = "module" makes norms units')
    ),
    "model_persistence_threshold": because(
        "persist_bytes has no limit in total; live_bytes limits all that is gathered"
    ),
    "max_live_parameters": _live("live_bytes"),
    "max_reuse_distance": _live("reuse_bytes"),
    "gather_16bit_weights_on_model_save": _SAVED,
    "module_granularity_threshold": because('granularity = "block" gathers whole blocks'),
    "use_all_reduce_for_fetch_params": _STAGE_3,
    "allgather_sequential": _OWN_BUCKETS,
}
"""Keys of stage 3 that have two names, with ``stage3_`` before them and without."""

ZERO_RULES: Final[Rules] = {
    "stage": _stage,
    "contiguous_gradients": because("gradients always lie in contiguous shards"),
    "reduce_scatter": because("sharded gradients are always reduce-scattered"),
    "reduce_bucket_size": whole(_bucket),
    "use_multi_rank_bucket_allreduce": because("a bucket is reduced to its owners only"),
    "allgather_partitions": because("updated parameters are always all-gathered"),
    "allgather_bucket_size": _OWN_BUCKETS,
    "overlap_comm": flag(_overlap),
    "compute_grad_norm": because("the norm is computed when gradients are clipped"),
    "load_from_fp32_weights": because("checkpoints hold fp32 masters"),
    "elastic_checkpoint": _ANY_LOAD,
    "offload_param": _OFFLOAD_PARAM,
    "offload_optimizer": _OFFLOAD_OPTIMIZER,
    "zenflow": off(
        "ZenFlow updates with stale gradients, and every update here is exact",
        "use offload_optimizer alone",
        harmless=(None, False),
    ),
    "sub_group_size": because("it tiles the update of offloaded states"),
    "cpu_offload_param": switch(_PARAMS_ON_HOST),
    "cpu_offload_use_pin_memory": _LOCKED,
    "cpu_offload": switch(_optimizer_on_host),
    **{f"{prefix}{key}": rule for key, rule in _OF_STAGE_3.items() for prefix in ("stage3_", "")},
    "stage3_gather_fp16_weights_on_model_save": _SAVED,
    "ignore_unused_parameters": because("unused parameters are allowed"),
    "legacy_stage1": because("there is one implementation of stage 1"),
    "round_robin_gradients": because("gradients go to the host unit by unit, where they live there"),
    "parameter_alignment": because("shards are always aligned to 16 bytes"),
    "zero_hpz_partition_size": whole(lambda value, source: _secondary(value, source) if value > 1 else ignored("off")),
    "zero_quantized_weights": _codecs({"wire.gather": QWZ}, "qwZ"),
    "zero_quantized_nontrainable_weights": _codecs(
        {"frozen.storage": QWZ}, "frozen matrices live encoded; biases and norms stay as they are"
    ),
    "zero_quantized_gradients": _codecs({"wire.reduce_intra": QGZ, "wire.reduce_inter": QGZ}, "qgZ, on one node, too"),
    "memory_efficient_linear": _STAGE_3,
    "pipeline_loading_checkpoint": _ANY_LOAD,
    "override_module_apply": _STAGE_3,
    "log_trace_cache_warnings": _STAGE_3,
    "enable_sanity_checks": because("ranks always compare their order of units"),
    "save_muon_momentum_buffer_in_memory": because("it belongs to DeepSpeed's Muon"),
    "leaf_module": because('granularity = "block" gathers whole blocks; in a plan, [[units]] names exceptions'),
    "mics_shard_size": _mics,
    "mics_hierarchical_params_gather": because("gathers are always hierarchical: each byte enters a node once"),
    "zeropp_loco_param": _loco,
}
