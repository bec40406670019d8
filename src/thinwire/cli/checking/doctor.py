"""``thinwire doctor``: checks what this machine offers, and what is missing for which feature."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from thinwire.cli.checking.checks import Check, Verdict, hardware_checks, system_checks, torch_check
from thinwire.cli.terminal.console import say, wide_console
from thinwire.cli.terminal.errors import explained
from thinwire.units import format_bytes

_STYLES: Final[dict[Verdict, str]] = {
    "ok": "green",
    "none": "dim",
    "limits": "yellow",
    "missing": "yellow",
    "broken": "red",
}


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Test what training, codecs, the lab and several nodes need; report what is missing, for which feature, and how to
    fix it.

    The exit status is 1 if this machine cannot train at all, else 0.

    [bold]Examples[/bold]

      thinwire doctor
      thinwire doctor --json
    """
    with explained(as_json=as_json):
        from thinwire.cli.checking.interfaces import interfaces, network_checks, rdma_devices

        torch, network, devices = torch_check(), interfaces(), rdma_devices()
        checks, described = [torch], _described(has_torch=not torch.fatal)
        if not torch.fatal:
            checks += hardware_checks()
        checks += network_checks(network, devices, has_gpu=bool(described["devices"]))
        checks += system_checks(has_rdma=bool(devices))
    ready = not any(check.fatal for check in checks)
    if as_json:
        described |= {
            "interfaces": [asdict(interface) for interface in network],
            "checks": [asdict(check) for check in checks],
            "ready": ready,
        }
        print(json.dumps(described, indent=2))
    else:
        _show(described, checks, wide_console())
    if not ready:
        raise typer.Exit(1)


def _described(*, has_torch: bool) -> dict[str, Any]:
    """Findings about the machine by name, as plain values."""
    import psutil

    from thinwire.train.environment import num_cores, versions

    found: dict[str, Any] = {
        "versions": versions(),
        "cores": num_cores(),
        "memory": psutil.virtual_memory().total,
        "instructions": None,
        "devices": [],
        "fast_dtype": None,
        "gloo": False,
        "nccl": None,
    }
    if not has_torch:
        return found
    import torch
    import torch.distributed as dist

    from thinwire.train.environment import fast_dtype

    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    devices = [
        {"name": torch.cuda.get_device_name(index), "memory": torch.cuda.get_device_properties(index).total_memory}
        for index in range(num_gpus)
    ]
    return found | {
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "devices": devices,
        "fast_dtype": fast_dtype(num_gpus),
        "gloo": dist.is_available() and dist.is_gloo_available(),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if num_gpus and dist.is_nccl_available() else None,
    }


def _show(findings: dict[str, Any], checks: Sequence[Check], console: Console) -> None:
    versions, memory = findings["versions"], format_bytes(findings["memory"])
    console.print(f"thinwire {versions['thinwire']} on {versions['platform']}")
    console.print(
        f"CPU: {findings['cores']} cores, {findings['instructions'] or 'instructions unknown'}, {memory} of memory",
    )
    if findings["fast_dtype"]:
        console.print(f'compute_dtype = "auto" is {findings["fast_dtype"]} here')
    if findings["devices"] and findings["fast_dtype"] == "float32":
        console.print('these GPUs multiply no bfloat16; "float16" is fast, and scales the loss')
    table = Table(box=None, pad_edge=False)
    for name in ("check", "found", "verdict", "needed for"):
        table.add_column(name, overflow="fold")
    for check in checks:
        verdict = Text(check.verdict, style=_STYLES[check.verdict])
        table.add_row(check.name, check.found, verdict, check.needed_for)
    console.print("", table)
    remedies = [check for check in checks if check.remedy is not None]
    if remedies:
        console.print("\nhow to fix it:")
        for check in remedies:
            say(console, f"  {check.name}: {check.remedy}")
    fatal = [check.name for check in checks if check.fatal]
    console.print(f"\nthis machine cannot train: {', '.join(fatal)}" if fatal else "\nthis machine can train")
