"""Published figures of accelerators and of the machines in which they are sold.

Memory is the total that the driver reports. Peaks are dense (without sparsity), and links count one direction. ``nic``
is the sum of all network cards of the usual machine. If your cluster differs, set ``links.nic``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

_GBIT = 10**9
_GB_PER_S = 8 * 10**9


@dataclass(frozen=True)
class Accelerator:
    """One kind of accelerator in its usual machine.

    Attributes:
        summary: One line about the accelerator and its machine.
        memory: Bytes of one accelerator.
        peak_flops: Peak FLOP/s of one accelerator, by dtype.
        inside: Bits per second between two accelerators of a node, in one direction.
        memory_bandwidth: Bits per second of the accelerator's memory.
        nic: Bits per second of all network cards of a node, in one direction.
        gpus_per_node: Number of accelerators in the usual machine.
        host: Bits per second between the accelerator and its host's memory, in each direction, while all accelerators
            of the node copy in both: a share of what the host's memory carries, where that is less than the link.
    """

    summary: str
    memory: int
    peak_flops: dict[str, float]
    memory_bandwidth: float
    inside: float
    nic: float
    gpus_per_node: int
    host: float = 19 * _GB_PER_S


_A100_PEAKS = {"bfloat16": 312e12, "float16": 312e12, "float32": 19.5e12}
_V100_PEAKS = {"float16": 125e12, "float32": 15.7e12}
_H100_PEAKS = {"bfloat16": 989.4e12, "float16": 989.4e12, "float32": 66.9e12}
_MIB = 1 << 20

ACCELERATORS: Final[dict[str, Accelerator]] = {
    "a800-80g": Accelerator(
        "A800 80GB SXM: an A100 with NVLink at 400 GB/s both ways; four 200 Gbit/s cards (AMSP's nodes)",
        81_251 * _MIB, _A100_PEAKS, 2039 * _GB_PER_S, 200 * _GB_PER_S, 800 * _GBIT, 8,
    ),
    "a100-80g": Accelerator(
        "A100 80GB SXM, NVLink 600 GB/s both ways; eight 200 Gbit/s cards (DGX A100)",
        81_251 * _MIB, _A100_PEAKS, 2039 * _GB_PER_S, 300 * _GB_PER_S, 1600 * _GBIT, 8,
    ),
    "a100-40g": Accelerator(
        "A100 40GB SXM, NVLink 600 GB/s both ways; 400 Gbit/s of EFA (p4d.24xlarge)",
        40_536 * _MIB, _A100_PEAKS, 1555 * _GB_PER_S, 300 * _GB_PER_S, 400 * _GBIT, 8,
    ),
    "v100-32g": Accelerator(
        "V100 32GB SXM3, NVLink 300 GB/s both ways through NVSwitch; eight 100 Gbit/s cards (DGX-2)",
        32_510 * _MIB, _V100_PEAKS, 900 * _GB_PER_S, 150 * _GB_PER_S, 800 * _GBIT, 16, 6 * _GB_PER_S,
    ),
    "v100-16g": Accelerator(
        "V100 16GB SXM2, NVLink 300 GB/s both ways, to the host too; two 100 Gbit/s cards (Lassen)",
        16_160 * _MIB, _V100_PEAKS, 900 * _GB_PER_S, 75 * _GB_PER_S, 200 * _GBIT, 4, 34 * _GB_PER_S,
    ),
    "h100-80g": Accelerator(
        "H100 80GB SXM, NVLink 900 GB/s both ways; eight 400 Gbit/s cards (DGX H100)",
        81_079 * _MIB, _H100_PEAKS, 3352 * _GB_PER_S, 450 * _GB_PER_S, 3200 * _GBIT, 8,
        28 * _GB_PER_S,
    ),
    "h200-141g": Accelerator(
        "H200 141GB SXM, NVLink 900 GB/s both ways; eight 400 Gbit/s cards (DGX H200)",
        143_167 * _MIB, _H100_PEAKS, 4800 * _GB_PER_S, 450 * _GB_PER_S, 3200 * _GBIT, 8,
        28 * _GB_PER_S,
    ),
}  # fmt: skip
"""Accelerators by the name that ``--cluster NAME:NODESxGPUS`` takes."""
