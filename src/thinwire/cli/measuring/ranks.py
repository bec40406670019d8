"""What the commands that measure a machine share: ``thinwire profile``, ``kernels`` and ``topology``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from thinwire.cli.terminal.console import wide_console
from thinwire.cli.terminal.errors import check_writable
from thinwire.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from thinwire.spec import Factor, ModelSpec
    from thinwire.train.environment import Started


def launched(command: str) -> Started:
    """This rank among those that a launcher has started for a command.

    Raises:
        UsageError: No launcher has started it.
    """
    from thinwire.train.environment import started

    ranks = started()
    if ranks is None:
        raise UsageError(
            f"thinwire {command} runs on every rank of a cluster: start it with torchrun (torchrun --nproc-per-node 2 "
            f"-m thinwire.cli.main {command} ...), with srun, or in the lab (thinwire lab -- thinwire {command} ...)"
        )
    return ranks


def check_outputs(ranks: Started, outputs: Mapping[str, Path | None]) -> None:
    """Refuse, on every rank, files that rank 0 could not write, by their options. The ranks have joined the job.

    Raises:
        UsageError: A file cannot be written.
    """
    from thinwire.agreement import NOTHING
    from thinwire.collectives import group

    def check() -> None:
        for option, path in outputs.items():
            if ranks.rank == 0 and path is not None:
                check_writable(option, path)

    group.control().agree(check, lambda problems: UsageError(problems[0]), NOTHING)


@contextlib.contextmanager
def status(ranks: Started) -> Iterator[Callable[[str], None]]:
    """Show on rank 0, while the ranks measure, what they are at; gives the function that says it."""
    console = wide_console(as_json=True)
    console.quiet = ranks.rank > 0
    with console.status("measuring the cluster") as shown:
        yield shown.update


def mesh_of(ranks: Started, nodes: int | None) -> Factor:
    """All ranks, on as many nodes as ``--nodes`` says or the launcher sees.

    Raises:
        UsageError: The number of nodes does not divide that of the ranks.
    """
    from thinwire.spec import Factor

    nodes = nodes or max(1, ranks.world // ranks.local_world)
    if ranks.world % nodes:
        raise UsageError(f"--nodes {nodes} does not divide the {ranks.world} ranks; valid are its divisors")
    return Factor(local=ranks.world // nodes, nodes=nodes)


def small_model(seq: int) -> ModelSpec:
    """The model whose blocks are timed where no model is named."""
    from thinwire.spec import ModelSpec

    return ModelSpec(name="a small Llama", layers=4, hidden=512, heads=8, ffn=1376, vocab=4096, seq=seq)
