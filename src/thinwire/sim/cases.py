"""Cases: descriptions of steps to simulate, and the simulator's answers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field

from thinwire.cost import Memory, kept_activations, parts, units
from thinwire.cost.memory.stages import largest_stage
from thinwire.errors import SpecError
from thinwire.program import Lane, node_order
from thinwire.sim.engine import Engine, engines
from thinwire.sim.step import Simulated
from thinwire.sim.workload import Workload
from thinwire.spec import ClusterSpec, Factor, ModelSpec, Plan, mean_peak
from thinwire.spec.base import Count, Flag, Positive, Spec
from thinwire.spec.machines.accelerators import ACCELERATORS
from thinwire.units import parse_count

_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}

_Overlap = Literal["gather", "reduce", "sync", "spread"]

OVERLAPS = get_args(_Overlap)

_OTHERWISE = {"name", "mesh", "compute_dtype", "recompute", "micro_batch", "micro_batches", "tp", "pp", "wire"}
"""Keys of a plan for which a case has its own."""

PLAN_KEYS = tuple(key for key in Plan.model_fields if key not in _OTHERWISE | {"ep", "cp", "islands"})
"""Keys of a plan that a case may set. Of ``overlap``, what the case itself says counts."""


_Counted = BeforeValidator(lambda count: parse_count(count) if isinstance(count, str) else count)
_LongName = BeforeValidator(lambda dtype: _DTYPES.get(dtype, dtype) if isinstance(dtype, str) else dtype)


class Case(Spec):
    """One step on one cluster."""

    id: str = Field(default="", description="label, repeated in the answer")
    model: str = Field(description="preset, TOML file or Hugging Face config.json")
    gpu: str = Field(default="", description=f"accelerator: {', '.join(ACCELERATORS)}")
    gpus: Count = Field(default=1, description="accelerators of the whole cluster")
    cluster: str | None = Field(default=None, description="TOML file of a cluster; instead of gpu and gpus")
    gpus_per_node: Count | None = Field(
        default=None, description="of each node; unset: the accelerator's usual machine"
    )
    internode_gbps: Positive | None = Field(default=None, description="Gbit/s of all network cards of a node together")
    nodes_per_leaf: Count | None = Field(default=None, description="nodes below a leaf switch")
    spine_gbps: Positive | None = Field(
        default=None, description="Gbit/s from a leaf switch to the spine, per node below it; unset: no limit"
    )
    seq: Count | None = Field(default=None, description="tokens of a sequence; unset: the model's")
    micro_batch_tokens: Count | None = Field(
        default=None, description="tokens per rank and micro-batch; unset: one sequence"
    )
    micro_batches: Count = Field(default=1, description="micro-batches per step")
    tokens_per_step: Annotated[Count | None, _Counted] = Field(
        default=None, description="tokens of a step over all accelerators, instead of micro_batches; 4M is 4 x 2^20"
    )
    recompute: Flag = Field(default=False, description="blocks are recomputed in the backward")
    tp: Count = Field(default=1, description="ranks of a tensor-parallel group")
    pp: Count = Field(default=1, description="pipeline stages")
    engine: str = Field(
        default="thinwire", description="system that performs the step: thinwire, or one that a package adds"
    )
    plan: str | dict[str, Any] = Field(description="preset, or factors: params, grads, optimizer, secondary, partition")
    wire: str | dict[str, Any] | None = Field(default=None, description="policy, or fields of a plan's wire")
    dtype: Annotated[Literal["bfloat16", "float16", "float32"], _LongName] = Field(
        default="bfloat16", description="compute dtype"
    )
    overlap: tuple[_Overlap, ...] | None = Field(
        default=None, description="transfers that may overlap computation; unset: all"
    )


@dataclass(frozen=True, slots=True)
class Slowed:
    """Factors by which the slowest rank, for which all others wait, and its node's network cards take longer."""

    compute: float = 1.0
    links: float = 1.0

    def cluster(self, cluster: ClusterSpec) -> ClusterSpec:
        """A cluster on which every rank is as slow as this one.

        Raises:
            SpecError: Computation is to be slower, but the times of its kernels were measured.
        """
        measured = (machines.kernels for machines in (cluster, *cluster.groups))
        if self.compute != 1 and (path := next(filter(None, measured), None)) is not None:
            raise SpecError(
                "straggler and jitter",
                f"slow published figures down, and kernels = {path!r} are measured times: leave the cluster's kernels "
                "out to see by how much a step gets longer, or set straggler = 1 and jitter = 0",
            )
        nic = cluster.links.nic
        return cluster.with_(
            peak_flops={dtype: peak / self.compute for dtype, peak in cluster.peak_flops.items()},
            memory_bandwidth=cluster.memory_bandwidth / self.compute,
            links=cluster.links.with_(nic=nic.with_(bandwidth=nic.bandwidth / self.links)),
        )


