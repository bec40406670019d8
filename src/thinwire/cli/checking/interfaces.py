"""Network interfaces of this machine, and which of them gloo and NCCL would take."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from thinwire.cli.checking.checks import Check
from thinwire.units import format_bandwidth

_INFINIBAND: Final = Path("/sys/class/infiniband")
_VERBS: Final = Path("/dev/infiniband")
_LAST: Final = ("docker", "lo", "virbr")
"""Prefixes of interfaces that NCCL takes only if there is no other, in its order."""


@dataclass(frozen=True)
class Interface:
    """A network interface that is up.

    Attributes:
        name: Name of the device.
        addresses: IPv4 and IPv6, without link-local ones.
        bits_per_second: Speed that the driver reports; None where it reports none, as for virtual devices.
        mtu: Largest packet in bytes.
    """

    name: str
    addresses: tuple[str, ...]
    bits_per_second: float | None
    mtu: int

    @property
    def is_loopback(self) -> bool:
        """Whether it reaches this machine alone."""
        return bool(self.addresses) and all(
            address == "::1" or address.startswith("127.") for address in self.addresses
        )


def interfaces() -> list[Interface]:
    """The interfaces that are up, in the kernel's order."""
    addresses, states = psutil.net_if_addrs(), psutil.net_if_stats()
    return [
        Interface(
            name,
            tuple(
                entry.address
                for entry in addresses.get(name, ())
                if entry.family in (socket.AF_INET, socket.AF_INET6) and not entry.address.startswith("fe80")
            ),
            # psutil says 0 where the driver says nothing.
            states[name].speed * 1e6 or None,
            states[name].mtu,
        )
        for _, name in socket.if_nameindex()
        if name in states and states[name].isup
    ]


def gloo_choice(all_interfaces: Sequence[Interface]) -> tuple[list[str], str]:
    """The interfaces that gloo takes, and why these: those of ``GLOO_SOCKET_IFNAME``, or the one whose address this
    host's name has."""
    named = os.environ.get("GLOO_SOCKET_IFNAME")
    if named:
        return [name.strip() for name in named.split(",")], "GLOO_SOCKET_IFNAME"
    host = socket.gethostname()
    for address in _own_addresses(host):
        names = [interface.name for interface in all_interfaces if address in interface.addresses]
        # Debian gives hosts an address like 127.0.1.1, which belongs to the loopback without being listed.
        return names or [
            interface.name for interface in all_interfaces if interface.is_loopback
        ], f"{host} is {address}"
    return [interface.name for interface in all_interfaces if interface.is_loopback], f"{host} resolves to no address"


def _own_addresses(host: str) -> Iterator[str]:
    """Addresses of a name that a socket of this machine can have."""
    try:
        entries = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return
    for family, kind, protocol, _, where in entries:
        try:
            with socket.socket(family, kind, protocol) as trial:
                trial.bind(where)
        except OSError:
            continue
        yield str(where[0])


def nccl_choice(all_interfaces: Sequence[Interface]) -> tuple[list[str], str]:
    """The interfaces that NCCL's sockets take, and why these."""
    names = [interface.name for interface in all_interfaces if interface.addresses]
    named = os.environ.get("NCCL_SOCKET_IFNAME")
    if named:
        return _matching(names, named), "NCCL_SOCKET_IFNAME"
    groups = [
        [name for name in names if name.startswith("ib")],
        [name for name in names if not name.startswith(_LAST)],
        *([name for name in names if name.startswith(prefix)] for prefix in _LAST),
    ]
    return next((group for group in groups if group), []), "its own order"


def _matching(names: Sequence[str], pattern: str) -> list[str]:
    """NCCL's notation: prefixes between commas, ``=`` before them for whole names, ``^`` for all others."""
    excluded, exact = pattern.startswith("^"), pattern.lstrip("^").startswith("=")
    words = [word for word in pattern.lstrip("^=").split(",") if word]
    return [
        name for name in names if excluded != any(name == word if exact else name.startswith(word) for word in words)
    ]


@dataclass(frozen=True)
class RdmaDevice:
    """A network card with RDMA.

    Attributes:
        name: Name of the device, for example ``mlx5_0``.
        driver: Driver in the kernel; ``efa`` is Amazon's.
        ports: State, rate and link layer of each port.
    """

    name: str
    driver: str
    ports: tuple[str, ...]


def rdma_devices(root: Path = _INFINIBAND) -> list[RdmaDevice]:
    """The devices that the kernel lists."""
    if not root.is_dir():
        return []
    return [_rdma_device(path) for path in sorted(root.iterdir())]


def _rdma_device(path: Path) -> RdmaDevice:
    def read(port: Path, name: str) -> str:
        file = port / name
        return file.read_text(encoding="utf-8").strip() if file.exists() else ""

    ports = sorted((path / "ports").iterdir()) if (path / "ports").is_dir() else []
    described = (
        " ".join(word for name in ("state", "rate", "link_layer") if (word := read(port, name).rpartition(": ")[2]))
        for port in ports
    )
    driver = path / "device" / "driver"
    return RdmaDevice(path.name, driver.resolve().name if driver.exists() else "unknown driver", tuple(described))


