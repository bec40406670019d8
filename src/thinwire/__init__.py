"""thinwire: large language models over thin wires.

Names are imported on first use, so that ``thinwire plan`` and every other command that decides without
training starts without loading torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from thinwire.startup import prepare_cuda

if TYPE_CHECKING:
    from thinwire import codecs
    from thinwire.intercept import (
        AxisCodecs,
        AxisTraffic,
        CompressingGroup,
        axis_backend,
        axis_traffic,
        compress_axis,
        compress_group,
        compress_mesh,
        exact_scope,
        mark_steps,
        step_scope,
    )
    from thinwire.intercept.adapters import compress_ddp, compress_fsdp
    from thinwire.parallel import ParallelModel, ParallelOptimizer, parallelize
    from thinwire.sharding.api import (
        async_save,
        clip_grad_norm_,
        enter_islands,
        exposed,
        full_parameters,
        full_state_dict,
        ignore,
        join,
        join_islands,
        load,
        micro_batches,
        num_steps,
        optimizer,
        progress,
        register_forward_method,
        save,
        shard,
        timeline,
        traffic,
        worked,
    )
    from thinwire.sharding.runtime.averaging import Average, average
    from thinwire.sharding.runtime.generating import generating
    from thinwire.sharding.step.loss_scale import LossScale
    from thinwire.spec import ClusterSpec, CodecSpec, Factor, ModelSpec, Overlap, Plan, Wire
    from thinwire.spec.plan_parts.policy import HybridPolicy
    from thinwire.weights import Publisher, Subscriber, publisher

__version__ = "0.2.0"

__all__ = [
    "Average",
    "AxisCodecs",
    "AxisTraffic",
    "ClusterSpec",
    "CodecSpec",
    "CompressingGroup",
    "Factor",
    "HybridPolicy",
    "LossScale",
    "ModelSpec",
    "Overlap",
    "ParallelModel",
    "ParallelOptimizer",
    "Plan",
    "Publisher",
    "Subscriber",
    "Wire",
    "__version__",
    "async_save",
    "average",
    "axis_backend",
    "axis_traffic",
    "clip_grad_norm_",
    "codecs",
    "compress_axis",
    "compress_ddp",
    "compress_fsdp",
    "compress_group",
    "compress_mesh",
    "enter_islands",
    "exact_scope",
    "exposed",
    "full_parameters",
    "full_state_dict",
    "generating",
    "ignore",
    "join",
    "join_islands",
    "load",
    "mark_steps",
    "micro_batches",
    "num_steps",
    "optimizer",
    "parallelize",
    "progress",
    "publisher",
    "register_forward_method",
    "save",
    "shard",
    "step_scope",
    "timeline",
    "traffic",
    "worked",
]

_HOMES = {
    "thinwire.weights": ("Publisher", "Subscriber", "publisher"),
    "thinwire.intercept.adapters": ("compress_ddp", "compress_fsdp"),
    "thinwire.intercept": (
        "AxisCodecs",
        "AxisTraffic",
        "CompressingGroup",
        "axis_backend",
        "axis_traffic",
        "compress_axis",
        "compress_group",
        "compress_mesh",
        "exact_scope",
        "mark_steps",
        "step_scope",
    ),
    "thinwire.parallel": ("ParallelModel", "ParallelOptimizer", "parallelize"),
    "thinwire.spec.plan_parts.policy": ("HybridPolicy",),
    "thinwire.spec": ("ClusterSpec", "CodecSpec", "Factor", "ModelSpec", "Overlap", "Plan", "Wire"),
    "thinwire.sharding.api": (
        "async_save",
        "clip_grad_norm_",
        "enter_islands",
        "exposed",
        "full_parameters",
        "full_state_dict",
        "ignore",
        "join",
        "join_islands",
        "load",
        "micro_batches",
        "num_steps",
        "optimizer",
        "progress",
        "register_forward_method",
        "save",
        "shard",
        "timeline",
        "traffic",
        "worked",
    ),
    "thinwire.sharding.runtime.averaging": ("Average", "average"),
    "thinwire.sharding.runtime.generating": ("generating",),
    "thinwire.sharding.step.loss_scale": ("LossScale",),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

prepare_cuda()  # before the user's model is on its device


def __getattr__(name: str) -> Any:
    if name == "codecs":
        return importlib.import_module("thinwire.codecs")
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
