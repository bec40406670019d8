"""Writes docs/compatibility.md from the catalogue and from measured outcomes.

python -m tests.behaviours.page                     # from measured.json
python -m tests.behaviours.page --measure           # run zero3 and FSDP2 on two ranks first
python -m tests.behaviours.page --measure NAME ...  # only these behaviours; the others stay as they were measured
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

from tests.behaviours.catalog import REFUSED, SUBJECTS, Behaviour, catalogue
from tests.behaviours.not_yet import NOT_YET
from tests.behaviours.runner import Outcome, run
from tests.support.paths import ROOT
from tools.ported.scripts import section

__all__ = ["PAGE", "render", "sentences"]

PAGE = ROOT / "docs" / "compatibility.md"
MEASURED = Path(__file__).with_name("measured.json")
"""Outcomes on two ranks by system and behaviour: what thinwire's refusals say, and what FSDP2 does."""

INTRODUCTION = """# What works, and what is refused

Read this page first if you come from FSDP2, DeepSpeed or DDP. Each line is a behaviour of the test suite: a small
training loop that runs once in one process on plain PyTorch and once on every rank. **Works** means that losses,
parameters and gradients are equal, under `ddp`, `zero1`, `zero2`, `zero3` and `hpz`. **Refused** means that every rank
raises one sentence, which names the remedy.

The column FSDP2 shows what the same function does under `fully_shard` of PyTorch 2.13, with gloo on CPU, two ranks and
default arguments. It is in *italics* where FSDP2 has no counterpart of the call, or where its documentation or tests
say what happens. The column DeepSpeed gives what its documentation or its own tests say. It is empty where we know of
no statement; nothing in it was measured here.
"""


def render() -> str:
    """The page."""
    measured = json.loads(MEASURED.read_text(encoding="utf-8"))
    entries = list(catalogue().values())
    refused = [one for one in entries if one.refused and one.name not in NOT_YET]
    open_ones = sum(one.name in NOT_YET for one in entries)
    counts = f"{len(entries)} behaviours: {len(entries) - len(refused) - open_ones} work, {len(refused)} are refused"
    counts += f", {open_ones} do not behave as they should yet." if open_ones else "."
    parts = [INTRODUCTION, counts, "", *_refusals(refused, measured)]
    for subject, heading in SUBJECTS.items():
        parts += [f"## {heading}", "", "| you | thinwire | FSDP2 | DeepSpeed |", "| --- | --- | --- | --- |"]
        parts += [_row(one, measured) for one in entries if one.subject == subject]
        parts.append("")
    parts += section()
    parts += ["## Where the behaviours come from", "", "| behaviour | origin |", "| --- | --- |"]
    parts += [f"| `{one.name}` | {_cell(one.origin)} |" for one in entries]
    return "\n".join(parts) + "\n"


def _refusals(refused: list[Behaviour], measured: dict[str, dict[str, Outcome]]) -> list[str]:
    parts = ["## Refusals and their sentences", ""]
    for kind, heading in REFUSED.items():
        of_kind = [one for one in refused if one.kind == kind]
        parts += [f"### {heading}", "", _summary(of_kind, measured), "", "| you | under | the sentence |"]
        parts += ["| --- | --- | --- |", *(_refusal(one, measured) for one in of_kind), ""]
    return parts


def sentences(refused: list[Behaviour]) -> int:
    """How many sentences refuse some behaviours."""
    return len({tuple(sorted(set(one.refused.values()))) for one in refused})


def _summary(refused: list[Behaviour], measured: dict[str, dict[str, Outcome]]) -> str:
    if refused[0].kind != "ordinary":
        return f"{len(refused)} behaviours."
    run = sum(_fsdp2(one, measured).strip("*").startswith("works") for one in refused)
    text = f"{len(refused)} behaviours, refused by {sentences(refused)} sentences; some sentences refuse several."
    return f"{text} FSDP2 runs {run} of them as one process does."


def _refusal(one: Behaviour, measured: dict[str, dict[str, Outcome]]) -> str:
    presets = "every plan" if "*" in one.refused else ", ".join(f"`{preset}`" for preset in one.refused)
    sentence = measured["zero3"].get(one.name, ("", ""))[1]
    return f"| {_cell(one.does)} | {presets} | {_cell(_shortened(sentence))} |"


def _row(one: Behaviour, measured: dict[str, dict[str, Outcome]]) -> str:
    if one.name in NOT_YET:
        ours = "not yet: " + ", ".join(sorted(set(NOT_YET[one.name].values())))
    elif one.refused:
        ours = "refused" if "*" in one.refused else f"works; refused under {', '.join(one.refused)}"
    else:
        ours = "works"
    theirs = one.deepspeed
    if theirs == "works" and one.origin.startswith("DeepSpeed"):
        theirs = "works, by its tests"
    return f"| {_cell(one.does)} | {ours} | {_fsdp2(one, measured)} | {_cell(theirs)} |"


def _fsdp2(one: Behaviour, measured: dict[str, dict[str, Outcome]]) -> str:
    if one.fsdp2:
        return f"*{_cell(one.fsdp2)}*"
    if one.name not in measured["fsdp2"]:
        return ""
    kind, text = measured["fsdp2"][one.name]
    if text == "every rank died":
        return "ends the process"
    words = {"equal": "works", "wrong": "another result", "hung": "hangs until the timeout"}
    return words.get(kind) or f"raises `{_cell(_shortened(text, 90))}`"


def _shortened(text: str, most: int = 400) -> str:
    text = _without_places(text)
    return text if len(text) <= most else text[: most - 3].rsplit(" ", 1)[0] + " ..."


def _without_places(text: str) -> str:
    """A sentence without the tail of places that the runner adds: they are paths of the machine that measured."""
    return re.sub(r" \(File .*$", "", text, flags=re.DOTALL)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def measure(only: list[str]) -> None:
    """Run behaviours, all by default, and keep outcomes."""
    entries = catalogue()
    names = {
        "zero3": [name for name, one in entries.items() if one.refused],
        "fsdp2": [name for name, one in entries.items() if not one.fsdp2 and not one.slow],
    }
    before = json.loads(MEASURED.read_text(encoding="utf-8")) if only else {"zero3": {}, "fsdp2": {}}
    measured = {}
    for system, usual in names.items():
        chosen = [name for name in usual if not only or name in only]
        kept = {name: outcome for name, outcome in before[system].items() if name in usual}
        measured[system] = kept | {
            name: (kind, _without_places(text)) for name, (kind, text) in run(chosen, system, 2).items()
        }
    MEASURED.write_text(json.dumps(measured, indent=1, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write docs/compatibility.md.")
    parser.add_argument("--measure", nargs="*", metavar="NAME", help="run these behaviours first, all by default")
    if (only := parser.parse_args().measure) is not None:
        measure(only)
    PAGE.write_text(render(), encoding="utf-8")
