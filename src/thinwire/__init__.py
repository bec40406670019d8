"""thinwire: large language models over thin wires.

Names are imported on first use, so that ``thinwire plan`` and every other command that decides without
training starts without loading torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from thinwire.startup import prepare_cuda

if TYPE_CHECKING:  # by the same name, so that checkers of types take them for public
    from thinwire import codecs as codecs
    from thinwire.intercept import AxisCodecs as AxisCodecs
    from thinwire.intercept import AxisTraffic as AxisTraffic
    from thinwire.intercept import CompressingGroup as CompressingGroup
    from thinwire.intercept import axis_backend as axis_backend
    from thinwire.intercept import axis_traffic as axis_traffic
    from thinwire.intercept import compress_axis as compress_axis
    from thinwire.intercept import compress_group as compress_group
    from thinwire.intercept import compress_mesh as compress_mesh
    from thinwire.intercept import exact_scope as exact_scope
    from thinwire.intercept import mark_steps as mark_steps
    from thinwire.intercept import step_scope as step_scope
    from thinwire.intercept.adapters import compress_ddp as compress_ddp
    from thinwire.intercept.adapters import compress_fsdp as compress_fsdp
    from thinwire.parallel import ParallelModel as ParallelModel
    from thinwire.parallel import ParallelOptimizer as ParallelOptimizer
    from thinwire.parallel import parallelize as parallelize
    from thinwire.sharding.api import async_save as async_save
    from thinwire.sharding.api import clip_grad_norm_ as clip_grad_norm_
    from thinwire.sharding.api import enter_islands as enter_islands
    from thinwire.sharding.api import exposed as exposed
    from thinwire.sharding.api import full_parameters as full_parameters
    from thinwire.sharding.api import full_state_dict as full_state_dict
    from thinwire.sharding.api import ignore as ignore
    from thinwire.sharding.api import join as join
    from thinwire.sharding.api import join_islands as join_islands
    from thinwire.sharding.api import load as load
    from thinwire.sharding.api import micro_batches as micro_batches
    from thinwire.sharding.api import num_steps as num_steps
    from thinwire.sharding.api import optimizer as optimizer
    from thinwire.sharding.api import progress as progress
    from thinwire.sharding.api import register_forward_method as register_forward_method
    from thinwire.sharding.api import save as save
    from thinwire.sharding.api import shard as shard
    from thinwire.sharding.api import timeline as timeline
    from thinwire.sharding.api import traffic as traffic
    from thinwire.sharding.api import worked as worked
    from thinwire.sharding.runtime.averaging import Average as Average
    from thinwire.sharding.runtime.averaging import average as average
    from thinwire.sharding.runtime.generating import generating as generating
    from thinwire.sharding.step.loss_scale import LossScale as LossScale
    from thinwire.spec import ClusterSpec as ClusterSpec
    from thinwire.spec import CodecSpec as CodecSpec
    from thinwire.spec import Factor as Factor
    from thinwire.spec import ModelSpec as ModelSpec
    from thinwire.spec import Overlap as Overlap
    from thinwire.spec import Plan as Plan
    from thinwire.spec import Wire as Wire
    from thinwire.spec.plan_parts.policy import HybridPolicy as HybridPolicy
    from thinwire.weights import Publisher as Publisher
    from thinwire.weights import Subscriber as Subscriber
    from thinwire.weights import publisher as publisher

__version__ = "0.2.0"

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

__all__ = sorted(["__version__", "codecs", *_HOME_OF])

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