NOT_SLOWED = Slowed()


@dataclass(frozen=True)
class Answer:
    """The simulated step of a case, its plan with all defaults resolved. ``extrapolated``: whether the case lies
    outside the range to which the engine's constants were fitted."""

    case: Case
    model: ModelSpec
    cluster: ClusterSpec
    plan: Plan
    simulated: Simulated
    memory: Memory
    extrapolated: bool

    @property
    def tokens(self) -> int:
        """Tokens per step, over all accelerators."""
        return self.plan.global_batch * self.model.seq

    @property
    def tgs(self) -> float:
        """Tokens per second and accelerator."""
        return self.tokens / self.cluster.gpus / self.simulated.seconds

    @property
    def tflops(self) -> float:
        """TFLOP/s of the model per accelerator; recomputation does not count."""
        return self.tgs * self.model.flops_per_token(self.model.seq) / 1e12

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation (MFU); attention is not halved for causality."""
        return self.tflops * 1e12 / mean_peak(self.cluster, self.case.dtype)

    def to_dict(self) -> dict[str, Any]:
        return {
            "id": self.case.id,
            "step_seconds": self.simulated.seconds,
            "tgs": self.tgs,
            "mfu": self.mfu,
            "tflops": self.tflops,
            "memory_bytes": {**self.memory.by_part(), "total": self.memory.total},
            "exposed": {
                str(lane): seconds
                for lane, seconds in self.simulated.exposed.items()
                if seconds or isinstance(lane, Lane)
            },
            "extrapolated": self.extrapolated,
        }


def read_cases(path: Path) -> list[Case]:
    """Read the cases of a JSON file.

    Raises:
        SpecError: The file cannot be read, or some cases are invalid; the message lists all problems.
    """
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise SpecError(str(path), f"cannot be read as cases: {error}") from error
    if not isinstance(rows, Sequence) or isinstance(rows, str) or not all(isinstance(row, Mapping) for row in rows):
        raise SpecError(str(path), "it should be a JSON list of objects, one for each case")
    cases, problems = [], []
    for number, row in enumerate(rows):
        try:
            cases.append(Case.parse(row, str(path)))
        except SpecError as error:
            problems += [f"case {row.get('id') or number}: {problem}" for problem in error.problems]
    if problems:
        raise SpecError(str(path), problems)
    return cases


def answer(case: Case, *, trace: bool = False, slowed: Slowed = NOT_SLOWED) -> Answer:
    """Simulate a case; with ``trace``, the simulated step keeps its spans and memory levels.

    Raises:
        SpecError: The fields of the case contradict each other.
    """
    cluster, model = _cluster(case), _model(case)
    engine = _engine(case).on(_gpu(case, cluster), cluster.gpus_per_node)
    plan = _plan(case, engine, cluster, model)
    if problems := engine.refusals(plan, model):
        raise SpecError(_what(case), problems)
    cluster = cluster.in_order(node_order(plan))
    stage = largest_stage(model, plan)
    cut = parts(stage, plan.granularity, plan.tp)
    kept = kept_activations(stage, plan, cut, seq=model.seq) if trace else ()
    workload = Workload(cut, units(stage, plan), model.seq, clip=True, kept=kept)
    machine = slowed.cluster(cluster)
    # Of unlike nodes, the step is as the slowest of them see it.
    groups: Sequence[int | None] = range(len(machine.groups)) or (None,)
    steps = [engine.step(plan, workload, machine, model, group=group, trace=trace) for group in groups]
    simulated = max(steps, key=lambda step: step.seconds)
    needed = engine.memory(model, plan, room=cluster.memory)
    outside = engine.extrapolates(_gpu(case, cluster), cluster.gpus)
    return Answer(case, model, cluster, plan, simulated, needed, outside)


def _engine(case: Case) -> Engine:
    known = engines()
    if case.engine not in known:
        more = "" if len(known) > 1 else "; the systems of publications come with thinwire-bench"
        raise SpecError(_what(case), f"engine = {case.engine!r} is unknown; valid are {', '.join(known)}{more}")
    return known[case.engine]


def _what(case: Case) -> str:
    return f"case {case.id}" if case.id else "the case"


def _gpu(case: Case, cluster: ClusterSpec) -> str:
    """The name of the accelerators, where all have one."""
    return case.gpu or cluster.accelerator or ""


def _cluster(case: Case) -> ClusterSpec:
    if case.cluster is not None:
        return _loaded(case, case.cluster)
    kind = ACCELERATORS.get(case.gpu)
    if kind is None:
        raise SpecError(_what(case), f"gpu = {case.gpu!r} is unknown; valid are {', '.join(ACCELERATORS)}")
    if "gpus" not in case.model_fields_set:
        raise SpecError(_what(case), "gpus is missing: accelerators of the whole cluster")
    local = min(case.gpus, case.gpus_per_node or kind.gpus_per_node)
    if case.gpus % local:
        raise SpecError(_what(case), f"gpus = {case.gpus} is not a multiple of gpus_per_node = {local}")
    given = {"nic": case.internode_gbps, "spine": case.spine_gbps}
    links = {name: {"bandwidth": gbps * 1e9} for name, gbps in given.items() if gbps is not None}
    changes: dict[str, Any] = {} if case.nodes_per_leaf is None else {"leaves": case.nodes_per_leaf}
    return ClusterSpec.preset(case.gpu, nodes=case.gpus // local, gpus_per_node=local, links=links, **changes)


def _loaded(case: Case, path: str) -> ClusterSpec:
    """The cluster of a file, which says all about links and nodes."""
    twice = ("gpu", "gpus", "gpus_per_node", "internode_gbps", "nodes_per_leaf", "spine_gbps")
    given = [key for key in twice if getattr(case, key) != Case.model_fields[key].default]
    if given:
        raise SpecError(
            _what(case),
            f"cluster = {path!r} and {', '.join(given)} describe the same; change the file",
        )
    return ClusterSpec.load(path)


def _model(case: Case) -> ModelSpec:
    """The case's model, with sequences no longer than the micro-batch."""
    model = ModelSpec.named(case.model, **({} if case.seq is None else {"seq": case.seq}))
    tokens = case.micro_batch_tokens or model.seq
    if tokens < model.seq:
        if case.seq is not None:
            raise SpecError(_what(case), f"micro_batch_tokens = {tokens} is less than seq = {case.seq}")
        return model.with_(seq=tokens)
    if tokens % model.seq:
        raise SpecError(_what(case), f"micro_batch_tokens = {tokens} is not a multiple of seq = {model.seq}")
    return model


