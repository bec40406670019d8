"""Writes configurations of other frameworks: the way out of what the rest of this package is the way into.

A configuration shards as a plan of thinwire's does that names only what the framework can do. The texts need nothing of
thinwire.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from thinwire.spec import Factor, Plan
from thinwire.spec.io import write_toml

FRAMEWORKS: Final[Mapping[str, str]] = {
    "fsdp2": "fsdp2.py",
    "hsdp": "hsdp.py",
    "megatron-fsdp": "megatron-fsdp.args",
    "deepspeed": "deepspeed.json",
    "torchtitan": "torchtitan.toml",
}
"""Frameworks whose configuration can be written, with the name of its file."""

_PRECISIONS: Final = {"float16": "fp16", "bfloat16": "bf16"}
"""Name of a compute dtype in DeepSpeed and Megatron, whose default is float32."""

_SCHEDULES: Final = {"1f1b": "1F1B", "interleaved": "Interleaved1F1B"}


@dataclass(frozen=True)
class Emitted:
    """What a configuration of one of ``FRAMEWORKS`` is written from; ``what`` is the job in words, for a comment."""

    framework: str
    plan: Plan
    seq: int
    clip: float | None
    what: str

    @property
    def group(self) -> Factor:
        """The ranks over which states are sharded."""
        return self.plan.optimizer

    @property
    def replicas(self) -> int:
        """How many groups of ranks hold the same shards."""
        return self.plan.mesh.ranks // self.group.ranks

    @property
    def sequences(self) -> int:
        """Sequences of a step, over all ranks."""
        return self.plan.micro_batch * self.plan.micro_batches * self.plan.mesh.ranks


def emitted_text(emitted: Emitted) -> str:
    """The configuration as the text of a file."""
    return _WRITERS[emitted.framework](emitted)


# -- PyTorch -----------------------------------------------------------------------------------------------------------


def _fsdp2(emitted: Emitted) -> str:
    """A module with a function that shards a model, and one that makes a step."""
    plan, replicated, clip = emitted.plan, emitted.replicas > 1, emitted.clip
    mesh_shape = (emitted.replicas, emitted.group.ranks) if replicated else (emitted.group.ranks,)
    mesh_names = ("replicate", "shard") if replicated else ("shard",)
    dtypes = f"param_dtype=torch.{plan.compute_dtype}, reduce_dtype=torch.{plan.reduce_dtype or plan.compute_dtype}"
    lines = [
        f'"""{emitted.what}: {"HSDP" if replicated else "FSDP2"} of PyTorch, written by thinwire plan.',
        "",
        "    model = shard(model)",
        "    optimizer = torch.optim.AdamW(model.parameters(), lr=...)",
        "    step(model, optimizer, batches)  # MICRO_BATCHES of them, a tensor of token ids each",
        '"""',
        "",
        "from __future__ import annotations",
        "",
        "from collections.abc import Callable, Iterable",
        "",
        "import torch",
        "from torch import nn",
        *([_CHECKPOINT] if plan.recompute else []),
        "from torch.distributed.device_mesh import init_device_mesh",
        "from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard",
        "",
        f"MICRO_BATCH = {plan.micro_batch}  # sequences of {emitted.seq} tokens on each rank",
        f"MICRO_BATCHES = {plan.micro_batches}",
        "",
        "",
        'def shard(model: nn.Module, device: str = "cuda") -> nn.Module:',
        '    """Shard a model whose parameters are fp32; its blocks are its longest list of modules."""',
        f"    mesh = init_device_mesh(device, {mesh_shape!r}, mesh_dim_names={mesh_names!r})",
        f"    policy = MixedPrecisionPolicy({dtypes})",
        "    blocks = max((m for m in model.modules() if isinstance(m, nn.ModuleList)), key=len)",
        "    for index, block in enumerate(blocks):" if plan.recompute else "    for block in blocks:",
        *(["        blocks[index] = block = checkpoint_wrapper(block)"] if plan.recompute else []),
        f"        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward={_resharding(emitted)!r})",
        "    return fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)",
        "",
        "",
        "def step(",
        "    model: nn.Module,",
        "    optimizer: torch.optim.Optimizer,",
        "    batches: Iterable[torch.Tensor],",
        "    loss_of: Callable[[nn.Module, torch.Tensor], torch.Tensor] | None = None,",
        ") -> torch.Tensor:",
        '    """One optimizer step over MICRO_BATCHES micro-batches; returns the mean loss of this rank."""',
        "    assert isinstance(model, FSDPModule)",
        "    total = torch.zeros(())",
        "    for number, ids in enumerate(batches, start=1):" if replicated else "    for ids in batches:",
        *(["        model.set_requires_all_reduce(number == MICRO_BATCHES)"] if replicated else []),
        "        loss = model(ids, labels=ids).loss if loss_of is None else loss_of(model, ids)",
        "        loss = loss / MICRO_BATCHES",
        "        loss.backward()",
        "        total = total.to(loss.device) + loss.detach()",
        *([] if clip is None else [f"    torch.nn.utils.clip_grad_norm_(model.parameters(), {clip!r})"]),
        "    optimizer.step()",
        "    optimizer.zero_grad()",
        "    return total",
        "",
    ]
    return "\n".join(lines)


