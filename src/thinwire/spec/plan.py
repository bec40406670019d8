"""The plan: how a model is spread over a mesh of ranks, and what each collective puts on the wire.

A plan is the contract between the planner that emits it, the runtime that obeys it, the simulator that
prices it and the checkpoint that stores it. It holds decisions only; what they imply for a given model is the
program. The file is long because all keys, and the rules between them, are to be found in one place.
"""

from __future__ import annotations

import contextlib
import fnmatch
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field

from thinwire.errors import SpecError
from thinwire.spec import io
from thinwire.spec.base import Budget, Bytes, Count, Depth, Flag, Problem, Spec, rule
from thinwire.spec.factor import Factor
from thinwire.spec.plan_parts.chain import chain_problems, divisors, fill_problem, groups, on_mesh
from thinwire.spec.plan_parts.islands import Islands
from thinwire.spec.plan_parts.policy import HybridPolicy
from thinwire.spec.plan_parts.presets import PRESETS, engine_fields, preset_fields
from thinwire.spec.plan_parts.residence import Frozen, Residence
from thinwire.spec.plan_parts.units import Dtype, Overlap, UnitOverride
from thinwire.spec.plan_parts.wire import GRADIENTS, Wire
from thinwire.spec.renames import PLAN_KEYS, without_residence

__all__ = ["Dtype", "Factor", "Overlap", "Plan", "UnitOverride", "Wire", "lone_ranks"]

MIB = 1 << 20


def lone_ranks(count: int) -> Plan:
    """Every one of ``count`` ranks trains for itself: an island each, and none of them ever exchanges anything."""
    one, never = Factor(), 1 << 30
    return Plan(name="alone", mesh=one, params=one, grads=one, optimizer=one, islands=Islands(count=count, every=never))


_NO_EXCEPTION = UnitOverride(match="*")


