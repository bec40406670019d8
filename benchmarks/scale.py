"""Past the papers: models of 7 billion to a trillion parameters on a thousand to a hundred thousand GPUs, simulated.

    python benchmarks/scale.py --page docs/results/scale.md --picture docs/results/scale.png

Classic plans are cases of ``thinwire sim``. The tables list them together with the planner's choices, without and with
codecs, whose seconds also come from the simulator. Nothing was measured: every figure is an extrapolation (``~``).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from thinwire.cost import NominalRates
from thinwire.plan import CodecLevel, Search, TrainingJob, search, summary
from thinwire.report import Sheet
from thinwire.sim import Case, answer
from thinwire.spec import ClusterSpec, ModelSpec
from thinwire_bench.pages import insert, markdown_table

MODELS = {"7B": "llama-2-7b", "70B": "llama-2-70b", "405B": "llama-3-405b", "1T": "gpt-1t"}
GPUS = (1_024, 8_192, 102_400)
DOMAINS = (1_152, 9_216, 103_680)
CLASSIC = ("zero1", "mics", "zero3", "zeropp")
SEQ = 4_096
BATCH = 16 << 20
"""Tokens of a step; a step has more only if one sequence for every GPU is more."""

LINKS = (100, 200, 400, 800, 1600, 3200)
"""Gbit/s of a node of eight, from one Ethernet card to one card of 400 Gbit/s for every GPU."""

STAGES = (1, 2, 4, 8, 16, 32, 64)
"""Numbers of pipeline stages to try, with tensor parallelism over a node of eight and ZeRO-1 over the other ranks."""


@dataclass(frozen=True)
class Point:
    """A model on a cluster of H100.

    Attributes:
        model: Key of ``MODELS``, its size.
        gpus: Number of GPUs of the cluster.
        local: Number of GPUs of a node, or of an NVLink domain.
        gbps: Gbit/s of all cards of a node.
    """

    model: str
    gpus: int
    local: int
    gbps: float

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a data-parallel rank, of one sequence each."""
        return max(1, BATCH // (self.gpus * SEQ))

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.micro_batches * self.gpus * SEQ

    @property
    def cluster(self) -> ClusterSpec:
        """The cluster in the planner's form."""
        links = {"nic": {"bandwidth": self.gbps * 1e9}}
        return ClusterSpec.preset("h100-80g", nodes=self.gpus // self.local, gpus_per_node=self.local, links=links)


@dataclass(frozen=True)
class Found:
    """One plan's step.

    Attributes:
        mfu: Share of the peak FLOP/s; ``None`` if the plan does not fit into memory.
        plan: Summary of the plan, or empty.
    """

    mfu: float | None
    plan: str = ""

    def __str__(self) -> str:
        return "does not fit" if self.mfu is None else f"~{self.mfu:.0%}"

    @property
    def with_plan(self) -> str:
        """The MFU, and the plan in brackets."""
        return f"{self} ({self.plan})" if self.plan else str(self)


def classic(point: Point, **fields: Any) -> Found:
    """A step of a preset, with recomputation if it does not fit without."""
    groups = fields.get("tp", 1) * fields.get("pp", 1)
    for recompute in (False, True):
        case = Case.parse(
            {
                "model": MODELS[point.model], "gpu": "h100-80g", "gpus": point.gpus, "gpus_per_node": point.local,
                "internode_gbps": point.gbps, "seq": SEQ, "micro_batches": point.micro_batches * groups,
                "recompute": recompute, **fields,
            },
            f"{point}",
        )  # fmt: skip
        result = answer(case)
        if result.memory.total <= result.cluster.memory:
            return Found(result.mfu)
    return Found(None)


def three_d(point: Point) -> Found:
    """A step with tensor parallelism inside a node, the fastest number of pipeline stages, and ZeRO-1."""
    layers = ModelSpec.named(MODELS[point.model]).layers
    by_stages = [(pp, classic(point, plan="zero1", tp=8, pp=pp)) for pp in STAGES if pp <= layers]
    stages, best = max(by_stages, key=lambda pair: pair[1].mfu or 0.0)
    return Found(best.mfu, f"pp {stages}" if best.mfu else "")


@cache
def chosen(point: Point, codecs: CodecLevel) -> Found:
    """A step of the planner's choice."""
    model = ModelSpec.named(MODELS[point.model], seq=SEQ)
    job = TrainingJob(
        model, point.cluster, point.tokens, SEQ, micro_batch=1, codecs=codecs, rates=NominalRates(point.cluster)
    )
    _, needed = Search(job).smallest()
    if needed.total > point.cluster.memory:
        return Found(None)
    best = search(job, top=1).candidates
    return Found(best[0].mfu(job), summary(best[0].plan).partition("; micro-batch")[0]) if best else Found(None)


def sheet(title: str, points: Sequence[Point], first: str) -> Sheet:
    """A table of all plans on some clusters."""
    rows = []
    for point in points:
        name = f"{point.gbps:,.0f}" if first == "Gbit/s of a node" else f"{point.gpus:,}"
        classics = [str(classic(point, plan=plan)) for plan in CLASSIC]
        three = three_d(point).with_plan if point.local == 8 else ""
        plain, coded = chosen(point, "none"), chosen(point, "standard")
        rows.append(
            [point.model, name, f"{point.tokens >> 20:,}", *classics, three, str(plain), str(coded), coded.plan]
        )
    columns = ["model", first, "Mi tokens", *CLASSIC, "TP 8, PP, zero1", "ours, exact", "ours, codecs", "its plan"]
    return Sheet(title, columns, 2, rows)


def sheets() -> Iterator[Sheet]:
    """The tables of the page."""
    for gbps, what in ((100, "one 100 Gbit/s card a node"), (800, "800 Gbit/s a node"), (3200, "3,200 Gbit/s a node")):
        points = [Point(model, gpus, 8, gbps) for model in MODELS for gpus in GPUS]
        yield sheet(f"Nodes of 8 H100, {what}: MFU", points, "GPUs")
    domains = [Point(model, gpus, 72, 72 * 400) for model in MODELS for gpus in DOMAINS]
    yield sheet("NVLink domains of 72 H100, 400 Gbit/s for each GPU: MFU", domains, "GPUs")
    slower = [Point(model, 1_024, 8, gbps) for model in ("7B", "70B") for gbps in LINKS]
    yield sheet("1,024 GPUs on slower networks: MFU", slower, "Gbit/s of a node")


def draw(path: Path) -> None:
    """Draw the MFU of each plan against the network's speed."""
    import matplotlib as mpl
    import matplotlib.pyplot as plt

    mpl.use("agg")
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), sharey=True)
    names = (*CLASSIC, "ours, exact", "ours, codecs")
    colour = {name: f"C{number}" for number, name in enumerate(names)}
    for panel, model in zip(axes, ("7B", "70B"), strict=True):
        points = [Point(model, 1_024, 8, gbps) for gbps in LINKS]
        lines = {plan: [classic(point, plan=plan).mfu for point in points] for plan in CLASSIC}
        lines["ours, exact"] = [chosen(point, "none").mfu for point in points]
        lines["ours, codecs"] = [chosen(point, "standard").mfu for point in points]
        for name, values in lines.items():
            if any(value is not None for value in values):
                ours = name.startswith("ours")
                shown = [None if value is None else 100 * value for value in values]
                panel.plot(LINKS, shown, "o-" if ours else "o--", label=name, lw=2.2 if ours else 1.2, c=colour[name])
        panel.set(title=f"{model}, 1,024 H100", xlabel="Gbit/s of a node of 8", ylim=(0, None))
        panel.set_xscale("log", base=2)
        panel.set_xticks(LINKS, [str(gbps) for gbps in LINKS])
        panel.grid(alpha=0.3)
        panel.legend(fontsize=8)
    axes[0].set_ylabel("MFU, % (simulated, extrapolated)")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    """Write the page's tables and its picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", type=Path, help="write the tables into a page")
    parser.add_argument("--picture", type=Path, help="draw MFU against the network")
    options = parser.parse_args()
    text = "\n".join(line for table in sheets() for line in markdown_table(table))
    if options.page is None:
        print(text)
    else:
        page = options.page.read_text(encoding="utf-8")
        options.page.write_text(insert(page, text, "benchmarks/scale.py --page"), encoding="utf-8")
    if options.picture is not None:
        draw(options.picture)


if __name__ == "__main__":
    main()
