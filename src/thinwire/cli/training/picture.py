"""``loss.png``: the loss curve of a run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from thinwire.report.figures import smoothed
from thinwire.train.directory import RunDirectory


def draw_losses(records: Sequence[Mapping[str, Any]], directory: RunDirectory) -> None:
    """Draw training and validation loss over steps, with the unigram entropy for comparison.

    Args:
        records: Records of ``metrics.jsonl``; without records, nothing is drawn.
        directory: Directory of the run.
    """
    if not records:
        return
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    trained = [(record["step"], record["loss"]) for record in records if record["loss"] is not None]
    axes.plot(*zip(*trained, strict=True), color="#9db7d5", linewidth=0.8, label="training")
    smooth = smoothed([loss for _, loss in trained])
    axes.plot([step for step, _ in trained], smooth, color="#1f5fa8", linewidth=1.6, label="training, smoothed")
    validated = [(record["step"], record["val_loss"]) for record in records if record["val_loss"] is not None]
    if validated:
        axes.plot(*zip(*validated, strict=True), "o-", color="#c4442b", markersize=4, label="validation")
    if directory.summary.exists():
        entropy = json.loads(directory.summary.read_text())["unigram_entropy"]
        axes.axhline(entropy, color="#777777", linestyle="--", linewidth=1, label="unigram entropy")
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per token)")
    axes.set_title(directory.path.name)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(directory.picture, dpi=130)
