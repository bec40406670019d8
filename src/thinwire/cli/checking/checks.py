"""The checks of ``thinwire doctor``: software, devices, the lab, limits.

Each check tries the feature itself (compiles, encodes, multiplies, opens a lab) instead of reading version numbers. A
check that fails does not prevent the others.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import resource
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from thinwire.errors import ThinwireError
from thinwire.units import format_bytes

Verdict = Literal["ok", "none", "limits", "missing", "broken"]
"""``none``: absent, and nothing on this machine would use it. ``limits``: present, but not sufficient for every use."""

_INSTALL: Final = "python -m pip install"

_CXX_SOURCE: Final = """
#include <bit>
#include <span>
int main() { return std::popcount(static_cast<unsigned>(std::span<int>().size())); }
"""
"""Needs the language and the library of C++20, as the codecs do."""

_MIN_FILES: Final = 4096
"""A rank has a socket for every other rank of each of its groups; 1024 open files suffice for some hundred ranks."""

_MIN_SHARED: Final = 1 << 30
"""Bytes of /dev/shm; a container's default of 64 MiB is too small for NCCL's buffers between 8 ranks."""

_MIN_DISK: Final = 2 << 30

_CHECKPOINT_BYTES: Final = 12
"""Bytes of a parameter in a checkpoint: its fp32 value and two moments."""


@dataclass(frozen=True)
class Check:
    """One line of the table, with a remedy as a command if possible; without an essential one, nothing trains."""

    name: str
    found: str
    needed_for: str
    verdict: Verdict = "ok"
    remedy: str | None = None
    essential: bool = False

    @property
    def fatal(self) -> bool:
        """Whether training cannot work on this machine."""
        return self.essential and self.verdict in ("missing", "broken")


# -- torch and what stands on it ----------------------------------------------------------------------------------


def torch_check() -> Check:
    """Whether torch can be imported and is new enough; the checks of devices need it."""
    name, use, remedy = "torch", "everything", f'{_INSTALL} "torch>=2.11"; docs/quickstart.md has the builds'
    try:
        import torch
        from torch.torch_version import TorchVersion
    except ModuleNotFoundError as error:
        return Check(name, str(error), use, "missing", remedy, essential=True)
    except (ImportError, OSError) as error:  # a library of CUDA that is not there, for one
        return Check(name, f"cannot be imported: {_line(error)}", use, "broken", remedy, essential=True)
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU only"
    build = f"ROCm {torch.version.hip}" if torch.version.hip else build
    result = f"{torch.__version__}, {build}"
    if TorchVersion(torch.__version__) < "2.11":
        return Check(name, f"{result}: too old", use, "broken", remedy, essential=True)
    return Check(name, result, use, essential=True)


def hardware_checks() -> Iterator[Check]:
    """GPUs, NCCL and codecs; torch works."""
    import torch

    has_gpu = torch.cuda.is_available()
    yield _gpu() if has_gpu else _no_gpu()
    yield _nccl(has_gpu)
    yield _allocator(has_gpu)
    yield _codecs("native codecs", "cpp", "cpu", "codecs on the CPU")
    yield _triton(has_gpu)


def _gpu() -> Check:
    import torch

    use = "training on GPUs"
    names = []
    for index in range(torch.cuda.device_count()):
        try:
            ones = torch.ones(64, 64, dtype=torch.float32, device=torch.device("cuda", index))
            (ones @ ones).sum().item()
        except RuntimeError as error:
            result = f"device {index} ({torch.cuda.get_device_name(index)}) does not compute: {_line(error)}"
            return Check("GPU", result, use, "broken", "nvidia-smi", essential=True)
        properties = torch.cuda.get_device_properties(index)
        names.append(f"{properties.name}, {format_bytes(properties.total_memory)}")
    result = "; ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    return Check("GPU", result, use, essential=True)


def _no_gpu() -> Check:
    import torch

    use = "training on GPUs"
    if not Path("/proc/driver/nvidia/version").exists() and shutil.which("nvidia-smi") is None:
        return Check("GPU", "none: training runs on the CPU", use, "none")
    if torch.version.cuda is None:
        remedy = f"{_INSTALL} --force-reinstall torch --index-url https://download.pytorch.org/whl/cu128"
        return Check("GPU", "an NVIDIA driver, but torch is a build without CUDA", use, "missing", remedy)
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        reason = _line(error)
    else:
        reason = "the driver offers no device"
    remedy = "nvidia-smi says what the driver sees; CUDA_VISIBLE_DEVICES and the container's --gpus hide devices"
    return Check("GPU", f"an NVIDIA driver, but torch cannot use it: {reason}", use, "broken", remedy)


def _nccl(has_gpu: bool) -> Check:
    import torch
    import torch.distributed as dist

    use = "ranks with a GPU each"
    if not has_gpu:
        return Check("NCCL", "not used without a GPU", use, "none")
    if not dist.is_nccl_available():
        return Check("NCCL", "not part of this build of torch", use, "missing", f"{_INSTALL} torch", essential=True)
    return Check("NCCL", ".".join(map(str, torch.cuda.nccl.version())), use, essential=True)


def _allocator(has_gpu: bool) -> Check:
    """Whether segments grow, so that free memory can be used whatever its place; importing thinwire asks for it."""
    name, use = "CUDA allocator", "memory of gathered units, which differ in size"
    said = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or "its defaults"
    if not has_gpu:
        return Check(name, "not used without a GPU", use, "none")
    if "expandable_segments:True" in said:
        return Check(name, said, use)
    remedy = "add expandable_segments:True to PYTORCH_CUDA_ALLOC_CONF, or leave the variable unset"
    return Check(name, f"{said}: segments of fixed sizes", use, "limits", remedy)


def _triton(has_gpu: bool) -> Check:
    name, use = "Triton", "codecs on a GPU"
    if importlib.util.find_spec("triton") is None:
        remedy = f"{_INSTALL} triton" if has_gpu else None
        return Check(name, "not installed", use, "missing" if has_gpu else "none", remedy)
    version = importlib.metadata.version("triton")
    if not has_gpu:
        return Check(name, f"{version}, not used without a GPU", use, "none")
    check = _codecs(name, "triton", "cuda", use)
    return Check(name, f"{version}: {check.found}", use, check.verdict, check.remedy)


def _codecs(name: str, backend: str, device: str, use: str) -> Check:
    """Encode and decode a tensor."""
    remedy = "a C compiler and Python's headers; see the line C++ compiler"
    if backend == "cpp":
        remedy = f"install thinwire again: {_INSTALL} --force-reinstall --no-deps ."
    try:
        import torch

        from thinwire.codecs import get

        codec = get("int8:256", backend=backend)
        x = torch.linspace(-1, 1, 4096, dtype=torch.float32, device=device)
        wire = codec.encode(x)
        error = float((codec.decode(wire, x.numel(), x.dtype) - x).abs().max())
        if error > 1 / 100:
            return Check(name, f"wrong values: int8:256 is off by {error:.2g}", use, "broken", remedy, essential=True)
        result = f"int8:256 makes {wire.numel():,} bytes of {x.numel() * 4:,}"
        if backend == "cpp":
            from thinwire.codecs.cpp._native import target

            result += f", with the instructions of {target()}"
    except Exception as error:  # what a broken library or compiler raises has no common class
        return Check(name, f"{type(error).__name__}: {_line(error)}", use, "broken", remedy, essential=backend == "cpp")
    return Check(name, result, use, essential=backend == "cpp")


# -- the system --------------------------------------------------------------------------------------------------


def system_checks(*, has_rdma: bool) -> Iterator[Check]:
    """Python, compilers, optional packages, the lab, limits."""
    yield Check("Python", platform.python_version(), "everything", essential=True)
    yield _compiler()
    yield _headers()
    yield _package("transformers", "models and checkpoints of Hugging Face")
    yield _lab()
    yield _locked_memory(has_rdma)
    yield _open_files()
    yield _shared_memory()
    yield from _disks()


def _compiler() -> Check:
    name, use = "C++ compiler", "installing from source; Triton's first launch"
    remedy = "apt-get install g++ (dnf install gcc-c++)"
    named = os.environ.get("CXX")
    compiler = next((path for path in map(shutil.which, [named] if named else ["c++", "g++", "clang++"]) if path), None)
    if compiler is None:
        return Check(name, f"CXX={named} does not exist" if named else "none", use, "missing", remedy)
    command = [compiler, "-std=c++20", "-fsyntax-only", "-x", "c++", "-"]
    done = subprocess.run(command, input=_CXX_SOURCE, capture_output=True, text=True, check=False)
    asked = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False)
    version = next(iter(asked.stdout.splitlines()), compiler)
    if done.returncode:
        return Check(name, f"{version}: cannot compile C++20", use, "broken", f"{remedy} of version 11 or newer")
    return Check(name, version, use)


def _headers() -> Check:
    header = Path(sysconfig.get_path("include")) / "Python.h"
    use = "installing from source; Triton's first launch"
    if header.exists():
        return Check("Python headers", str(header.parent), use)
    remedy = "apt-get install python3-dev (dnf install python3-devel)"
    return Check("Python headers", f"no {header}", use, "missing", remedy)


def _package(name: str, use: str) -> Check:
    try:
        return Check(name, importlib.metadata.version(name), use)
    except importlib.metadata.PackageNotFoundError:
        return Check(name, "not installed", use, "missing", f"{_INSTALL} {name}")


def _lab() -> Check:
    """Open a lab of two hosts, shape its links, and close it."""
    name, use = "lab", "thinwire lab and thinwire bench: clusters on one machine"
    if sys.platform != "linux":
        return Check(name, "needs Linux's network namespaces", use, "none")
    from thinwire.lab import Lab, LabSpec

    try:
        with Lab(LabSpec(nodes=2, ranks=1)) as lab:
            lab.shape(bandwidth=1e9)
            for option, value in (("latency", 1e-3), ("loss", 1e-3)):
                try:
                    lab.shape(bandwidth=1e9, **{option: value})
                except ThinwireError as error:
                    result = f"ip, tc and namespaces work, but not --{option}"
                    return Check(name, result, use, "limits", _said_by_lab(error))
    except ThinwireError as error:
        return Check(name, "cannot be opened", use, "missing", _said_by_lab(error))
    except subprocess.TimeoutExpired as error:
        return Check(name, f"the machine is too busy: a step took over {error.timeout:.0f} s", use, "limits")
    return Check(name, "ip, tc, namespaces; bandwidth, latency and loss", use)


def _said_by_lab(error: ThinwireError) -> str:
    """The reason and its remedy, without the options that the user did not set."""
    return _line(error).rpartition("lab: ")[2]


def _locked_memory(has_rdma: bool) -> Check:
    name, use = "ulimit -l", "RDMA: memory that network cards read is locked"
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return Check(name, "unlimited", use)
    remedy = "ulimit -l unlimited (docker run --ulimit memlock=-1; in /etc/security/limits.conf: * - memlock unlimited)"
    return Check(name, format_bytes(soft), use, *(("limits", remedy) if has_rdma else ("none",)))


def _open_files() -> Check:
    name, use = "ulimit -n", "gloo: a socket for each other rank of each group"
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= _MIN_FILES:
        return Check(name, "unlimited" if soft == resource.RLIM_INFINITY else f"{soft:,}", use)
    most = _MIN_FILES if hard == resource.RLIM_INFINITY else min(_MIN_FILES, hard)
    remedy = f"ulimit -n {most}" if most > soft else "raise the hard limit: docker run --ulimit nofile=65536:65536"
    return Check(name, f"{soft:,}: few for hundreds of ranks", use, "limits", remedy)


def _shared_memory() -> Check:
    name, use, path = "/dev/shm", "NCCL between ranks of a node", Path("/dev/shm")
    remedy = "docker run --shm-size=8g or --ipc=host; mount -o remount,size=8G /dev/shm"
    if not path.is_dir():
        return Check(name, "not there", use, "missing", remedy)
    total = shutil.disk_usage(path).total
    if total < _MIN_SHARED:
        return Check(name, format_bytes(total), use, "limits", remedy)
    return Check(name, format_bytes(total), use)


def _disks() -> Iterator[Check]:
    """Check the disks of runs and of tokenized text, at their default places."""
    cache = os.environ.get("THINWIRE_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    yield _disk("disk of runs", Path("runs").resolve(), "checkpoints", "--out DIR on another disk")
    yield _disk(
        "disk of the cache", Path(cache).expanduser(), "tokenized text", "export THINWIRE_CACHE=DIR on another disk"
    )


def _disk(name: str, path: Path, use: str, remedy: str) -> Check:
    place = next(parent for parent in (path, *path.parents) if parent.is_dir())
    free = shutil.disk_usage(place).free
    try:
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        return Check(name, f"{place} cannot be written: {error.strerror}", use, "missing", remedy)
    result = f"{format_bytes(free)} free in {place}"
    if use == "checkpoints":
        # Two are kept, and one more is there while it is written.
        result += f", for models of {free / (3 * _CHECKPOINT_BYTES) / 1e9:.2g} billion parameters"
    return Check(name, result, use, "limits" if free < _MIN_DISK else "ok", remedy if free < _MIN_DISK else None)


def _line(error: BaseException) -> str:
    """The first line of an error's message."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
