"""The environment of this process: its launcher (torchrun, SLURM or none), its devices, its cores and its software.

The process that only starts ranks and waits for them imports this module too. Functions that need torch import it
themselves.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import platform
import random
import socket
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

import thinwire
from thinwire.errors import SpecError, UsageError
from thinwire.spec.factor import Factor
from thinwire.spec.machines.slurm import expand_hosts
from thinwire.spec.plan import Dtype
from thinwire.spec.template import PlanTemplate

if TYPE_CHECKING:
    import torch

DeviceKind = Literal["cpu", "cuda"]
Demand = Literal["auto", "cpu", "cuda"]
"""Values of ``cluster.device`` and ``--device``; ``auto`` takes CUDA where torch finds it."""

LAB_HOSTS: Final = "THINWIRE_LAB_HOSTS"
"""Environment variable: hosts of a lab, which all share this machine."""

HOSTS_ON_CORES: Final = "THINWIRE_LAB_HOSTS_ON_CORES"
"""Environment variable: those of them that run on the cores of this host; 1 if it has cores of its own."""

_VERSIONED: Final = ("torch", "numpy", "tokenizers", "transformers", "safetensors", "pydantic")


@dataclass(frozen=True)
class Started:
    """Ranks that someone else has started: ``torchrun`` or ``SLURM``. Local numbers are those on this host."""

    by: str
    rank: int
    world: int
    local_rank: int
    local_world: int


@dataclass(frozen=True)
class Hardware:
    """What a run finds on this host: usable GPUs, 0 if it computes on CPUs, and what ``compute_dtype = "auto"`` is."""

    num_gpus: int
    fast_dtype: Dtype


def started(environment: MutableMapping[str, str] = os.environ) -> Started | None:
    """Find out whether this process is one of several ranks already.

    Under SLURM the variables that torch reads are filled in from SLURM's.

    Raises:
        UsageError: The variables contradict each other, or SLURM's nodes have different numbers of tasks.
    """
    if "RANK" in environment:
        by, leader, command = "torchrun", "RANK", "torchrun"
    elif "SLURM_PROCID" in environment and environment.get("SLURM_NTASKS", "1") != "1":
        by, leader, command = "SLURM", "SLURM_PROCID", "srun"
    else:
        return None
    try:
        if by == "SLURM":
            found = _from_slurm(environment)
            environment.update({key: value for key, value in found.items() if key not in environment})
        ranks = Started(
            by=by,
            rank=int(environment["RANK"]),
            world=int(environment["WORLD_SIZE"]),
            local_rank=int(environment.get("LOCAL_RANK", environment["RANK"])),
            local_world=int(environment.get("LOCAL_WORLD_SIZE", environment["WORLD_SIZE"])),
        )
        if not 0 <= ranks.rank < ranks.world or ranks.local_world < 1:
            raise ValueError(f"rank {ranks.rank} of {ranks.world}, {ranks.local_world} on this host")
    except (KeyError, ValueError) as error:
        raise UsageError(
            f"{leader} is set, but the rest of {by}'s environment is not usable ({error!r}); "
            f"start thinwire through {command}, or unset {leader}"
        ) from error
    return ranks


def agent(environment: Mapping[str, str] = os.environ) -> str | None:
    """The torchrun that has started this rank, by the directory that it makes for its attempts: the same in all of
    them, another one in each job and on each host. ``None`` for ranks of other launchers."""
    # The id of the job would not do: it is "none", or whatever the user gives every job.
    attempt = Path(environment.get("TORCHELASTIC_ERROR_FILE", "")).parent.parent
    return str(attempt.parent) if attempt.name == f"attempt_{environment.get('TORCHELASTIC_RESTART_COUNT')}" else None


def _from_slurm(environment: Mapping[str, str]) -> dict[str, str]:
    world, rank = environment["SLURM_NTASKS"], environment["SLURM_PROCID"]
    # A step may have some of the job's nodes only.
    nodes = int(environment.get("SLURM_STEP_NUM_NODES", environment.get("SLURM_NNODES", "1")))
    hosts = environment.get("SLURM_STEP_NODELIST", environment.get("SLURM_JOB_NODELIST", "localhost"))
    tasks = environment.get("SLURM_STEP_TASKS_PER_NODE", environment.get("SLURM_TASKS_PER_NODE", ""))
    if "," in tasks or int(world) % nodes:
        raise UsageError(
            f"SLURM has started {world} tasks on {nodes} nodes (SLURM_TASKS_PER_NODE = {tasks!r}), and every node "
            "needs as many as the others; give srun --ntasks-per-node"
        )
    job, step = int(environment.get("SLURM_JOB_ID", "0")), int(environment.get("SLURM_STEP_ID", "0"))
    return {
        "RANK": rank,
        "WORLD_SIZE": world,
        "LOCAL_RANK": environment.get("SLURM_LOCALID", rank),
        "LOCAL_WORLD_SIZE": str(int(world) // nodes),
        "MASTER_ADDR": expand_hosts(hosts)[0],
        # Any port will do as long as all ranks compute the same one, and jobs and steps on a shared node differ.
        "MASTER_PORT": str(20_000 + (job + 7_919 * step) % 20_000),
    }


def device_kind(demand: Demand) -> DeviceKind:
    """The kind of device that holds models, ``cuda`` or ``cpu``.

    Raises:
        UsageError: The user chose CUDA, and torch finds no CUDA device.
    """
    if demand == "cpu":
        return "cpu"
    import torch

    if torch.cuda.is_available():
        return "cuda"
    if demand == "cuda":
        raise UsageError(
            'cluster.device or --device is "cuda", but torch finds no CUDA device; set it to "cpu" or "auto"'
        )
    return "cpu"


def rank_device(demand: Demand, local_rank: int) -> torch.device:
    """The device of a rank. If there are more ranks than GPUs, they share GPUs in turn.

    Raises:
        UsageError: The user chose CUDA, and torch finds no CUDA device.
    """
    import torch

    if device_kind(demand) == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", local_rank % torch.cuda.device_count())


def threads_per_rank() -> int:
    """Cores of this host per rank on it, unless the user has chosen."""
    chosen = os.environ.get("OMP_NUM_THREADS")
    if chosen is not None and chosen.isdecimal():
        return max(1, int(chosen))
    return max(1, num_cores() // ranks_of_host())


def join(device: torch.device, timeout: float | None = None, keys: str | None = None) -> None:
    """Join the other ranks of the job, and do not leave it, so that training may go on in it. Its collectives fail
    after a timeout in seconds, by default that of groups; its keys are by default those of the environment, if any."""
    import torch

    from thinwire.collectives import group

    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.set_num_threads(threads_per_rank())
    patience = group.DEFAULT_TIMEOUT if timeout is None else datetime.timedelta(seconds=timeout)
    group.init(timeout=patience, device=device, keys=keys)


def ranks_of_host() -> int:
    """Ranks of the job on this host, this one among them."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def ranks_of_machine() -> int:
    """Number of the job's ranks on this machine; in a lab, those of all its hosts."""
    return ranks_of_host() * int(os.environ.get(LAB_HOSTS, "1"))


