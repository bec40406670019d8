"""Fits an engine's constants to the published tables of its system, by coordinate search.

    python benchmarks/fit_engines.py amsp

Prints the constants and the mean error with them; with ``--leave-out``, also the mean error on rows that were left out.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from collections.abc import Callable, Sequence

from thinwire.published import TABLES
from thinwire.published.rows import rows
from thinwire.sim import ENGINES, Answer, Case, Engine, answer

CONSTANTS = ("compute", "step", "nic", "inside")
SHARES = ("compute", "nic", "inside")

Target = tuple[Case, float, Callable[[Answer], float]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=[name for name in ENGINES if name != "thinwire"])
    parser.add_argument("--rounds", type=int, default=5, help="of the search")
    parser.add_argument("--leave-out", type=int, default=0, metavar="FOLDS", help="also fit to all but each fold")
    arguments = parser.parse_args()
    targets = [
        (table.case(row), float(row.value), table.value)
        for table in TABLES
        if table.name == arguments.engine
        for row in rows()
        if table.wanted(row)
    ]
    start = ENGINES[arguments.engine]
    fitted = fit(arguments.engine, start, targets, arguments.rounds)
    print(f"{len(targets)} rows, {len(CONSTANTS)} constants fitted")
    print(f"as committed: {show(start)}; mean error {error(arguments.engine, start, targets):.2%}")
    print(f"as fitted:    {show(fitted)}; mean error {error(arguments.engine, fitted, targets):.2%}")
    left_out = []
    for fold in range(arguments.leave_out):
        kept = [target for index, target in enumerate(targets) if index % arguments.leave_out != fold]
        others = [target for index, target in enumerate(targets) if index % arguments.leave_out == fold]
        left_out.append(error(arguments.engine, fit(arguments.engine, start, kept, arguments.rounds), others))
    if left_out:
        print(f"rows that were left out: mean error {statistics.fmean(left_out):.2%}")


def show(engine: Engine) -> str:
    return ", ".join(f"{name} {getattr(engine.efficiency, name):.3g}" for name in CONSTANTS)


def error(name: str, engine: Engine, targets: Sequence[Target]) -> float:
    kept, ENGINES[name] = ENGINES[name], engine
    try:
        return statistics.fmean(abs(simulated(answer(case)) / value - 1) for case, value, simulated in targets)
    finally:
        ENGINES[name] = kept


def fit(name: str, start: Engine, targets: Sequence[Target], rounds: int) -> Engine:
    """Each constant in turn is moved while that helps; then by smaller steps."""
    best, least, factor = start, error(name, start, targets), 1.15
    for _ in range(rounds):
        for constant in CONSTANTS:
            for step in (factor, 1 / factor):
                while (moved := _moved(best, constant, step)) is not None:
                    found = error(name, moved, targets)
                    if found >= least:
                        break
                    best, least = moved, found
        factor = 1 + (factor - 1) / 1.7
    return best


def _moved(engine: Engine, constant: str, step: float) -> Engine | None:
    value = getattr(engine.efficiency, constant) * step
    if constant in SHARES and value > 1:
        return None
    return dataclasses.replace(engine, efficiency=dataclasses.replace(engine.efficiency, **{constant: value}))


if __name__ == "__main__":
    main()
