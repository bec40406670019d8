"""Fits the constants of a published system to its tables, by least squares with a prior for each constant.

    python benchmarks/fit_engines.py deepspeed --leave-out --write

Each constant has a nominal value and a range that makes physical sense; half of the range counts as two standard
deviations. So constants with similar effects do not trade places when rows are left out, and a constant that no row
depends on keeps its nominal value. Prints the mean error of each table with the committed constants and with the
fitted ones. With ``--leave-out``, each table is also predicted from a fit to the system's other publications. For a
system with one publication, the fit uses its other tables; for a system with one table, each fifth of its ways of
running a step is predicted from the rest. Such a fit starts from the nominal values, so it knows nothing about the rows
that were left out. With ``--by model`` or ``--by cluster``, every model or cluster of a system is also predicted from a
fit to all of its other rows. ``--write`` writes the figures to ``bench/src/thinwire_bench/published/fits.json``, which
``thinwire reproduce`` prints.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import math
import statistics
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy

import thinwire_bench.published
from thinwire.sim import Answer, Case, answer
from thinwire.spec import ModelSpec
from thinwire_bench.published import TABLES, Table
from thinwire_bench.published.calibration import PublishedRow
from thinwire_bench.published.engines import ENGINES, PublishedEngine

FOLDS = 5
NOISE = 0.06
"""Standard deviation of a row's error; larger errors count linearly."""

FEW = (6, 10)
"""Numbers of blocks that a fit simulates instead of a deep model's; its step is a straight line through both."""

DGX2, P3DN, P4D = ("v100-32g", 16), ("v100-32g", 8), ("a100-40g", 8)

Target = tuple[Table, PublishedRow]
Place = tuple[str, tuple[str, int] | None, str]
"""Engine, its machine (``None``: the engine itself) and the path of the field."""


@dataclass(frozen=True)
class Constant:
    """One fitted number.

    Attributes:
        name: Label in the output.
        nominal: Value before any fit.
        least: Smallest value that makes physical sense.
        most: Largest value that does.
        places: Fields that hold the value.
        twice: Fields that hold twice the value.
        factor: Whether the prior is about the logarithm, for values of which only the order of magnitude is known.
    """

    name: str
    nominal: float
    least: float
    most: float
    places: tuple[Place, ...]
    twice: tuple[Place, ...] = ()
    factor: bool = False

    def scaled(self, value: float) -> float:
        """The value in standard deviations of the prior."""
        at, least, most = (math.log(v) if self.factor else v for v in (value, self.least, self.most))
        return 4 * at / (most - least)

    def value(self, scaled: float) -> float:
        """The inverse of :meth:`scaled`."""
        least, most = (math.log(v) if self.factor else v for v in (self.least, self.most))
        at = scaled * (most - least) / 4
        return math.exp(at) if self.factor else at


def everywhere(engine: str, path: str, *machines: tuple[str, int] | None) -> tuple[Place, ...]:
    return tuple((engine, machine, path) for machine in machines)


_HYBRID = ("mvapich", "nccl")
_SLOW = (None, P3DN, P4D)


def _evo(path: str) -> tuple[Place, ...]:
    """AMSP's engine is built on InternEvo's, and A800s multiply like A100s: what both tables are fitted to."""
    return (*everywhere("amsp", path, None), *everywhere("internevo", path, None))


def _p4d(path: str) -> tuple[Place, ...]:
    """Both releases that were measured on p4d."""
    return (*everywhere("deepspeed", path, P4D), *everywhere("deepspeed-efa", path, None))


def _cards(index: int) -> tuple[Place, ...]:
    return (*everywhere("deepspeed", f"cards.{index}", DGX2, P3DN), *_p4d(f"cards.{index}"))