def _micro_batches(case: Case, mesh: Factor, model: ModelSpec) -> int:
    """Micro-batches of a step, of which every data-parallel rank has its own."""
    if case.tokens_per_step is None:
        return case.micro_batches
    if "micro_batches" in case.model_fields_set:
        raise SpecError(_what(case), "micro_batches and tokens_per_step say the same: leave one of them out")
    together = mesh.ranks * (case.micro_batch_tokens or model.seq)
    if case.tokens_per_step % together:
        raise SpecError(
            _what(case),
            f"tokens_per_step = {case.tokens_per_step} is not a multiple of {together}, the tokens of one "
            f"micro-batch on all {mesh.ranks} data-parallel ranks: change it, micro_batch_tokens or gpus",
        )
    return case.tokens_per_step // together


def _plan(case: Case, engine: Engine, cluster: ClusterSpec, model: ModelSpec) -> Plan:
    local, nodes = cluster.gpus_per_node, cluster.nodes
    try:
        mesh = Factor(local=local, nodes=nodes).data_parallel(case.tp, case.pp)
    except SpecError:
        problem = f"tp = {case.tp} and pp = {case.pp} do not divide {nodes} nodes of {local} GPUs"
        raise SpecError(_what(case), problem) from None
    fields: dict[str, Any] = {
        "micro_batch": (case.micro_batch_tokens or model.seq) // model.seq,
        "micro_batches": _micro_batches(case, mesh, model),
        "recompute": case.recompute,
        "tp": case.tp,
        "pp": case.pp,
        "compute_dtype": "float32" if engine.messages == "float32" else case.dtype,
        "partition": engine.partition,
        "bucket_bytes": engine.bucket_bytes,
    }
    if case.overlap is not None:
        fields["overlap"] = {name: name in case.overlap for name in OVERLAPS}
    if case.wire is not None:
        fields["wire"] = {"policy": case.wire} if isinstance(case.wire, str) else case.wire
    if isinstance(case.plan, str):
        plan = Plan.preset(case.plan, nodes=mesh.nodes, local=mesh.local)
        return engine.overlapped(plan.with_(**fields))
    if unknown := [key for key in case.plan if key not in PLAN_KEYS]:
        raise SpecError(_what(case), [f"plan.{key} is unknown; valid are {', '.join(PLAN_KEYS)}" for key in unknown])
    table = {"name": "plan", "mesh": mesh.to_dict(), **fields, **case.plan}
    if case.overlap is not None and isinstance(others := case.plan.get("overlap", {}), Mapping):
        table["overlap"] = {**others, **fields["overlap"]}
    return engine.overlapped(Plan.parse(table, _what(case)))