class Plan(Spec):
    """How one training job is sharded, overlapped and compressed."""

    file_keys: ClassVar[Mapping[str, str]] = PLAN_KEYS
    former_keys: ClassVar[Mapping[str, str]] = {"schedule": "pipeline_schedule", "keep_gathered": "kept_unit"}

    name: str | None = Field(default=None, description="label of the preset or of whoever made the plan")
    mesh: Factor = Field(description="the data-parallel ranks, s_dp: ranks of a node times nodes")
    params: Factor = Field(description="sharding factor of the parameters, s_p")
    grads: Factor = Field(description="sharding factor of the gradients, s_g: equal to params or to optimizer")
    optimizer: Factor = Field(description="sharding factor of the optimizer states, s_os")
    partition: Literal["intra", "inter"] = Field(
        default="intra", description="how OS is cut from a P shard: intra = equal flat slices, inter = whole tensors"
    )
    secondary: Factor | None = Field(
        default=None, description="factor of a second, closer parameter shard kept from forward to backward (hpZ)"
    )
    secondary_reuse: Flag = Field(
        default=False, description="forwards of later micro-batches gather from the secondary shard"
    )
    compute_dtype: Dtype = Field(default="bfloat16", description="dtype of parameters in forward and backward")
    accumulate_dtype: Literal["bfloat16", "float32"] = Field(
        default="float32", description="dtype of the gradient shard"
    )
    reduce_dtype: Dtype | None = Field(
        default=None, description="dtype in which gradients cross the wire; unset: the compute dtype"
    )
    grad_reduce: Literal["mean", "sum"] = Field(
        default="mean", description="whether gradients are averaged or summed over data-parallel ranks"
    )
    prefetch: Depth = Field(default=1, description="units gathered ahead of the one that runs")
    prefetch_bytes: Bytes | None = Field(
        default=None,
        description="units are gathered ahead until they have this many bytes, in the forward and in the backward; "
        "unset: as many units as prefetch says",
    )
    granularity: Literal["block", "module"] = Field(
        default="block", description="what one collective covers: a whole block, or one module of it"
    )
    backward_prefetch: Literal["block", "module"] = Field(
        default="block",
        description="where modules are units: whether the backward gathers the modules of the next block ahead, or the "
        "next module only, as AMSP does without recomputation",
    )
    gather_bytes: Budget = Field(
        default=0,
        description="gathers of units that start together travel as one, until they have this many bytes; 0: each "
        "unit by itself",
    )
    reduce_bytes: Budget = Field(
        default=0,
        description="gradients of consecutive units are reduced over params as one, until they have this many bytes; "
        "0: each unit by itself",
    )
    spread_bytes: Budget = Field(
        default=0,
        description="updated parameters of consecutive units are spread as one, until they have this many bytes; 0: "
        'each unit by itself, as always with partition = "inter" or wire.spread_difference',
    )
    bucket_bytes: Bytes = Field(default=4 * MIB, description='size of a synchronisation bucket, "4MiB" or bytes')
    bucket_chunks: Count = Field(
        default=1,
        description="split each gradient reduction into this many pipelined chunks: each starts when its gradients "
        "exist, and hops and codecs of different chunks overlap; small reductions have fewer",
    )
    kept_unit: Literal["none", "last"] = Field(
        default="last", description="which unit stays gathered between its forward and its backward"
    )
    persist_bytes: Budget = Field(
        default=0, description="units of at most this many bytes are gathered once a step and stay whole until its end"
    )
    reuse_bytes: Budget = Field(
        default=0, description="keep a unit gathered if fewer bytes than this run before its next use"
    )
    live_bytes: Bytes | None = Field(
        default=None,
        description="most bytes of units that are gathered at once: the limit of prefetch_bytes, prefetch and "
        "reuse_bytes; required units ignore this limit; unset: no limit",
    )
    recompute: Flag = Field(default=False, description="activations are recomputed in the backward, not stored")
    micro_batch: Count = Field(default=1, description="sequences of one micro-batch on one rank")
    micro_batches: Count = Field(default=1, description="micro-batches of one step (M)")
    tp: Count = Field(default=1, description="tensor-parallel ranks, beside the mesh")
    sequence_parallel: Flag = Field(
        default=True,
        description="whether tp also divides tokens between matrices, by reduce-scatters and all-gathers; false: "
        "every tensor-parallel rank keeps them whole, by all-reduces",
    )
    pp: Count = Field(default=1, description="pipeline stages, beside the mesh")
    ep: Count = Field(
        default=1, description="neighbouring ranks of the mesh that share the experts of every block (expert-parallel)"
    )
    cp: Count = Field(
        default=1, description="neighbouring ranks of the mesh that share every sequence (context-parallel)"
    )
    pipeline_schedule: Literal["1f1b", "interleaved"] = Field(default="1f1b", description="order of work in a pipeline")
    placement: tuple[Annotated[int, Field(strict=True)], ...] | None = Field(
        default=None,
        description="the physical rank that takes each position of the mesh, node by node; unset: in order",
    )
    topology: Annotated[str, Field(min_length=1)] | None = Field(
        default=None,
        description='where leaf switches are read, below which ranks are put in order at start: a file, `"slurm"`, '
        '`"timed"` (pairs of nodes are timed), or `"auto"` (SLURM\'s where it has one, else timed); unset: in order',
    )
    overlap: Overlap = Field(default=Overlap(), description="what may run beside computation")
    wire: Wire = Field(default=Wire(), description="the codec of every kind of collective")
    residence: Residence = Field(default=Residence(), description="where states live between their uses")
    frozen: Frozen = Field(default=Frozen(), description="how parameters are kept that are not trained")
    islands: Islands | None = Field(
        default=None,
        description="islands that train for themselves and exchange now and then; unset: all ranks step together",
    )
    units: tuple[UnitOverride, ...] = Field(default=(), description="exceptions for units by name; the last match wins")

    @classmethod
    def prepare(cls, data: Mapping[str, Any]) -> Mapping[str, Any]:
        """Leaves out a table of older files that says nothing. A policy's codec of reductions to the owners of
        optimizer states is for those beside an all-reduce: a plan's only reduction is its all-reduce (ZeRO-1)."""
        data = without_residence(data)
        wire = data.get("wire")
        # What is invalid stays: the field's own check reports it, together with every other problem.
        if isinstance(wire, Mapping) and isinstance(policy := wire.get("policy"), str) and wire.get("dp") is None:
            with contextlib.suppress(SpecError):
                mesh, params, optimizer = (Factor.parse(data.get(name, {})) for name in ("mesh", "params", "optimizer"))
                if params.ranks == 1 and optimizer == mesh:
                    data = {**data, "wire": {**wire, "dp": HybridPolicy.parse(policy).dp}}
        return data

    @property
    def world(self) -> int:
        """The number of data-parallel ranks that step together: those of one island."""
        return self.mesh.ranks

    @property
    def num_islands(self) -> int:
        """The number of islands; 1 if all ranks step together."""
        return 1 if self.islands is None else self.islands.count

    @property
    def is_elastic(self) -> bool:
        """Whether each island is a job of its own, which may vanish and come back."""
        return self.islands is not None and self.islands.elastic

    @property
    def job_islands(self) -> int:
        """The number of islands that are ranks of one job."""
        return 1 if self.is_elastic else self.num_islands

    @property
    def job_mesh(self) -> Factor:
        """The data-parallel ranks of a job: ranks of a node times nodes."""
        return Factor(local=self.mesh.local, nodes=self.mesh.nodes * self.job_islands)

    @property
    def data_ranks(self) -> int:
        """The number of data-parallel ranks over all islands."""
        return self.world * self.num_islands

    @property
    def samplers(self) -> int:
        """The number of ranks, or groups of ``cp`` ranks, with sequences of their own, over all islands."""
        return self.data_ranks // self.cp

    @property
    def global_batch(self) -> int:
        """Sequences of a step, over all ranks."""
        return self.samplers * self.micro_batch * self.micro_batches

    @property
    def ranks(self) -> int:
        """All ranks of a job, the data-parallel ones of each stage, tensor-parallel rank and island of it."""
        return self.job_mesh.ranks * self.tp * self.pp

    def override(self, name: str) -> UnitOverride:
        """The exceptions that hold for a unit: of each key, the last of ``units`` that matches and sets it.

        Args:
            name: dotted module name of the unit, or of a block or module for ``granularity``.
        """
        merged: dict[str, Any] = {}
        for unit in self.units:
            if fnmatch.fnmatchcase(name, unit.match):
                fields = ((key, getattr(unit, key)) for key in type(unit).model_fields if key != "match")
                merged |= {key: value for key, value in fields if value is not None}
        return UnitOverride(match=name or "*", **merged) if merged else _NO_EXCEPTION

    def unit_dtype(self, name: str) -> Dtype:
        """The compute dtype of a unit's parameters."""
        return self.override(name).dtype or self.compute_dtype

    @property
    def effective_reduce_dtype(self) -> Dtype:
        """The dtype in which gradients cross the wire."""
        return self.reduce_dtype or self.compute_dtype

    @property
    def scales_loss(self) -> bool:
        """Whether gradients are float16 somewhere on their way, so that the loss needs a scale: below 6e-8, float16 is
        zero, and above 65504 it is infinite."""
        return "float16" in {self.compute_dtype, self.effective_reduce_dtype, *(unit.dtype for unit in self.units)}

    @property
    def gathers_by_bytes(self) -> bool:
        """Whether any number of bytes decides what is gathered at once, ahead, or for longer."""
        limits = (self.prefetch_bytes, self.live_bytes)
        return bool(self.gather_bytes or self.persist_bytes or self.reuse_bytes) or any(n is not None for n in limits)

    @property
    def gathers(self) -> bool:
        """Whether all units are gathered before they are used: parameters are sharded, or live on the host."""
        return self.params.ranks > 1 or self.residence.streams_params

    @property
    def grads_like_optimizer(self) -> bool:
        """Whether ``G`` is sharded like ``OS``: then every micro-batch reduces its gradients to optimizer shares."""
        return self.grads == self.optimizer

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Reads a TOML file; see :meth:`parse`."""
        name = str(path).removeprefix("preset:")
        if name in PRESETS and not Path(path).exists():
            raise SpecError(
                str(path), f"is a preset, and no file: Plan.preset({name!r}, nodes=..., local=...) makes it"
            )
        return super().load(path)

    @classmethod
    def preset(
        cls,
        name: str,
        *,
        nodes: int,
        local: int,
        group: Factor | str | None = None,
        engine: str = "thinwire",
        **overrides: Any,
    ) -> Plan:
        """A classic system's plan on a mesh of ``nodes`` nodes of ``local`` ranks.

        Args:
            name: one of :meth:`preset_names`.
            nodes: nodes of the mesh.
            local: ranks of each node.
            group: the factor, instead of one node, within which a preset shards (``zero1-node``, ``mics``,
                ``hsdp``, ``thinwire``), keeps its secondary shard (``hpz``, ``zeropp``, ``zeropp-8bit``), or the ranks
                of one island (``islands``, ``islands-4bit``, ``islands-streaming``).
            engine: ``"amsp"`` performs the factors as AMSP's engine does: whole tensors dealt to ranks, modules as
                units, reductions under input gradients, sums in bf16, buckets of 512 MiB.
            **overrides: fields to change; a dictionary changes the named keys of a nested table only.

        Raises:
            SpecError: if the name or the engine is unknown, the preset takes no group, or the plan breaks a rule.
        """
        performed = engine_fields(engine, recompute=overrides.get("recompute") is True)
        fields = preset_fields(name, nodes=nodes, local=local, group=group) | performed
        plan = cls.parse({"name": name, **fields})
        return cls.parse(plan._merged(overrides), f"preset {name!r}")

    @staticmethod
    def preset_names(*, islands: bool = True) -> tuple[str, ...]:
        """The names that :meth:`preset` takes.

        Args:
            islands: whether those with islands are among them, under which ranks do not step together.
        """
        return tuple(name for name, preset in PRESETS.items() if islands or preset.islands is None)

    def fitted(self, mesh: Factor) -> Self:
        """The same kind of plan on another mesh: a factor that is the whole mesh, or a whole node, stays so, and others
        keep as many ranks as divide the new mesh. Islands stay as they are, and there are more or fewer of them.

        Args:
            mesh: data-parallel ranks of a node, and nodes, of all islands.

        Returns:
            The plan, with ranks in order where they were placed.

        Raises:
            SpecError: the ranks are not those of a number of whole islands.
        """
        if self.islands is not None:
            if self.is_elastic and mesh.ranks == self.world:
                return self
            if mesh.ranks % self.world:
                raise SpecError(
                    "plan",
                    f"mesh = {self.mesh} of one island, with {self.world} ranks: {mesh.ranks} ranks are no number "
                    f"of whole islands; start a multiple of {self.world}",
                )
            return self.with_(islands={"count": mesh.ranks // self.world})
        if mesh == self.mesh:
            return self
        factors = {name: getattr(self, name) for name in ("params", "grads", "optimizer", "secondary")}
        fitted = {name: on_mesh(factor, self.mesh, mesh) for name, factor in factors.items() if factor is not None}
        return self.with_(mesh=mesh, placement=None, **fitted)

    def for_experts(self) -> Self:
        """The plan of the experts that a rank holds with ``ep``: on the mesh of the ranks that hold the same ones, with
        factors fitted to it; the plan itself without ``ep``."""
        if self.ep == 1:
            return self
        group = self.mesh.group(self.ep)
        assert group is not None, "a rule of this type"
        fitted = self.with_(ep=1, cp=1).fitted(group.quotient(self.mesh))
        # A secondary shard of a single rank would be a whole copy.
        whole = fitted.secondary is not None and fitted.secondary.ranks == 1
        return fitted.with_(secondary=None, secondary_reuse=False) if whole else fitted

    def with_exact_gradients(self) -> Self:
        """The same plan with gradients as they are: what holds after ``wire.compress_until``."""
        exact = dict.fromkeys((*GRADIENTS, "scatter"), "none")
        return self.with_(wire={**exact, "error_feedback": False})

    def uncompressed(self) -> Self:
        """The same plan with every codec ``none``."""
        overrides = tuple(unit.with_(codec=None) for unit in self.units)
        exact = {"codec": "none", "error_feedback": False, "outer_wire": "all"}
        islands = {} if self.islands is None else {"islands": exact}
        return self.with_(wire=Wire(), frozen=Frozen(), units=overrides, **islands)

    def to_file(self, *, full: bool = False) -> dict[str, Any]:
        """Plain dictionaries with the keys of plan files.

        Args:
            full: every key that may have several values; without it, those that differ from the defaults.
        """
        return super().to_file(full=full)

    def to_toml(self, *, full: bool = False) -> str:
        """TOML text of a plan file, which begins with a line for people.

        Args:
            full: every key, as a run and a checkpoint keep it, so that no later default changes them.
        """
        preset = PRESETS.get(self.name or "")
        text = self.describe() if preset is None else f"preset {self.name}: {preset.summary}"
        heading = "".join(each if each.isprintable() else " " for each in text)  # a name may have any characters
        return f"# {heading}\n{io.write_toml(self.to_file(full=full))}"

    def save(self, path: str | Path, *, full: bool = False) -> None:
        """Writes :meth:`to_toml` to ``path``."""
        Path(path).write_text(self.to_toml(full=full), encoding="utf-8")

    def fingerprint(self) -> str:
        """Twelve hexadecimal digits of the content, the same on every machine; the name does not count."""
        return self._fingerprint(exclude=("name",))

    def unsuitable(self, *problems: str) -> SpecError:
        """An error about what does not suit this plan."""
        return SpecError(f"plan {self.name or self.fingerprint()}", problems)

    def describe(self) -> str:
        """One line for people."""
        factors = f"P {self.params}, G {self.grads}, OS {self.optimizer} ({self.partition})"
        parts = [f"{self.name or 'plan'} on mesh {self.mesh}: {factors}"]
        if self.secondary is not None:
            parts.append(f"secondary {self.secondary}")
        parts.append(self.compute_dtype)
        if self.micro_batches > 1:
            parts.append(f"{self.micro_batches} micro-batches")
        if self.recompute:
            parts.append("recompute")
        axes = {"tp": self.tp, "pp": self.pp, "ep": self.ep, "cp": self.cp}
        parts += [f"{axis} {ways}" for axis, ways in axes.items() if ways > 1]
        if self.tp > 1 and not self.sequence_parallel:
            parts.append("whole sequences on each tp rank")
        if self.pipeline_schedule != "1f1b":
            parts.append(self.pipeline_schedule)
        if self.topology is not None:
            parts.append(f"ranks ordered by topology {self.topology}")
        codecs = [f"{name} {codec}" for name, codec in self.wire.codecs().items() if not codec.is_none]
        parts.append(f"wire {', '.join(codecs)}" if codecs else "uncompressed")
        if self.wire.error_feedback:
            parts.append("error feedback")
        if not self.frozen.storage.is_none:
            parts.append(f"frozen {self.frozen.storage}")
        if not self.residence.on_device:
            parts.append(f"residence {self.residence}")
        if self.islands is not None:
            parts.append(self.islands.describe())
        return "; ".join(parts)

    @rule("mesh", "params", "grads", "optimizer")
    def _factors_form_a_chain(self) -> Iterator[Problem]:
        """``params`` divides ``grads``, ``grads`` divides ``optimizer``, ``optimizer`` divides ``mesh``, on
        both axes; a factor that crosses nodes uses every rank of a node; ``grads`` equals ``params`` or
        ``optimizer``."""
        yield from chain_problems(self.mesh, self.params, self.grads, self.optimizer)

    @rule("mesh", "params", "secondary", "secondary_reuse")
    def _secondary_is_inside_params(self) -> Iterator[Problem]:
        """``secondary`` divides ``params`` on both axes and, if it crosses nodes, uses every rank of a node;
        ``secondary_reuse`` needs it. Equal to ``params``, as on one node, it is valid and saves nothing."""
        secondary = self.secondary
        if secondary is None:
            if self.secondary_reuse:
                yield Problem("secondary_reuse", "= true needs a secondary shard: set secondary, or set it to false")
            return
        if not secondary.divides(self.params):
            yield Problem(
                "secondary", f"= {secondary} should divide params = {self.params} on both axes; {divisors(self.params)}"
            )
        if not secondary.fills_node(self.mesh):
            yield fill_problem("secondary", secondary, self.mesh)

    @rule("mesh", "placement")
    def _placement_is_a_permutation(self) -> Iterator[Problem]:
        """``placement`` names each rank of ``mesh`` exactly once."""
        if self.placement is not None and sorted(self.placement) != list(range(self.world)):
            yield Problem(
                "placement",
                f"= {list(self.placement)} should name each of the ranks 0 to {self.world - 1} exactly once "
                f"(mesh = {self.mesh})",
            )

    @rule("placement", "topology", "tp", "pp")
    def _ranks_are_ordered_once(self) -> Iterator[Problem]:
        """``topology`` excludes ``placement``, and needs ``tp = 1`` and ``pp = 1``."""
        if self.topology is None:
            return
        if self.placement is not None:
            yield Problem("topology", f"= {self.topology!r} and placement both order the ranks; leave one of them out")
        if self.tp > 1 or self.pp > 1:
            yield Problem(
                "topology",
                f"= {self.topology!r} with tp = {self.tp} and pp = {self.pp}: there the launcher's order of hosts "
                "places the ranks; leave it unset, and order hosts with thinwire plan --hosts FILE --placement DIR",
            )

    @rule("topology", "islands")
    def _islands_are_neighbours(self) -> Iterator[Problem]:
        """``topology`` excludes ``islands``."""
        if self.topology is not None and self.islands is not None:
            yield Problem(
                "topology",
                f"= {self.topology!r} with islands: it orders the ranks of one mesh; leave it unset, and start the "
                "hosts of an island one after another",
            )

    @rule("islands", "tp", "pp")
    def _elastic_islands_are_data_parallel(self) -> Iterator[Problem]:
        """``islands.elastic`` needs ``tp = 1`` and ``pp = 1``."""
        if self.is_elastic and (self.tp > 1 or self.pp > 1):
            yield Problem(
                "islands",
                f"elastic = true with tp = {self.tp} and pp = {self.pp}: an island that comes back fetches the state "
                "of data-parallel ranks only; use tp = 1 and pp = 1, or elastic = false",
            )

    @rule("islands", "compute_dtype", "units")
    def _visible_changes_are_of_bf16(self) -> Iterator[Problem]:
        """``islands.outer_wire = "visible"`` needs ``compute_dtype = "bfloat16"``, also in ``units``."""
        dtypes = {self.compute_dtype, *(unit.dtype for unit in self.units if unit.dtype)}
        if self.islands is not None and self.islands.sends_visible and dtypes != {"bfloat16"}:
            yield Problem(
                "islands",
                f"outer_wire = 'visible' with forwards in {', '.join(sorted(dtypes))}: it sends what a forward in "
                "bfloat16 would see; set compute_dtype to 'bfloat16', or outer_wire to 'all'",
            )

    @rule("mesh", "ep", "cp", "tp", "pp")
    def _neighbours_share(self) -> Iterator[Problem]:
        """``ep`` and ``cp`` divide the ranks of a node, or are the ranks of a number of nodes that divides the nodes;
        they need ``tp = 1`` and ``pp = 1``."""
        for axis, ways in (("ep", self.ep), ("cp", self.cp)):
            if ways > 1 and (self.tp > 1 or self.pp > 1):
                yield Problem(axis, f"= {ways} with tp = {self.tp} and pp = {self.pp}: it needs tp = 1 and pp = 1")
            elif self.mesh.group(ways) is None:
                yield Problem(axis, f"= {ways} does not divide mesh = {self.mesh}; valid are {groups(self.mesh)}")

    @rule("ep", "cp", "placement", "topology", "islands", "units", "wire")
    def _neighbours_stay(self) -> Iterator[Problem]:
        """``ep`` and ``cp`` exclude ``placement``, ``topology`` and ``islands``; ``ep`` also ``units`` and
        ``wire.exclude``."""
        excluded: dict[str, object] = {
            "placement": self.placement, "topology": self.topology, "islands": self.islands
        }  # fmt: skip
        of_experts = {"units": self.units, "wire.exclude": self.wire.exclude}
        for axis, ways, keys in (("ep", self.ep, excluded | of_experts), ("cp", self.cp, excluded)):
            for key in [key for key, value in keys.items() if value] if ways > 1 else ():
                yield Problem(key, f"does not work with {axis} = {ways}; leave it unset, or use {axis} = 1")

    @rule("tp", "overlap")
    def _input_gradients_need_whole_layers(self) -> Iterator[Problem]:
        """``overlap.input_gradient`` needs ``tp = 1``."""
        if self.overlap.input_gradient and self.tp > 1:
            yield Problem(
                "overlap.input_gradient",
                f"= true with tp = {self.tp}: the gradients of a layer that tensor-parallel ranks share come from "
                "torch's own backward; set it to false, or use tp = 1",
            )

    @rule("overlap", "prefetch_bytes")
    def _prefetch_needs_overlap(self) -> Iterator[Problem]:
        """``prefetch_bytes`` needs ``overlap.gather``."""
        if self.prefetch_bytes is not None and not self.overlap.gather:
            yield Problem(
                "prefetch_bytes",
                f"= {self.prefetch_bytes} with overlap.gather = false, which gathers nothing ahead: leave it unset, or "
                "set overlap.gather to true",
            )

    @rule("live_bytes", "persist_bytes")
    def _persistent_units_are_live(self) -> Iterator[Problem]:
        """``persist_bytes`` is at most ``live_bytes``."""
        if self.live_bytes is not None and self.persist_bytes > self.live_bytes:
            yield Problem(
                "persist_bytes",
                f"= {self.persist_bytes} with live_bytes = {self.live_bytes}: units that stay whole count as live; set "
                "persist_bytes to at most live_bytes",
            )

    @rule("pp", "frozen")
    def _stages_keep_values(self) -> Iterator[Problem]:
        """``frozen.storage`` needs ``pp = 1``."""
        if self.pp > 1 and not self.frozen.storage.is_none:
            yield Problem(
                "frozen",
                f"storage = {str(self.frozen.storage)!r} with pp = {self.pp}: parameters of a pipeline stage stay "
                "whole, or every micro-batch would decode them anew; use pp = 1, or storage = 'none'",
            )

    @rule("pp", "pipeline_schedule")
    def _schedule_needs_a_pipeline(self) -> Iterator[Problem]:
        """``pipeline_schedule = "interleaved"`` needs ``pp`` of at least 2."""
        if self.pipeline_schedule == "interleaved" and self.pp == 1:
            yield Problem("pipeline_schedule", "= 'interleaved' needs pp of at least 2; with pp = 1 use '1f1b'")
