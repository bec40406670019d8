"""``thinwire plan --emit``: the nearest configuration of another framework, and what it loses."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from thinwire.cli.planning.tables import Answer, File
from thinwire.units import format_bytes

if TYPE_CHECKING:
    from thinwire.plan import PricedPlan, TrainingJob


def emit(job: TrainingJob, ours: PricedPlan, framework: str, to: Path | None, answer: Answer) -> dict[str, Any]:
    """Add the nearest configuration of a framework, and what it loses; returns what ``--json`` prints.

    Raises:
        UsageError: Nothing that the framework can do fits.
    """
    import thinwire.plan as planner
    from thinwire.convert.emit import FRAMEWORKS, Emitted, emitted_text

    peer = planner.nearest(job, framework, ours.plan)
    what = f"{job.model.name or 'a model'} on {job.cluster.name or f'{job.cluster.gpus} GPUs'}"
    text = emitted_text(Emitted(framework, peer.plan, job.seq, 1.0 if job.clip else None, what))
    path = to or Path(FRAMEWORKS[framework])
    answer.files.append(File("--emit-to", path, lambda path: path.write_text(text, encoding="utf-8")))
    slower, larger = peer.seconds / ours.seconds - 1, peer.memory.total / ours.memory.total - 1
    lost = planner.losses(ours, peer)
    answer.show(f"\n{framework}: {planner.summary(peer.plan)}, written to {path}")
    answer.show(
        f"  predicted step {peer.seconds:.3f} s, {slower:+.1%} against the first plan's {ours.seconds:.3f} s; memory "
        f"{format_bytes(peer.memory.total)}, {larger:+.1%}",
    )
    answer.show(f"  what it leaves out: {'; '.join(lost)}")
    return {
        "framework": framework,
        "file": str(path),
        "text": text,
        "plan": peer.plan.to_dict(),
        "step_seconds": peer.seconds,
        "memory_bytes": {**peer.memory.by_part(), "total": peer.memory.total},
        "against_first_plan": {"step": slower, "memory": larger, "without": lost},
    }
