"""Run directories for tests of reports, and strict checks of the pages."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

from thinwire.program.timeline import COMPUTE, STEP, WAITING, Span, chrome_trace
from thinwire.spec.plan import Plan
from thinwire.spec.recipe import Recipe
from thinwire.train.directory import RunDirectory
from thinwire.train.observing.metrics import MetricsLog, StepRecord
from thinwire.train.observing.trackers import Trackers

VOID = {"meta", "br", "link", "img", "input", "hr"}

RECIPE = """
plan = { preset = "zero3", compute_dtype = "float32" }
[model]
layers = 2
hidden = 64
heads = 4
[train]
steps = 12
seq = 32
log_every = 2
"""


def record(step: int, *, per_record: int = 2, **changes: object) -> StepRecord:
    """A record about ``per_record`` steps of 0.1 s, a tenth of which waits for gathers."""
    known = {
        "step": step,
        "samples": 8 * step,
        "tokens": 256 * step,
        "loss": 6.0 - 0.1 * step,
        "val_loss": 5.5 - 0.1 * step if step % 6 == 0 else None,
        "grad_norm": 1.0 + 0.1 * step,
        "lr": 1e-3,
        "skipped": False,
        "step_seconds": 0.1,
        "tokens_per_second": 2560.0,
        "tgs": 640.0,
        "mfu": 0.25,
        "memory": {"rss": 300 << 20},
        "sent": {
            "gather": {"inside": 1000 * per_record, "across": 4000 * per_record},
            "reduce": {"inside": 0, "across": 2000 * per_record},
            "sync": {"inside": 0, "across": 0},
        },
        "exposed": {"gather": 0.01 * per_record, "reduce": 0.0},
        "codec": {"gather": 0.001 * per_record},
        "memory_by_rank": {"rss": [(300 - rank) << 20 for rank in range(4)]} if step == 12 else None,
        "time": 1_000_000_000.0 + step,
    }
    return StepRecord(**{**known, **changes})  # type: ignore[arg-type]


def write_run(
    path: Path, records: list[StepRecord] | None = None, *, complete: bool = True, **settings: object
) -> Path:
    """A run as training leaves it: by the same code, with made-up numbers."""
    text = path.parent / "recipe.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    text.write_text(RECIPE)
    recipe = Recipe.read(text, [f"{key}={json.dumps(value)}" for key, value in settings.items()])
    plan = Plan.preset("zero3", nodes=2, local=2, compute_dtype="float32")
    directory = RunDirectory(path)
    directory.open(recipe, plan, {"thinwire": "0.1.0", "torch": "2.13.0"}, command="thinwire train recipe.toml")
    directory.note_start(0, {"host": "here", "device": "CPU", "ranks": 4, "plan": plan.describe()})
    log = MetricsLog(directory.metrics, Trackers({}), 0)
    for one in [record(step) for step in range(2, 13, 2)] if records is None else records:
        log.write(one)
    log.close()
    if complete:
        summary = {
            "final_train_loss": 4.8,
            "final_val_loss": 4.3,
            "unigram_entropy": 5.0,
            "parameters": 1234,
            "steps": 12,
        }
        directory.summary.write_text(json.dumps(summary))
    return path


def write_trace(run: Path) -> None:
    """Steps 3 and 4 of two ranks; a gather of the fourth crosses nodes while rank 1 waits."""
    spans = {
        rank: [
            Span(STEP, "step 3", 0.0, 0.1),
            Span(STEP, "step 4", 0.1, 0.2),
            Span(COMPUTE, "forward layers.0", 0.11, 0.15),
            Span(WAITING, "for gather <layers.1>", 0.15, 0.16 + 0.01 * rank),
            Span("gather gather-across", "gather <layers.1>", 0.12, 0.16),
            Span("torch thread 0", "aten::mm", 0.11, 0.12),
        ]
        for rank in range(2)
    }
    (run / "traces").mkdir()
    (run / "traces" / "steps-3-4.json").write_text(json.dumps(chrome_trace(spans)))


class Page(HTMLParser):
    """A page that is well formed and needs nothing from elsewhere, or an AssertionError.

    Args:
        path: Path of the page; the files that it links to are in the same directory.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(convert_charrefs=True)
        self.path = path
        self.open: list[str] = []
        self.ids: list[str] = []
        self.refers: list[str] = []
        self.tags: list[str] = []
        self.words: list[str] = []
        text = path.read_text(encoding="utf-8")
        assert "@import" not in text
        assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", text))
        self.feed(text)
        self.close()
        assert not self.open, self.open
        assert len(self.ids) == len(set(self.ids)), "ids are unique"
        assert set(self.refers) <= set(self.ids), set(self.refers) - set(self.ids)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in {"script", "link", "img", "iframe", "object", "embed", "base", "image", "form"}, tag
        self.tags.append(tag)
        for name, value in attrs:
            assert not name.startswith("on"), name
            assert name not in {"src", "srcset", "data", "action", "poster"}, name
            if name == "id":
                self.ids.append(value or "")
            if name in {"href", "xlink:href"}:
                assert (value or "").startswith("#"), value
                self.refers.append((value or "")[1:])
            if name == "aria-labelledby":
                self.refers.append(value or "")
            if name == "style":
                self.refers += re.findall(r"url\(#([^)]*)\)", value or "")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag, tag

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] != "style":
            self.words.append(data)
