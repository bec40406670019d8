"""What a lease runs: installs the wheels that it brought along, runs the GPU check, packs its records.

Nothing but Python's library is imported here, because nothing else is known to be there. ``tools/lease.py`` puts this
file into the folder that travels, beside ``tree`` and ``wheels``:

    python3 build/lease/start.py --minutes 8.5 --out OUT
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
PACKED = "gpu-records.tar.gz"
_BUILD_SECONDS = 180
_MOST_BYTES = 15 << 20


def main() -> int:
    """Install, run, pack.

    Returns:
        The exit status of the check.
    """
    started = time.time()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=8.5, help="everything ends by then, installing included")
    parser.add_argument("--out", type=Path, required=True, help=f"folder that gets {PACKED} and the log")
    options, rest = parser.parse_known_args()
    options.out.mkdir(parents=True, exist_ok=True)
    site, results = options.out / "site", options.out / "records"
    tree = FOLDER / "tree"
    shutil.copytree(tree / "docs" / "results" / "gpu", results, dirs_exist_ok=True)
    environment = {
        **os.environ,
        # Without the wheel, Python finds the package in the tree, and what needs no C++ still runs. thinwire_bench is
        # always taken from there.
        "PYTHONPATH": os.pathsep.join(map(str, (site, tree, tree / "src", tree / "bench" / "src"))),
        "TRITON_CACHE_DIR": str(options.out / "triton"),
        "THINWIRE_LEASE_SETUP": str(options.out / "setup.json"),
    }
    wheels = sorted((FOLDER / "wheels").glob("*.whl"))
    steps = [_install(wheels, site, f"{len(wheels)} wheels")]
    if steps[0]["error"]:  # pip installs all or none
        steps = [_install([wheel], site, wheel.name) for wheel in wheels]
    probe = [sys.executable, "-c", "import thinwire.codecs.cpp._native"]
    if subprocess.run(probe, env=environment, cwd=tree, capture_output=True, check=False).returncode:
        steps.append(_install([tree, "--no-build-isolation"], site, "thinwire, built here"))
    (options.out / "setup.json").write_text(json.dumps(steps), encoding="utf-8")
    for step in steps:
        print(f"{step['what']}: {step['error'] or 'installed'}", flush=True)

    minutes = options.minutes - (time.time() - started) / 60
    command = [sys.executable, "-m", "benchmarks.gpu", "run", "--results", str(results), "--minutes", f"{minutes:.3f}"]
    with (options.out / "log").open("w", encoding="utf-8") as log:
        process = subprocess.Popen(
            [*command, *rest], env=environment, cwd=tree, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            log.write(line)
        status = process.wait()
    _pack(results, options.out / PACKED)
    for folder in (site, results, options.out / "triton"):
        shutil.rmtree(folder, ignore_errors=True)
    print(f"{time.time() - started:.0f} s; unpack the records into docs/results/gpu: {options.out / PACKED}")
    return status


def _pack(results: Path, packed: Path) -> None:
    """Pack the records; without traces of steps if the file would be too large to come back."""
    for without in (set(), {"traces"}):
        with tarfile.open(packed, "w:gz") as archive:
            for path in sorted(results.iterdir()):
                if path.name not in without:
                    archive.add(path, arcname=path.name)
        if packed.stat().st_size <= _MOST_BYTES:
            return


def _install(what: Sequence[Path | str], site: Path, name: str) -> dict[str, object]:
    """Install without network and without dependencies; says what was installed, in how many seconds, and the error."""
    began = time.time()
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-index",
        "--no-deps",
        "--no-compile",
        "--upgrade",
    ]
    command += ["--disable-pip-version-check", "--target", str(site), *map(str, what)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_BUILD_SECONDS, check=False)
        error = (done.stdout + done.stderr).strip()[-1500:] if done.returncode else ""
    except subprocess.TimeoutExpired:
        error = f"it took longer than {_BUILD_SECONDS} s"
    return {"what": name, "seconds": time.time() - began, "error": error}


if __name__ == "__main__":
    sys.exit(main())