_CHECKPOINT: Final = "from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper"


def _resharding(emitted: Emitted) -> bool | int:
    """``reshard_after_forward``: whether parameters are cut again, or the ranks that keep a secondary shard."""
    plan = emitted.plan
    if plan.params.ranks == 1:
        return False
    return True if plan.secondary is None else plan.secondary.ranks


# -- others ------------------------------------------------------------------------------------------------------------


def _deepspeed(emitted: Emitted) -> str:
    plan = emitted.plan
    stage = 3 if plan.params.ranks > 1 else 2 if plan.grads.ranks > 1 else 1
    elements = plan.bucket_bytes // 2
    zero: dict[str, Any] = {
        "stage": stage,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_scatter": True,
        "reduce_bucket_size": elements,
    }
    if stage < 3:
        zero["allgather_bucket_size"] = elements
    else:
        zero["stage3_prefetch_bucket_size"] = elements
        zero["stage3_gather_16bit_weights_on_model_save"] = True
    if plan.secondary is not None:
        zero["zero_hpz_partition_size"] = plan.secondary.ranks
    precision = _PRECISIONS.get(plan.compute_dtype)
    table = {
        "train_micro_batch_size_per_gpu": plan.micro_batch,
        "gradient_accumulation_steps": plan.micro_batches,
        **({} if emitted.clip is None else {"gradient_clipping": emitted.clip}),
        **({} if precision is None else {precision: {"enabled": True}}),
        "zero_optimization": zero,
    }
    return json.dumps(table, indent=2) + "\n"


def _torchtitan(emitted: Emitted) -> str:
    plan = emitted.plan
    reshard = _resharding(emitted)
    table: dict[str, Any] = {
        "training": {
            "local_batch_size": plan.micro_batch,
            "global_batch_size": emitted.sequences,
            "seq_len": emitted.seq,
            "max_norm": math.inf if emitted.clip is None else emitted.clip,  # 1.0 by default
            "mixed_precision_param": plan.compute_dtype,
            "mixed_precision_reduce": plan.reduce_dtype or "float32",
        },
        "parallelism": {
            "data_parallel_replicate_degree": emitted.replicas,
            "data_parallel_shard_degree": emitted.group.ranks,
            "fsdp_reshard_after_forward": "always" if reshard else "never",
            "tensor_parallel_degree": plan.tp,
            "pipeline_parallel_degree": plan.pp,
            **({"pipeline_parallel_schedule": _SCHEDULES[plan.pipeline_schedule]} if plan.pp > 1 else {}),
        },
        "activation_checkpoint": {"mode": "full" if plan.recompute else "none"},
    }
    head = [
        f"# {emitted.what}: torchtitan 0.2, written by thinwire plan.",
        "# Add [model], [optimizer] and a data set.",
    ]
    return "\n".join([*head, "", write_toml(table)])


def _megatron(emitted: Emitted) -> str:
    plan = emitted.plan
    precision = _PRECISIONS.get(plan.compute_dtype)
    strategy = "optim_grads_params" if plan.params.ranks > 1 else "optim_grads" if plan.grads.ranks > 1 else "optim"
    flags = [
        f"--micro-batch-size {plan.micro_batch}",
        f"--global-batch-size {emitted.sequences}",
        f"--seq-length {emitted.seq}",
        f"--tensor-model-parallel-size {plan.tp}",
        *(["--sequence-parallel"] if plan.tp > 1 and plan.sequence_parallel else []),
        *([] if precision is None else [f"--{precision}"]),
        f"--clip-grad {emitted.clip or 0.0}",  # 1.0 by default
        "--use-megatron-fsdp",
        f"--data-parallel-sharding-strategy {strategy}",
        "--use-distributed-optimizer",
        "--overlap-grad-reduce",
        "--overlap-param-gather",
        "--no-gradient-accumulation-fusion",
        "--ckpt-format fsdp_dtensor",
    ]
    if precision == "bf16" and plan.reduce_dtype != "float32":
        flags.append("--grad-reduce-in-bf16")
    if emitted.replicas > 1:
        flags += [f"--num-distributed-optimizer-instances {emitted.replicas}", "--outer-dp-sharding-strategy no_shard"]
    if plan.recompute:
        flags += ["--recompute-granularity full", "--recompute-method uniform", "--recompute-num-layers 1"]
    return f"# {emitted.what}: Megatron-FSDP, written by thinwire plan.\n" + "\n".join(flags) + "\n"


_WRITERS: Final[Mapping[str, Callable[[Emitted], str]]] = {
    "fsdp2": _fsdp2,
    "hsdp": _fsdp2,
    "megatron-fsdp": _megatron,
    "deepspeed": _deepspeed,
    "torchtitan": _torchtitan,
}
