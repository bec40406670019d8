"""Run tests/integrations with other releases of frameworks: ``python tools/frameworks.py transformers==5.22.2``.

Each release gets an environment of its own in build/frameworks. It holds only what differs: everything else, thinwire
included, comes from the environment that runs this program.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]

TESTS: Final = {
    "transformers": ("test_transformers*.py", "test_accelerate*.py", "test_framework_examples.py"),
    "accelerate": ("test_accelerate*.py", "test_transformers*.py"),
    "lightning": ("test_lightning*.py", "test_fabric*.py", "test_frozen_bases.py"),
    "torchtitan": ("test_torchtitan*.py",),
}
"""Files of tests/integrations that use a framework."""

BESIDE: Final = {"torchtitan": ("torchao>=0.18",)}
"""What a framework's tests need that it does not require: for torchtitan, float8 layers."""


def environment(release: str) -> Path:
    """Make the environment of a release, unless it exists, and return its interpreter.

    Args:
        release: Requirement of pip, for example ``transformers==5.22.2``.
    """
    directory = ROOT / "build/frameworks" / release.replace("==", "-")
    interpreter = directory / "bin/python"
    if not interpreter.exists():
        subprocess.run([sys.executable, "-m", "venv", str(directory)], check=True)
    own = subprocess.run(
        [str(interpreter), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True, text=True, check=True,
    ).stdout.strip()  # fmt: skip
    # Packages of the release come first on the path; addsitedir also follows the .pth file of an editable thinwire.
    shared = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
    (Path(own) / "shared-packages.pth").write_text(shared)
    pip = [str(interpreter), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, release, *BESIDE.get(release.partition("==")[0], ())], check=True)
    return interpreter


def test(release: str, arguments: list[str]) -> bool:
    """Run the tests of a framework under a release of it; returns whether they passed.

    Args:
        release: Requirement of pip.
        arguments: Further arguments of pytest.

    Raises:
        SystemExit: The framework is unknown.
    """
    framework, _, version = release.partition("==")
    if framework not in TESTS or not version:
        raise SystemExit(f"{release}: name a release as FRAMEWORK==VERSION; frameworks are {', '.join(TESTS)}")
    interpreter = environment(release)
    code = f"import importlib.metadata as m, sys; sys.exit(m.version({framework!r}) != {version!r})"
    subprocess.run([str(interpreter), "-c", code], check=True)
    files = sorted(str(path) for name in TESTS[framework] for path in (ROOT / "tests/integrations").glob(name))
    print(f"{release}:", flush=True)
    return subprocess.run([str(interpreter), "-m", "pytest", *files, *arguments], cwd=ROOT, check=False).returncode == 0


def main() -> None:
    """Test every release that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("releases", nargs="+", metavar="FRAMEWORK==VERSION")
    parser.add_argument("--slow", action="store_true", help="also run the tests that are marked slow")
    options = parser.parse_args()
    arguments = ["-q", "-m", "not gpu" if options.slow else "not gpu and not slow"]
    failed = [release for release in options.releases if not test(release, arguments)]
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
