"""Where the hosts of a cluster stand: the leaf switch above each, and the switches above that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from thinwire.errors import SpecError
from thinwire.spec.io import read_text
from thinwire.spec.machines.slurm import is_slurm, slurm_switches

TOPOLOGY_SOURCES = ("auto", "slurm", "timed")
"""Values of a plan's ``topology`` that name no file."""


@dataclass(frozen=True)
class SwitchTree:
    """The switches above hosts.

    Attributes:
        switches: Switches above every host, by host, from the leaf upwards; at least the leaf.
        source: Where that is written, for messages.
        from_slurm: Whether it is SLURM's, which describes the whole cluster.
    """

    switches: Mapping[str, tuple[str, ...]]
    source: str
    from_slurm: bool = False

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a file.

        Args:
            path: File with one line per host: its name, the name of its leaf switch, and those of the switches above,
                if any. ``#`` begins a comment. Or SLURM's ``topology.conf``, or what ``scontrol show topology`` prints.

        Raises:
            SpecError: The file cannot be read, a line is malformed, or a host appears twice.
        """
        return cls.parse(read_text(path), str(path))

    @classmethod
    def parse(cls, text: str, source: str) -> Self:
        """Read a text in one of the notations of :meth:`read`.

        Raises:
            SpecError: A line is malformed, a host appears twice, or there is no host.
        """
        if is_slurm(text):
            return cls(slurm_switches(text, source), source, from_slurm=True)
        return cls(_host_lines(text, source), source)

    @property
    def leaf_of(self) -> dict[str, str]:
        """The leaf above every host."""
        return {host: switches[0] for host, switches in self.switches.items()}

    def above(self, hosts: Sequence[str]) -> list[tuple[str, ...]]:
        """The switches above some hosts, in their order.

        A host is also found by the part of its name before the first dot, unless two hosts share it.

        Raises:
            SpecError: Some hosts are missing; the message names them.
        """
        short: dict[str, set[tuple[str, ...]]] = {}
        for host, switches in self.switches.items():
            short.setdefault(host.partition(".")[0], set()).add(switches)
        found = {host: self.switches.get(host) or _only(short.get(host.partition(".")[0])) for host in hosts}
        missing = [host for host, above in found.items() if above is None]
        if missing:
            known = ", ".join([*self.switches][:4])
            raise SpecError(
                self.source,
                f"has no line for {', '.join(missing)}; it names {len(self.switches)} hosts, such as {known}",
            )
        return [above for host in hosts if (above := found[host]) is not None]


def host_lines(leaves: Mapping[str, Sequence[str]], *, comment: str) -> str:
    """The text of a file that :meth:`SwitchTree.read` reads."""
    lines = [f"{host} {leaf}\n" for leaf, hosts in leaves.items() for host in hosts]
    return f"# {comment}\n{''.join(lines)}"


def _only(switches: set[tuple[str, ...]] | None) -> tuple[str, ...] | None:
    return next(iter(switches)) if switches is not None and len(switches) == 1 else None


def _host_lines(text: str, source: str) -> dict[str, tuple[str, ...]]:
    hosts: dict[str, tuple[str, ...]] = {}
    problems = []
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        if len(words) < 2:
            problems.append(
                f"line {number}: {line.strip()!r} should be a host and its leaf, for example 'node07 leaf2'"
            )
        elif words[0] in hosts:
            problems.append(f"line {number}: host {words[0]!r} stands there twice")
        else:
            hosts[words[0]] = tuple(words[1:])
    if not hosts and not problems:
        problems.append("names no host; a line is a host and its leaf, for example 'node07 leaf2'")
    if problems:
        raise SpecError(source, problems)
    return hosts
