"""An emulated cluster on one machine: hosts are network namespaces, links have the bandwidth that you choose."""

from thinwire.lab.host import Host
from thinwire.lab.lab import Lab
from thinwire.lab.spec import LabSpec, LinkShape
from thinwire.lab.traffic import LinkTraffic

__all__ = ["Host", "Lab", "LabSpec", "LinkShape", "LinkTraffic"]
