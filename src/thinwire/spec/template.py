"""The plan of a recipe before the run's ranks are known: a preset or a plan file, and the keys that change it.

A recipe names its plan. :meth:`PlanTemplate.read` reads the plan file once; nothing else in this module reads files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from thinwire.errors import SpecError
from thinwire.spec.cut import keeps_busy
from thinwire.spec.factor import Factor
from thinwire.spec.plan import Dtype, Plan
from thinwire.spec.recipe import BATCH, Recipe


@dataclass(frozen=True)
class PlanTemplate:
    """The plan of a recipe, ready to be resolved on any mesh without reading anything else.

    Attributes:
        recipe: The recipe whose ``plan`` table this is.
        file: The plan in the table's ``file``; ``None`` if the table names a preset or is a whole plan.
    """

    recipe: Recipe
    file: Plan | None

    @classmethod
    def read(cls, recipe: Recipe) -> Self:
        """Read the plan file of a recipe, if it names one.

        Raises:
            SpecError: The file cannot be read or holds no valid plan, or the recipe names a preset as well.
        """
        preset, file = recipe.plan.get("preset"), recipe.plan.get("file")
        if preset is not None and file is not None:
            raise SpecError("plan", f"preset = {preset!r} and file = {file!r} exclude each other; leave one out")
        return cls(recipe, None if file is None else Plan.load(file))

    @property
    def mesh(self) -> Factor | None:
        """The data-parallel ranks of all islands that a plan file or an inline plan names; ``None`` for a preset."""
        keys = self.recipe.plan
        if self.file is not None:
            named, count, elastic = self.file.mesh, self.file.num_islands, self.file.is_elastic
        elif "mesh" in keys:
            named, count, elastic = Factor.parse(keys["mesh"], "plan.mesh"), 1, False
        else:
            return None
        islands = keys.get("islands")
        changes = islands if isinstance(islands, Mapping) else {}
        if changes.get("elastic", elastic) is True:
            return named
        asked = changes.get("count", count)
        return Factor(local=named.local, nodes=named.nodes * (asked if isinstance(asked, int) and asked > 0 else 1))

    @property
    def model_parallel(self) -> tuple[int, int]:
        """The number of tensor-parallel ranks and of pipeline stages."""
        keys = self.recipe.plan
        ways = [keys.get(axis, 1 if self.file is None else getattr(self.file, axis)) for axis in ("tp", "pp")]
        # Validation of the plan reports a value that is not a number, together with all other problems.
        tp, pp = (way if isinstance(way, int) and way > 0 else 1 for way in ways)
        return tp, pp

    def with_recipe(self, **changes: Any) -> Self:
        """The template of the same plan in a recipe with other keys than ``plan`` changed."""
        assert "plan" not in changes, "another plan needs another template"
        return replace(self, recipe=self.recipe.with_(**changes))

    def resolve(self, mesh: Factor, *, auto_dtype: Dtype = "bfloat16") -> Plan:
        """Resolve the plan on a mesh.

        Args:
            mesh: Data-parallel ranks per node, and nodes.
            auto_dtype: The compute dtype that ``compute_dtype = "auto"`` stands for on this machine.

        Returns:
            The plan, with the global batch of the recipe if it sets one.

        Raises:
            SpecError: The preset does not exist, the plan breaks a rule or is for another mesh, or the batch size
                or sequence length does not fit the plan.
        """
        plan = self._with_global_batch(self._without_global_batch(mesh, auto_dtype))
        seq = self.recipe.train.seq
        if seq % plan.cp:
            raise SpecError(
                "train", f"seq = {seq} should be a multiple of plan.cp = {plan.cp}, whose ranks share sequences"
            )
        if plan.sequence_parallel and seq % plan.tp:
            raise SpecError(
                "train",
                f"seq = {seq} should be a multiple of plan.tp = {plan.tp}, which cuts sequences, too, unless "
                "plan.sequence_parallel = false",
            )
        return plan

    def with_global_batch(self, sequences: int) -> Self:
        """The template of the same plan with this many sequences in a step."""
        plan = {key: value for key, value in self.recipe.plan.items() if key != "micro_batches"}
        return replace(self, recipe=self.recipe.with_(plan=plan, train={"global_batch": sequences}))

    def fitted(self, mesh: Factor) -> Self:
        """The template for another mesh: this one if the plan is a preset, which scales with the mesh; otherwise one
        with the result of :meth:`Plan.fitted` as its recipe's plan."""
        named = self.mesh
        if named is None:
            return self
        table = self._without_global_batch(named, "bfloat16").fitted(mesh).to_dict()
        if self.recipe.plan.get("compute_dtype") == "auto":
            table["compute_dtype"] = "auto"  # the new machine chooses its own dtype
        return type(self)(self.recipe.with_(plan=table), file=None)

    def replaced(self, mesh: Factor) -> tuple[str, ...]:
        """One sentence for each key of a plan file that the recipe's batch or recomputation replaces."""
        if self.file is None:
            return ()
        plan = self._with_global_batch(self._without_global_batch(mesh, "bfloat16"))
        return tuple(
            f"the recipe's {key} = {getattr(plan, key)} replaces the plan file's {getattr(self.file, key)}"
            for key in BATCH
            if getattr(plan, key) != getattr(self.file, key)
        )

    def _without_global_batch(self, mesh: Factor, auto_dtype: Dtype) -> Plan:
        """The plan with its own batch; see :meth:`resolve`."""
        keys = {key: value for key, value in self.recipe.plan.items() if key not in ("preset", "file")}
        preset = self.recipe.plan.get("preset")
        if keys.get("compute_dtype") == "auto":
            keys["compute_dtype"] = auto_dtype
        if self.file is not None:
            plan = self.file.with_(**keys)
        elif preset is not None:
            plan = Plan.preset(preset, nodes=mesh.nodes, local=mesh.local, **keys)
        else:
            plan = Plan.parse({"mesh": mesh, **keys}, "plan")
        fits = plan.mesh == mesh if plan.islands is None else plan.job_mesh.ranks == mesh.ranks
        if not fits:
            of_islands = "" if plan.job_islands == 1 else f" on each of {plan.job_islands} islands"
            raise SpecError(
                "plan",
                f"mesh = {plan.mesh} ({plan.world} ranks){of_islands} does not fit the {mesh.ranks} "
                f"{_rank_kind(plan)} of this run, {mesh.nodes} nodes of {mesh.local}; start it with --nodes "
                f"{plan.job_mesh.nodes * plan.pp} --nproc {plan.mesh.local * plan.tp}, or choose a preset, which "
                "fits itself to the mesh",
            )
        return plan

    def _with_global_batch(self, plan: Plan) -> Plan:
        if self.recipe.train.global_batch is not None:
            return _with_global_batch(plan, self.recipe.train.global_batch)
        if not keeps_busy(plan.pp, plan.pipeline_schedule, plan.micro_batches):
            enough = -(-plan.micro_batches // plan.pp) * plan.pp
            raise SpecError(
                "plan",
                f"micro_batches = {plan.micro_batches} leaves stages of the pipeline idle; set it to "
                f"{enough} or another multiple of pp = {plan.pp}, or set train.global_batch instead",
            )
        return plan


def _with_global_batch(plan: Plan, global_batch: int) -> Plan:
    """The plan with ``global_batch`` sequences per step, in the largest micro-batches that fit."""
    share, rest = divmod(global_batch, plan.samplers)
    if rest:
        raise SpecError(
            "train",
            f"global_batch = {global_batch} should be a multiple of the {plan.samplers} {_rank_kind(plan)} of this run",
        )
    sizes = [
        size
        for size in range(1, plan.micro_batch + 1)
        if share % size == 0 and keeps_busy(plan.pp, plan.pipeline_schedule, share // size)
    ]
    if not sizes:
        raise SpecError(
            "train",
            f"global_batch = {global_batch} gives each data-parallel rank {share} sequences, which make "
            f"no micro-batches for plan.pp = {plan.pp} stages; set it to a multiple of "
            f"{plan.data_ranks * plan.pp}, or lower plan.pp",
        )
    largest = max(sizes)
    return plan.with_(micro_batch=largest, micro_batches=share // largest)


def _rank_kind(plan: Plan) -> str:
    if plan.cp > 1:
        return f"groups of cp = {plan.cp} ranks"
    return "ranks" if plan.ranks == plan.data_ranks else "data-parallel ranks"
