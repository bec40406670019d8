"""Generation of RLHF under ZeRO-3 and ZeRO++ (DeepSpeed's blog of June 2023): OPT on two DGX-2 machines.

A token takes one forward after the other: each gathers all weights and reads them once. ZeRO-3 gathers from all ranks;
ZeRO++ from shards inside the node, which are kept as INT8, and decodes what it receives. The blog leaves open the links
and the batch: assumed are the paper's machines with 800 Gbit/s, and one sequence on each GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from typing import Final

from thinwire.cost import Work, library_moves, units
from thinwire.program import Axis, Lane, lower
from thinwire.sim import Answer, Case
from thinwire.spec import CodecSpec
from thinwire_bench.published.calibration import PublishedRow
from thinwire_bench.published.engines import ENGINES

_GBPS: Final = 800.0
_KEPT: Final = CodecSpec.parse("int8:256")
_PLANS: Final = {"ZeRO-3": "zero3", "ZeRO++": "hpz"}


def is_generation(row: PublishedRow) -> bool:
    """The bars of tokens in the blog's chart of RLHF, and the gain that it states."""
    return row.source == "DeepSpeed ZeRO++ blog, RLHF"


def cases(row: PublishedRow) -> list[Case]:
    """The plan of a row, or both plans of a gain; only what they say of model and machines counts."""
    model = str(files("thinwire_bench.published") / f"{row.model.lower()}.toml")
    common = {"internode_gbps": _GBPS, "dtype": "float16", "engine": "deepspeed"}
    return [row.case(model, "v100-32g", **common, plan=_PLANS[system]) for system in row.system.split(" vs ")]


def figure(_row: PublishedRow, answers: Sequence[Answer]) -> float:
    """Tokens per second and GPU, or the gain."""
    rates = [1 / _forward_seconds(answer) for answer in answers]
    return rates[0] if len(rates) == 1 else rates[0] / rates[1]


def _forward_seconds(answer: Answer) -> float:
    """Seconds of the forward for one token."""
    engine = ENGINES[answer.case.engine].on("v100-32g", answer.cluster.gpus_per_node)
    plan, infos = answer.plan, units(answer.model, answer.plan)
    rates, calls = engine.prices(plan, answer.cluster, None)
    axis = Axis.SECONDARY if plan.secondary is not None else Axis.PARAMS
    gathers = [op for op in lower(plan, infos).operations if op.lane is Lane.GATHER and op.axis is axis]
    sent = sum(
        move.seconds
        for operation in {op.units: op for op in gathers}.values()  # each unit once
        for move in library_moves(plan, operation, infos, rates, calls, whole_sync=engine.whole_sync, calls=1)
    )
    numel = sum(buffer.numel for unit in infos for buffer in unit.buffers)
    read = 2 * numel / (answer.cluster.memory_bandwidth / 8 * engine.efficiency.memory)
    if axis is Axis.PARAMS:
        return sent + read
    return sent / 2 + rates.codec(Work(_KEPT, "float16", 0, numel)) + read
