"""The order of a benchmark: rounds in which every system runs under every setting, so that drift hits all alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from thinwire.lab import Lab, LabSpec
from thinwire_bench.peers.interface import SystemSpec
from thinwire_bench.systems.controller import Controller, TurnResult
from thinwire_bench.systems.protocol import TurnRequest

STARTUP_STEPS = 3
"""Steps of each system without cycles before the first round: buffers are allocated, orders recorded."""

LEAN_STEPS = 3
"""Steps of the turn in which memory is measured."""


@dataclass(frozen=True)
class Session:
    """The hosts of a benchmark, and how often and how long each system runs on them.

    Attributes:
        nodes: Emulated hosts.
        ranks: Ranks of each host.
        rounds: Rounds, in each of which every system runs once under every setting.
        steps: Timed steps of a turn, where the setting gives no number of its own.
        timeout: Seconds that a system may take to start, or for a turn.
        report: Called with a line of text whenever something starts or ends.
        lean: Whether every system takes a last, untimed turn in which its memory is measured without what its allocator
            keeps.
    """

    nodes: int
    ranks: int
    rounds: int
    steps: int
    timeout: float
    report: Callable[[str], None]
    lean: bool = False


@dataclass(frozen=True)
class Setting:
    """What changes between turns.

    Attributes:
        bandwidth: Bandwidth of the links between hosts, as the user wrote it.
        rate: The same in bits per second; None does not shape the links.
        clip: Bound on the gradient norm; None does not clip.
        steps: Timed steps of a turn; None takes the session's number.
    """

    bandwidth: str
    rate: float | None
    clip: float | None
    steps: int | None = None


@dataclass(frozen=True)
class Sample:
    """One turn of one system, in a round from 0, or None for the start-up and the lean turn, which are not timed."""

    round: int | None
    setting: Setting
    result: TurnResult


def run(systems: Sequence[SystemSpec], settings: Sequence[Setting], session: Session) -> list[Sample]:
    """Start all systems on an emulated cluster and let them take turns; samples are in the order they were taken.

    Raises:
        ThinwireError: hosts cannot be made on this machine, or a rank failed, died or took too long.
    """
    with (
        Lab(LabSpec(nodes=session.nodes, ranks=session.ranks)) as lab,
        Controller(lab, session.ranks, timeout=session.timeout) as controller,
    ):
        for system in systems:
            session.report(f"starting {system.label}")
            controller.start(system)
        return interleave(controller, lambda rate: lab.shape(bandwidth=rate), systems, settings, session)


def interleave(
    controller: Controller,
    shape: Callable[[float | None], None],
    systems: Sequence[SystemSpec],
    settings: Sequence[Setting],
    session: Session,
) -> list[Sample]:
    """Run every system under every setting, round by round, and then without what allocators keep, if asked for.

    Args:
        controller: Lets a system train.
        shape: Sets the bandwidth of all links, in bits per second.
        systems: The systems; the first one rotates with the rounds.
        settings: Settings in the order of every round; links are shaped only where the rate changes.
        session: Number of rounds, and of a turn's steps, which are rounded up to whole cycles. A warm-up step precedes
            them, except in systems with cycles, whose steps differ.

    Returns:
        Samples in the order they were taken. Systems without cycles have taken the same steps in the same order.
    """
    samples: list[Sample] = []

    def take(number: int | None, setting: Setting, system: SystemSpec, steps: int, warmup: int, lean: bool) -> None:
        turn = TurnRequest(steps, warmup, {"clip": setting.clip}, lean)
        result = controller.run(system.label, turn)
        samples.append(Sample(number, setting, result))
        when = "memory" if lean else "start-up" if number is None else f"round {number + 1}/{session.rounds}"
        clip = "" if setting.clip is None else f" clip {setting.clip:g}"
        session.report(f"{when} {setting.bandwidth}{clip} {result.label}: {1e3 * result.seconds:.1f} ms/step")

    rate = settings[0].rate
    shape(rate)
    for system in systems:
        # After a cycle with all of its exchanges, up to the step before the next one.
        startup = STARTUP_STEPS if system.cycle == 1 else system.cycle + system.gap - 1
        take(None, settings[0], system, 1, startup - 1, False)
    for number in range(session.rounds):
        first = number % len(systems)
        for setting in settings:
            if setting.rate != rate:
                rate = setting.rate
                shape(rate)
            for system in [*systems[first:], *systems[:first]]:
                cycles = -(-(setting.steps or session.steps) // system.cycle)
                take(number, setting, system, cycles * system.cycle, 1 if system.cycle == 1 else 0, False)
    if session.lean:
        shape(settings[0].rate)
        for system in systems:
            take(None, settings[0], system, LEAN_STEPS, 0, True)
    return samples
