"""``thinwire doctor``: what this machine offers."""

from __future__ import annotations

import json
import os
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from thinwire.cli.errors import explained
from thinwire.units import format_bytes


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Print versions, devices, cores and communication backends.

    [bold]Examples[/bold]

      thinwire doctor
      thinwire doctor --json
    """
    with explained(as_json=as_json):
        found = examine()
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        Console().print(_table(found))


def examine() -> dict[str, Any]:
    """Look at the machine.

    Returns:
        Findings by name; plain values.
    """
    import torch
    import torch.distributed as dist

    from thinwire.train.environment import fast_dtype
    from thinwire.train.versions import versions
    from thinwire.train.worker import num_cores

    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    devices = [
        {
            "name": torch.cuda.get_device_name(index),
            "memory": torch.cuda.get_device_properties(index).total_memory,
        }
        for index in range(num_gpus)
    ]
    return {
        "versions": versions(),
        "cores": num_cores(),
        "memory": _memory(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "devices": devices,
        "fast_dtype": fast_dtype(num_gpus),
        "gloo": dist.is_available() and dist.is_gloo_available(),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if num_gpus and dist.is_nccl_available() else None,
    }


def _memory() -> int | None:
    """Bytes of this host's memory, where the system tells."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None


def _table(found: dict[str, Any]) -> Table:
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column()
    for name, version in found["versions"].items():
        table.add_row(name, version)
    memory = format_bytes(found["memory"]) if found["memory"] else "unknown"
    table.add_row("CPU", f"{found['cores']} cores, {found['instructions']}, {memory} of memory")
    for device in found["devices"]:
        table.add_row("GPU", f"{device['name']}, {format_bytes(device['memory'])}")
    if not found["devices"]:
        table.add_row("GPU", "none that torch can use: training runs on the CPU")
    table.add_row("gloo", "available" if found["gloo"] else "missing from this build of torch: ranks cannot talk")
    table.add_row("NCCL", found["nccl"] or "not used without a GPU")
    table.add_row('compute_dtype = "auto"', found["fast_dtype"])
    return table
