"""An emulated cluster on one machine: hosts are network namespaces, links have the bandwidth that you choose."""

from thinwire.lab.lab import Host, Lab, LinkTraffic
from thinwire.lab.spec import LabSpec, LinkShape

__all__ = ["Host", "Lab", "LabSpec", "LinkShape", "LinkTraffic"]
