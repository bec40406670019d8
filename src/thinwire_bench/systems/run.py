"""One benchmark from hosts to samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from thinwire.lab import Lab, LabSpec
from thinwire_bench.peers.interface import SystemSpec
from thinwire_bench.systems.controller import Controller
from thinwire_bench.systems.interleave import Sample, Setting, interleave

__all__ = ["run"]


def run(
    systems: Sequence[SystemSpec],
    settings: Sequence[Setting],
    *,
    nodes: int,
    ranks: int,
    rounds: int,
    steps: int,
    timeout: float,
    report: Callable[[str], None],
) -> list[Sample]:
    """Start all systems on an emulated cluster and let them take turns.

    Args:
        systems: their labels differ.
        settings: of links and step.
        nodes: hosts.
        ranks: of each host.
        rounds: in each of which every system runs under every setting.
        steps: timed ones of a turn.
        timeout: seconds a system may take to start, or for a turn.
        report: told in a line what is going on.

    Returns:
        Samples in the order they were taken.

    Raises:
        ThinwireError: hosts cannot be made on this machine, or a rank failed, died or took too long.
    """

    def told(sample: Sample) -> None:
        result, setting = sample.result, sample.setting
        when = "start-up" if sample.round is None else f"round {sample.round + 1}/{rounds}"
        clip = "" if setting.clip is None else f" clip {setting.clip:g}"
        report(f"{when} {setting.bandwidth}{clip} {result.label}: {1e3 * result.seconds:.1f} ms/step")

    with Lab(LabSpec(nodes=nodes, ranks=ranks)) as lab, Controller(lab, ranks, timeout=timeout) as controller:
        for system in systems:
            report(f"starting {system.label}")
            controller.start(system)

        def shape(rate: float | None) -> None:
            lab.shape(bandwidth=rate)

        labels = [system.label for system in systems]
        return interleave(controller, shape, labels, settings, rounds=rounds, steps=steps, report=told)
