"""The factor: a sub-mesh of the data-parallel mesh, the unit in which sharding is expressed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field

from thinwire.errors import SpecError
from thinwire.spec.base import Count, Spec


class Factor(Spec):
    """A sub-mesh: ``local`` ranks of a node times ``nodes`` nodes; written ``local x nodes``, as in 8x4."""

    toml_inline: ClassVar[bool] = True
    one_value: ClassVar[bool] = True

    local: Count = Field(default=1, description="ranks of one node")
    nodes: Count = Field(default=1, description="nodes")

    @classmethod
    def from_text(cls, text: str) -> Mapping[str, Any] | None:
        """``"8x4"`` is ``Factor(local=8, nodes=4)``."""
        local, _, nodes = text.partition("x")
        return {"local": int(local), "nodes": int(nodes)} if local.isdecimal() and nodes.isdecimal() else None

    @property
    def ranks(self) -> int:
        """How many ranks the sub-mesh has."""
        return self.local * self.nodes

    def divides(self, other: Factor) -> bool:
        """Whether both axes of ``other`` are multiples of this factor's."""
        return other.local % self.local == 0 and other.nodes % self.nodes == 0

    def quotient(self, other: Factor) -> Factor:
        """``other`` over this factor, axis by axis: the mesh that is left once this factor is taken out.

        Raises:
            SpecError: if this factor does not divide ``other``.
        """
        if not self.divides(other):
            raise SpecError("factor", f"{self} does not divide {other}")
        return Factor(local=other.local // self.local, nodes=other.nodes // self.nodes)

    def group(self, ways: int) -> Factor | None:
        """The factor of ``ways`` neighbouring ranks: a part of a node, or several whole nodes; ``None`` where the mesh
        does not consist of such groups."""
        if self.local % ways == 0:
            return Factor(local=ways)
        nodes, rest = divmod(ways, self.local)
        return None if rest or self.nodes % nodes else Factor(local=self.local, nodes=nodes)

    def fills_node(self, mesh: Factor) -> bool:
        """Whether it uses every rank of a node before it crosses to the next (rule 2)."""
        return self.nodes == 1 or self.local == mesh.local

    def data_parallel(self, tp: int, pp: int) -> Factor:
        """The data-parallel mesh of ranks that are also shared out to tensor parallelism and pipeline stages.

        Tensor-parallel ranks are neighbours in a node. Stages lie on different nodes where the nodes can be dealt out
        evenly, else every node has all ranks of several stages.

        Raises:
            SpecError: if the ranks cannot be shared out so.
        """
        if self.local % tp == 0 and self.nodes % pp == 0:
            return Factor(local=self.local // tp, nodes=self.nodes // pp)
        per_node = tp * pp // self.nodes
        if pp % self.nodes == 0 and self.local % per_node == 0:
            return Factor(local=self.local // per_node)
        raise SpecError(
            "plan",
            f"tp = {tp}, pp = {pp} do not fit nodes = {self.nodes}, nproc = {self.local}: tensor-parallel ranks "
            "share a node, and every node has equally many ranks of a stage, or equally many whole stages; "
            f"{self._remedy(tp, pp)}",
        )

    def _remedy(self, tp: int, pp: int) -> str:
        """Another number of ranks for this tensor and pipeline parallelism."""
        nodes = self.nodes if self.nodes % pp == 0 or pp % self.nodes == 0 else pp
        per_node = tp * max(1, pp // nodes)
        local = max(1, round(self.local / per_node)) * per_node
        return f"--nodes {nodes} --nproc {local} would do, or change plan.tp and plan.pp"

    def __str__(self) -> str:
        return f"{self.local}x{self.nodes}"