SYSTEMS: dict[str, tuple[Constant, ...]] = {
    "amsp": (
        Constant("compute", 0.83, 0.70, 0.95, _evo("efficiency.compute")),
        Constant("inside", 0.75, 0.60, 1.0, _evo("efficiency.inside")),
        Constant("nic", 0.90, 0.70, 1.0, _evo("efficiency.nic")),
        Constant("beside", 1.1, 1.0, 1.4, _evo("efficiency.beside")),
        Constant("step, AMSP", 0.1, 0.0, 1.0, (("amsp", None, "efficiency.step"),)),
        Constant("step, InternEvo", 0.3, 0.0, 1.5, (("internevo", None, "efficiency.step"),)),
    ),
    "deepspeed": (
        Constant("compute V100", 0.80, 0.65, 0.90, everywhere("deepspeed", "efficiency.compute", DGX2, P3DN)),
        Constant("compute p4d", 0.80, 0.65, 0.90, _p4d("efficiency.compute")),
        Constant(
            "passes",
            2.0,
            1.0,
            4.0,
            (*everywhere("deepspeed", "efficiency.passes", None, DGX2, P3DN), *_p4d("efficiency.passes")),
        ),
        Constant("one card", 0.95, 0.85, 1.0, _cards(0)),
        Constant("doubled cards", 0.90, 0.80, 1.0, _cards(1)),
        Constant(
            "decision",
            1e-3,
            2e-4,
            4e-3,
            (("deepspeed-efa", None, "host.decision"),),
            twice=everywhere("deepspeed", "host.decision", P3DN, P4D),
            factor=True,
        ),
        Constant("partition", 20e-6, 5e-6, 8e-5, everywhere("deepspeed", "host.partition", *_SLOW), factor=True),
        Constant("flush", 0.3e-9, 5e-11, 2e-9, everywhere("deepspeed", "host.flush", *_SLOW), factor=True),
        Constant("chance", 1e-3, 3e-4, 5e-3, everywhere("deepspeed", "host.chance", *_SLOW), factor=True),
    ),
    "hybrid": (
        Constant("compute", 0.4, 0.1, 0.95, tuple((name, None, "efficiency.compute") for name in _HYBRID)),
        Constant("inside, MVAPICH", 0.75, 0.3, 1.0, (("mvapich", None, "efficiency.inside"),)),
        Constant("nic, MVAPICH", 0.80, 0.3, 1.0, (("mvapich", None, "efficiency.nic"),)),
        Constant("links, NCCL", 0.9, 0.3, 1.0, (("nccl", None, "efficiency.inside"), ("nccl", None, "efficiency.nic"))),
        Constant("MPC", 50e9, 5e9, 500e9, (("mvapich", None, "codecs.mpc"),)),
        Constant("ZFP", 100e9, 5e9, 500e9, (("mvapich", None, "codecs.zfp"),)),
    ),
}
"""Fitted constants by system; all other values in ``published/engines.py`` are published or taken over."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("system", choices=[*SYSTEMS, "all"])
    parser.add_argument("--rounds", type=int, default=3, help="number of rounds of the search")
    parser.add_argument("--leave-out", action="store_true", help="also predict each table from the others")
    parser.add_argument(
        "--by", choices=GROUPINGS, action="append", default=[], help="also predict each model or each cluster"
    )
    parser.add_argument("--write", action="store_true", help="write the figures that thinwire reproduce prints")
    arguments = parser.parse_args()
    for name in SYSTEMS if arguments.system == "all" else [arguments.system]:
        fitted = (
            {}
            if arguments.by and not arguments.leave_out
            else run(name, arguments.rounds, leave_out=arguments.leave_out)
        )
        if arguments.by:
            fitted["groups"] = left_out_groups(name, arguments.by, arguments.rounds)
        if arguments.write:
            path = Path(thinwire_bench.published.__file__).parent / "fits.json"
            known = json.loads(path.read_text("utf-8")) if path.exists() else {}
            path.write_text(json.dumps(known | {name: known.get(name, {}) | fitted}, indent=1) + "\n", "utf-8")


def run(name: str, rounds: int, *, leave_out: bool) -> dict[str, Any]:
    """Fit a system, print the result, and return its entry of ``fits.json``."""
    constants = SYSTEMS[name]
    tables = [table for table in TABLES if table.system == name and table.goal is not None]
    targets = {table.title: [(table, row) for row in table.rows] for table in tables}
    every = [target for group in targets.values() for target in group]
    committed = {constant.name: current(constant) for constant in constants}
    print(f"{name}: {len(every)} rows in {len(tables)} tables, {len(constants)} constants fitted")
    fitted = fit(constants, committed, every, rounds)
    for label, values in (("committed", committed), ("fitted", fitted)):
        print(f"  {label}: {', '.join(f'{key} {value:.3g}' for key, value in values.items())}")
        for title, group in targets.items():
            print(f"    {title}: mean error {error(constants, values, group):.2%}")
    result: dict[str, Any] = {
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "constants": [constant.name for constant in constants],
        "left_out": {},
        "by": _left_out_by(tables),
    }
    if leave_out:
        for title, group in targets.items():
            others = [target for target in every if _apart(target[0], group[0][0], tables)]
            result["left_out"][title] = predicted(constants, group, others, rounds)
            print(f"    {title}: mean error {result['left_out'][title]:.2%} when left out")
    return result


def left_out_groups(name: str, by: Sequence[str], rounds: int) -> list[dict[str, Any]]:
    """Predict each model and each cluster of a system from a fit to its other rows, and print the errors.

    Rows about several models or clusters are in no group, and no fit uses them while one of theirs is left out.
    """
    constants = SYSTEMS[name]
    every = [(t, row) for t in TABLES if t.system == name and t.goal is not None for row in t.rows]
    nominal = {constant.name: constant.nominal for constant in constants}
    results = []
    for grouping in by:
        keys = {id(row): GROUPINGS[grouping](row) for _, row in every}
        groups = sorted({key for names in keys.values() if len(names) == 1 for key in names})
        for group in groups if len(groups) > 1 else ():
            left = [target for target in every if keys[id(target[1])] == {group}]
            kept = [target for target in every if group not in keys[id(target[1])]]
            mean = error(constants, fit(constants, nominal, kept, rounds), left)
            results.append({"by": grouping, "group": group, "rows": len(left), "error": mean})
            print(f"  {name}: {grouping} {group} left out: {len(left)} rows, mean error {mean:.2%}", flush=True)
    return results


def _models(row: PublishedRow) -> set[str]:
    name = row.model.split(" (")[0]
    return {"GPT-18B", "GPT-138B"} if name == "GPT 18B-138B" else {name}


def _cluster(row: PublishedRow) -> set[str]:
    bandwidth = "" if row.internode_gbps is None else f", {row.internode_gbps:g} Gbit/s"
    return {f"{row.gpus} {row.gpu_type}{bandwidth}"}


GROUPINGS: dict[str, Callable[[PublishedRow], set[str]]] = {"model": _models, "cluster": _cluster}
"""The models or the clusters that a row is about."""


def _left_out_by(tables: Sequence[Table]) -> str:
    if len({table.name for table in tables}) > 1:
        return "publication"
    return "table" if len(tables) > 1 else "rows"


def _apart(one: Table, other: Table, tables: Sequence[Table]) -> bool:
    """Whether two tables share no figures. Tables of one publication may, if a system has several publications."""
    return one.name != other.name if _left_out_by(tables) == "publication" else one is not other


def predicted(constants: Sequence[Constant], group: Sequence[Target], others: Sequence[Target], rounds: int) -> float:
    """Mean error of a table under constants fitted to other tables, or to the other folds of the only table."""
    nominal = {constant.name: constant.nominal for constant in constants}
    if others:
        return error(constants, fit(constants, nominal, others, rounds), group)
    # Rows that run a step in the same way stay together: they are too similar for an honest prediction of each other.
    ways = list(dict.fromkeys(row.system for _, row in group))
    errors = []
    for fold in range(FOLDS):
        kept = [target for target in group if ways.index(target[1].system) % FOLDS != fold]
        left = [target for target in group if ways.index(target[1].system) % FOLDS == fold]
        errors += [error(constants, fit(constants, nominal, kept, rounds), left)] * len(left)
    return statistics.fmean(errors)


def fit(
    constants: Sequence[Constant], start: Mapping[str, float], targets: Sequence[Target], rounds: int
) -> dict[str, float]:
    """The constants that make errors and deviations from nominal values together most probable.

    Gauss-Newton steps in standard deviations of the priors. A step is taken, or a half or a quarter of it, if it helps.
    """

    def values(at: Any) -> dict[str, float]:
        return {constant.name: constant.value(float(x)) for constant, x in zip(constants, at, strict=True)}

    def scaled(of: Callable[[Constant], float]) -> Any:
        return numpy.array([constant.scaled(of(constant)) for constant in constants])

    def errors_at(at: Any) -> Any:
        return numpy.array(errors(constants, values(at), targets)) / NOISE

    def improbable(then: Any, at: Any) -> float:
        large = abs(then)
        return float(numpy.where(large < 1, large**2, 2 * large - 1).sum() + ((at - nominal) ** 2).sum())

    least, most = scaled(lambda c: c.least), scaled(lambda c: c.most)
    nominal = scaled(lambda c: c.nominal)
    best = numpy.clip(scaled(lambda c: start[c.name]), least, most)
    now = errors_at(best)
    for _ in range(rounds):
        weights = 1 / numpy.sqrt(numpy.maximum(abs(now), 1))
        columns = []
        for index in range(len(constants)):
            moved = best.copy()
            moved[index] += _NUDGE if best[index] + _NUDGE < most[index] else -_NUDGE
            columns.append((errors_at(moved) - now) / (moved[index] - best[index]))
        system = numpy.vstack([numpy.array(columns).T * weights[:, None], numpy.eye(len(constants))])
        step = numpy.linalg.lstsq(system, numpy.concatenate([-now * weights, nominal - best]), rcond=None)[0]
        for part in (1.0, 0.5, 0.25):
            tried = numpy.clip(best + part * step, least, most)
            then = errors_at(tried)
            if improbable(then, tried) < improbable(now, best) * (1 - 1e-3):
                best, now = tried, then
                break
        else:
            break
    return values(best)


_NUDGE = 0.1
"""Standard deviations by which a constant is moved to see what it changes."""


# -- engines with other constants ----------------------------------------------------------------------------------


def current(constant: Constant) -> float:
    """The committed value of a constant."""
    name, machine, path = constant.places[0]
    value: Any = ENGINES[name] if machine is None else ENGINES[name].machines[machine]
    for key in path.split("."):
        value = _get(value, key)
    return float(value)


def error(constants: Sequence[Constant], values: Mapping[str, float], targets: Iterable[Target]) -> float:
    """Mean absolute error of engines with these constants."""
    return statistics.fmean(map(abs, errors(constants, values, targets)))


def errors(constants: Sequence[Constant], values: Mapping[str, float], targets: Iterable[Target]) -> list[float]:
    """Error of each row under engines with these constants."""
    engines = _engines(constants, values)
    kept = {name: ENGINES[name] for name in engines}
    ENGINES.update(engines)
    try:
        return [table.compare(row, _remembered).error for table, row in targets]
    finally:
        ENGINES.update(kept)


_KNOWN: dict[str, Answer] = {}


def _remembered(case: Case) -> Answer:
    """The answer to a case, cached: most moves of a search leave most cases unchanged."""
    engine = ENGINES[case.engine].on(case.gpu, case.gpus_per_node or 0)
    key = f"{case!r} {dataclasses.replace(engine, machines={})!r}"
    if key not in _KNOWN:
        _KNOWN[key] = _quick(case)
    return _KNOWN[key]


def _quick(case: Case) -> Answer:
    """The answer to a case, within 0.5 %. The step of a deep model grows linearly with its blocks, which are alike.

    Where whole tensors are dealt to ranks, the ranks' shares do not grow linearly, so all blocks are simulated.
    """
    model = ModelSpec.named(case.model, **({} if case.seq is None else {"seq": case.seq}))
    if case.pp > 1 or model.layers <= sum(FEW) or ENGINES[case.engine].partition == "inter":
        return answer(case)
    fewer, more = (answer(case.with_(model=_with_blocks(case.model, blocks))) for blocks in FEW)
    growth = (more.simulated.seconds - fewer.simulated.seconds) / (FEW[1] - FEW[0])
    seconds = more.simulated.seconds + growth * (model.layers - FEW[1])
    whole = more.model.with_(layers=model.layers)
    return dataclasses.replace(
        more, case=case, model=whole, simulated=dataclasses.replace(more.simulated, seconds=seconds)
    )


@cache
def _with_blocks(model: str, blocks: int) -> str:
    """Name of a file with the model, but with so many blocks."""
    path = Path(_models_directory().name) / f"{model}-{blocks}.toml"
    ModelSpec.named(model).with_(layers=blocks).save(path)
    return str(path)


@cache
def _models_directory() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory()


def _engines(constants: Sequence[Constant], values: Mapping[str, float]) -> dict[str, PublishedEngine]:
    engines: dict[str, PublishedEngine] = {}
    for constant in constants:
        for name, machine, path in (*constant.places, *constant.twice):
            engine = engines.get(name, ENGINES[name])
            value = values[constant.name] * (2 if (name, machine, path) in constant.twice else 1)
            if machine is None:
                engines[name] = _with(engine, path.split("."), value)
            else:
                changed = _with(engine.machines[machine], path.split("."), value)
                engines[name] = dataclasses.replace(engine, machines={**engine.machines, machine: changed})
    return engines


def _with(whole: Any, path: Sequence[str], value: float) -> Any:
    """A copy in which the field at the path is ``value``."""
    key, *rest = path
    changed = _with(_get(whole, key), rest, value) if rest else value
    if isinstance(whole, dict):
        return {**whole, key: changed}
    if isinstance(whole, tuple):
        return (*whole[: int(key)], changed, *whole[int(key) + 1 :])
    return dataclasses.replace(whole, **{key: changed})


def _get(whole: Any, key: str) -> Any:
    if isinstance(whole, dict):
        return whole[key]
    return whole[int(key)] if isinstance(whole, tuple) else getattr(whole, key)


if __name__ == "__main__":
    main()
