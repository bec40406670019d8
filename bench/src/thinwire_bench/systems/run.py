"""One benchmark from hosts to samples."""

from __future__ import annotations

from collections.abc import Sequence

from thinwire.lab import Lab, LabSpec
from thinwire_bench.peers.interface import SystemSpec
from thinwire_bench.systems.controller import Controller
from thinwire_bench.systems.interleave import Sample, Session, Setting, interleave, lean_turns


def run(systems: Sequence[SystemSpec], settings: Sequence[Setting], session: Session) -> list[Sample]:
    """Start all systems on an emulated cluster and let them take turns; samples are in the order they were taken.

    Raises:
        ThinwireError: hosts cannot be made on this machine, or a rank failed, died or took too long.
    """

    def report(sample: Sample) -> None:
        result, setting = sample.result, sample.setting
        untimed = "memory" if sample.result.turn.lean else "start-up"
        when = untimed if sample.round is None else f"round {sample.round + 1}/{session.rounds}"
        clip = "" if setting.clip is None else f" clip {setting.clip:g}"
        session.report(f"{when} {setting.bandwidth}{clip} {result.label}: {1e3 * result.seconds:.1f} ms/step")

    with (
        Lab(LabSpec(nodes=session.nodes, ranks=session.ranks)) as lab,
        Controller(lab, session.ranks, timeout=session.timeout) as controller,
    ):

        def shape(rate: float | None) -> None:
            lab.shape(bandwidth=rate)

        for system in systems:
            session.report(f"starting {system.label}")
            controller.start(system)
        samples = interleave(
            controller, shape, systems, settings, rounds=session.rounds, steps=session.steps, report=report
        )
        return samples + (lean_turns(controller, shape, systems, settings[0], report) if session.lean else [])
