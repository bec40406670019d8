"""The simulator: it prices the program that the runtime performs. Never imports torch.

A player performs a program on a clock (``player.py``, ``lanes.py``, ``clock.py``), with the work of each unit
(``workload.py``), and plays only some of many equal blocks (``repetition.py``). ``step.py`` makes a step of that.
``axes.py`` adds what tensor, pipeline, expert and context parallelism cost. Cases (``cases.py``) are steps of an engine
(``engine.py``): thinwire's own, or one that a package adds.
"""

from thinwire.sim.cases import Answer, Case, Slowed, answer, read_cases
from thinwire.sim.clock import Resource
from thinwire.sim.disturbed import Disturbance, Disturbed, disturbed
from thinwire.sim.engine import Engine
from thinwire.sim.step import Simulated, simulate
from thinwire.sim.workload import Workload