# -- checks ------------------------------------------------------------------------------------------------------


def network_checks(
    all_interfaces: Sequence[Interface], devices: Sequence[RdmaDevice], *, has_gpu: bool
) -> Iterator[Check]:
    """The network as ranks will see it."""
    for interface in all_interfaces:
        if not interface.is_loopback:
            yield _interface(interface)
    yield _gloo(all_interfaces)
    if has_gpu:
        names, why = nccl_choice(all_interfaces)
        if names:
            yield Check("NCCL's network", f"{', '.join(names)} ({why})", "ranks with a GPU on several nodes")
        else:
            remedy = _choose("NCCL", all_interfaces)
            yield Check("NCCL's network", f"no interface ({why})", "ranks with a GPU", "broken", remedy, essential=True)
    yield from _rdma(devices)


def _interface(interface: Interface) -> Check:
    speed = format_bandwidth(interface.bits_per_second) if interface.bits_per_second else "speed unknown"
    where = ", ".join(interface.addresses) or "no address"
    return Check(
        f"interface {interface.name}",
        f"{where}; {speed}, MTU {interface.mtu:,}",
        "several nodes",
        "ok" if interface.addresses else "none",
    )


def _gloo(all_interfaces: Sequence[Interface]) -> Check:
    """Whether gloo can open what it takes, and whether other nodes could reach it."""
    try:
        import torch.distributed as dist
    except (ImportError, OSError):
        return Check("gloo", "torch cannot be imported", "all ranks", "broken", essential=True)
    name, use = "gloo", "ranks without a GPU each, several nodes"
    if not (dist.is_available() and dist.is_gloo_available()):
        remedy = 'python -m pip install "torch>=2.11"'
        return Check(name, "not part of this build of torch", use, "missing", remedy, essential=True)
    names, why = gloo_choice(all_interfaces)
    try:
        if os.environ.get("GLOO_SOCKET_IFNAME"):
            for interface in names:
                dist.ProcessGroupGloo.create_device(interface=interface)
        else:
            dist.ProcessGroupGloo.create_default_device()
    except RuntimeError as error:
        return Check(name, str(error).splitlines()[0], use, "broken", _choose("GLOO", all_interfaces), essential=True)
    loopback = {interface.name for interface in all_interfaces if interface.is_loopback}
    description = f"{', '.join(names)} ({why})"
    if not set(names) - loopback:
        return Check(
            name, f"{description}: other nodes cannot reach it", use, "limits", _choose("GLOO", all_interfaces)
        )
    return Check(name, description, use, essential=True)


def _choose(library: str, all_interfaces: Sequence[Interface]) -> str:
    """The remedy that selects an interface by name."""
    usable = [interface.name for interface in all_interfaces if interface.addresses and not interface.is_loopback]
    return f"export {library}_SOCKET_IFNAME={usable[0] if usable else 'NAME'}"


def _rdma(devices: Sequence[RdmaDevice]) -> Iterator[Check]:
    use = "NCCL without TCP between nodes"
    others = [device for device in devices if device.driver != "efa"]
    elastic = [device for device in devices if device.driver == "efa"]
    if not others:
        yield Check("RDMA", "no device", use, "none")
    else:
        description = "; ".join(f"{device.name} ({device.driver}): {', '.join(device.ports)}" for device in others)
        if any("ACTIVE" in port for device in others for port in device.ports):
            yield _reachable("RDMA", description, use)
        else:
            remedy = "ibstat; check cables and the subnet manager"
            yield Check("RDMA", f"{description}: no port is active", use, "limits", remedy)
    use = f"{use}, on AWS"
    if not elastic:
        yield Check("EFA", "no device", use, "none")
    else:
        description = ", ".join(device.name for device in elastic)
        check = _reachable("EFA", description, use)
        if check.verdict == "ok" and not _has_plugin():
            remedy = "install aws-ofi-nccl (part of the EFA installer) and put it on LD_LIBRARY_PATH"
            check = Check("EFA", f"{description}, but no libnccl-net.so", use, "missing", remedy)
        yield check


def _reachable(name: str, description: str, use: str) -> Check:
    """Whether this process may open the devices; containers often hide them."""
    verbs = sorted(_VERBS.glob("uverbs*")) if _VERBS.is_dir() else []
    if any(os.access(path, os.R_OK | os.W_OK) for path in verbs):
        return Check(name, description, use)
    remedy = f"docker run --device {_VERBS} --cap-add IPC_LOCK; or give this user access to {_VERBS}"
    return Check(name, f"{description}: {_VERBS} cannot be opened", use, "limits", remedy)


def _has_plugin() -> bool:
    """Whether NCCL would find a network plugin."""
    import ctypes

    for name in ("libnccl-net.so", "libnccl-net-ofi.so"):
        try:
            ctypes.CDLL(name)
        except OSError:
            continue
        return True
    return False
