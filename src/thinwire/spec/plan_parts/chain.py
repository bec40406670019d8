"""The factors of a plan: what they have to divide, and what they are on another mesh."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from thinwire.spec.base import Problem
from thinwire.spec.factor import Factor


def on_mesh(factor: Factor, old: Factor, new: Factor) -> Factor:
    """A factor on another mesh. Greatest common divisors keep a chain of divisors one."""
    if factor == old:
        return new
    local = new.local if factor.local == old.local else math.gcd(factor.local, new.local)
    nodes = new.nodes if factor.nodes == old.nodes > 1 else math.gcd(factor.nodes, new.nodes)
    return Factor(local=local, nodes=nodes)


def chain_problems(mesh: Factor, params: Factor, grads: Factor, optimizer: Factor) -> Iterator[Problem]:
    """Rules 1 to 3: each factor divides the next, fills a node first, and grads is params or optimizer.

    Plain "not larger" is not enough: on 6 nodes it would allow 2 and 3, whose quotient is fractional.
    """
    chain = (("params", params), ("grads", grads), ("optimizer", optimizer), ("mesh", mesh))
    for (name, factor), (next_name, next_factor) in itertools.pairwise(chain):
        if not factor.divides(next_factor):
            need = f"should divide {next_name} = {next_factor} on both axes"
            yield Problem(name, f"= {factor} {need}; {divisors(next_factor)}")
    for name, factor in chain[:-1]:
        if not factor.fills_node(mesh):
            yield fill_problem(name, factor, mesh)
    if grads not in (params, optimizer):
        yield Problem("grads", f"= {grads} should equal params = {params} or optimizer = {optimizer}")


def fill_problem(name: str, factor: Factor, mesh: Factor) -> Problem:
    return Problem(
        name,
        f"= {factor} crosses {factor.nodes} nodes without filling one: use local = {mesh.local} "
        "(all ranks of a node) or nodes = 1",
    )


def groups(mesh: Factor) -> str:
    """The sizes of groups of neighbours that the mesh consists of."""
    return ", ".join(str(ways) for ways in range(1, mesh.ranks + 1) if mesh.group(ways) is not None)


def divisors(factor: Factor) -> str:
    def of(count: int) -> str:
        return ", ".join(str(d) for d in range(1, count + 1) if count % d == 0)

    return f"valid are local in ({of(factor.local)}) and nodes in ({of(factor.nodes)})"
