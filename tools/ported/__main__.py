"""Run example scripts of other frameworks over DDP and, ported by at most three lines, over thinwire; compare them.

    python -m tools.ported trl --checkout accelerate=~/accelerate accelerate
    python -m tests.behaviours.page     # writes the results to docs/compatibility.md

The scripts are read from checkouts of their repositories, or from the installed package; scripts.toml names the lines
that change. Each one runs twice on two CPU ranks over gloo, with the same seeds, small random models and local data.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import torch
from tools.ported.inputs import make_backbone, make_inputs
from tools.ported.scripts import Script, keep, listed
from tools.ported.watch import LOSSES, WEIGHTS

ROOT: Final = Path(__file__).parents[2]
RANKS: Final = 2
MOST: Final = 1e-5
"""How far weights may be apart. Where gradients are clipped or added up in another order, last bits differ."""


def source(script: Script, checkouts: dict[str, Path]) -> Path:
    """Where a script is.

    Args:
        script: The script.
        checkouts: Roots of checkouts by repository.

    Raises:
        SystemExit: There is neither a checkout nor an installed package with that file.
    """
    found = importlib.util.find_spec(script.framework)
    installed = [] if found is None or found.origin is None else [Path(found.origin).parents[1]]
    for root in (*filter(None, [checkouts.get(script.framework)]), *installed):
        if (root / script.path).exists():
            return root / script.path
    raise SystemExit(
        f"{script.name}: no {script.path}; pass --checkout {script.framework}=DIRECTORY at {script.version}"
    )


def run(script: Script, text: str, place: Path) -> str | None:
    """Run a script on ranks, in a directory of its own with what it reads.

    Args:
        script: The script.
        text: Its text, changed or not.
        place: The directory, which is made anew.

    Returns:
        The sentence with which thinwire refused it, if it did.

    Raises:
        SystemExit: The script failed in another way.
    """
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    make_inputs(place)
    (place / "script.py").write_text(text, encoding="utf-8")
    started = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    watch = [str(ROOT / "tools/ported/watch.py"), str(place), "script.py", *script.arguments]
    if "resnet50" in text:
        make_backbone(place / "torch")
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {
        **os.environ,
        "ACCELERATE_USE_CPU": "true",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HOME": str(place / "cache"),
        "HF_HUB_OFFLINE": "1",
        "NLTK_DATA": str(place / "nltk_data"),
        "OMP_NUM_THREADS": "1",
        "PL_USE_MOCKED_MNIST": "1",  # Lightning then reads MNIST's files as they are
        "PYTHONPATH": path,
        "TORCH_HOME": str(place / "torch"),
    }
    with (place / "printed.txt").open("w") as printed:
        done = subprocess.run(
            [*started, *watch],
            cwd=place,
            env=environment,
            stdout=printed,
            stderr=subprocess.STDOUT,
            check=False,
            timeout=240,
        )
    if not done.returncode:
        return None
    said = re.findall(r"UsageError: (.*)", (place / "printed.txt").read_text(errors="replace"))
    if not said:
        raise SystemExit(f"failed; see {place / 'printed.txt'}")
    return str(said[0])


def compared(one: Path, other: Path) -> dict[str, float]:
    """What two runs noted.

    Returns:
        The numbers of losses and of weights, and how far they are apart at most; a loss relative to its value.

    Raises:
        SystemExit: The runs have other numbers of losses, or weights of other names.
    """
    losses = []
    for rank in range(RANKS):
        got, want = (json.loads((place / LOSSES.format(rank=rank)).read_text()) for place in (one, other))
        if len(got) != len(want) or not got:
            raise SystemExit(f"{len(got)} and {len(want)} losses")
        losses += [
            abs(mine - theirs) / abs(theirs) if mine != theirs else 0.0 for mine, theirs in zip(got, want, strict=True)
        ]
    mine, theirs = (
        {f"{number}.{name}": item for number, state in enumerate(states) for name, item in state.items()}
        for states in (torch.load(place / WEIGHTS, weights_only=True) for place in (one, other))
    )
    if mine.keys() != theirs.keys():
        raise SystemExit(f"{sorted(mine.keys() ^ theirs.keys())} are weights of one run only")
    return {
        "losses": len(losses),
        "weights": sum(item.numel() for item in mine.values()),
        "loss_apart": max(losses),
        "weight_apart": max(float((item.double() - theirs[name].double()).abs().max()) for name, item in mine.items()),
    }


def tried(script: Script, text: str, folder: Path) -> dict[str, Any]:
    """Run a script over DDP and over thinwire.

    Args:
        script: The script.
        text: Its text.
        folder: Where both runs have a directory.

    Returns:
        How far they are apart, or the sentence with which thinwire refused.

    Raises:
        SystemExit: A run failed in another way.
    """
    run(script, script.changed(text, script.ddp), folder / "ddp")
    refused = run(script, script.changed(text, script.changes), folder / "thinwire")
    return {"refused": refused} if refused else compared(folder / "thinwire", folder / "ddp")


def main() -> None:
    """Run the scripts that the command line names, and keep what they gave in the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scripts", nargs="*", metavar="NAME", help="scripts, or frameworks; all by default")
    parser.add_argument("--checkout", action="append", default=[], metavar="FRAMEWORK=DIRECTORY")
    options = parser.parse_args()
    checkouts = {
        name: Path(place).expanduser() for name, _, place in (item.partition("=") for item in options.checkout)
    }
    failed = False
    for script in listed():
        if options.scripts and not {script.name, script.framework} & set(options.scripts):
            continue
        text = source(script, checkouts).read_text(encoding="utf-8")
        try:
            found = tried(script, text, ROOT / "build/ported" / script.name)
        except SystemExit as error:
            found = {"failed": str(error)}
        print(f"{script.name}: {found}", flush=True)
        if "failed" in found or script.refused != ("refused" in found) or not found.get("weight_apart", 0) <= MOST:
            failed = True
        else:
            keep(script.name, found)
    if failed:
        raise SystemExit("some scripts are not equal")


if __name__ == "__main__":
    main()