def num_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return max(1, len(os.sched_getaffinity(0)))
    return os.cpu_count() or 1


def shares_cores(device: torch.device) -> bool:
    """Whether the ranks that compute on this host's cores are more than the cores."""
    return device.type == "cpu" and ranks_of_host() * int(os.environ.get(HOSTS_ON_CORES, "1")) > num_cores()


def resolve_mesh(template: PlanTemplate, ranks: Started | None, num_gpus: int) -> Factor:
    """The data-parallel mesh of a run: its ranks divided by tensor and pipeline parallelism.

    Raises:
        SpecError: Tensor and pipeline parallelism do not divide the ranks, or the started ranks do not form the nodes
            that the recipe asks for.
    """
    return resolve_ranks(template, ranks, num_gpus).data_parallel(*template.model_parallel)


def resolve_ranks(template: PlanTemplate, ranks: Started | None, num_gpus: int) -> Factor:
    """All ranks of a run, and how they form nodes.

    The recipe's (or the command line's) ``cluster.nodes`` and ``nproc`` come first, then what has been started already,
    then the mesh of a plan that names one, then one rank per GPU, then ``cluster.without_gpu``.

    Raises:
        SpecError: The started ranks do not form the nodes that the recipe asks for.
    """
    cluster = template.recipe.cluster
    tp, pp = template.model_parallel
    named = template.mesh
    default = None if named is None else Factor(local=named.local * tp, nodes=named.nodes * pp)
    if ranks is not None and (default is None or default.ranks != ranks.world):
        default = Factor(local=ranks.local_world, nodes=max(1, ranks.world // ranks.local_world))
    if default is None:
        default = Factor(local=num_gpus) if num_gpus else cluster.without_gpu
    if ranks is None:
        return Factor(local=cluster.nproc or default.local, nodes=cluster.nodes or default.nodes)
    nodes = cluster.nodes or (ranks.world // cluster.nproc if cluster.nproc else default.nodes)
    layout = Factor(local=cluster.nproc or max(1, ranks.world // nodes), nodes=max(1, nodes))
    if layout.ranks != ranks.world:
        raise SpecError(
            "cluster",
            f"nodes = {layout.nodes} x nproc = {layout.local} is {layout.ranks} ranks, but {ranks.by} started "
            f"{ranks.world}; start {layout.ranks}, or make the product of nodes and nproc {ranks.world}",
        )
    return layout


def hardware(demand: Demand) -> Hardware:
    """Ask torch what it finds on this host.

    Raises:
        UsageError: The user chose CUDA, and torch finds no CUDA device.
    """
    import torch

    num_gpus = torch.cuda.device_count() if device_kind(demand) == "cuda" else 0
    return Hardware(num_gpus, fast_dtype(num_gpus))


def fast_dtype(num_gpus: int) -> Dtype:
    """What ``compute_dtype = "auto"`` is: bfloat16 if the hardware multiplies it natively, else float32."""
    import torch

    if num_gpus:
        return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float32"
    capabilities: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    return "bfloat16" if any("bf16" in name and has for name, has in capabilities.items()) else "float32"


def free_port() -> int:
    """Find a free TCP port below the ephemeral range, so that no outgoing connection takes it before it is used."""
    ports = random.SystemRandom()
    for _ in range(1000):
        port = ports.randrange(20_000, 32_768)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port
    raise OSError("no free TCP port between 20000 and 32767")


def versions() -> dict[str, str]:
    """Versions of the software that a run's results may depend on, by name: thinwire, Python, the platform and packages
    that are installed."""
    installed = {
        "thinwire": thinwire.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
    }
    for package in _VERSIONED:
        try:
            installed[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return installed
