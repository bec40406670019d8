"""Converts the configurations of other systems to plans and recipes: DeepSpeed's JSON, FSDP2's arguments, accelerate's
FSDP configuration.

Converting turns text into text and loads no torch. Every key of the source becomes a :class:`Row`: it is mapped to keys
of the plan or the recipe, ignored for a stated reason, or refused with a remedy.
"""

from __future__ import annotations

from thinwire.convert.accelerate import from_accelerate
from thinwire.convert.deepspeed import from_deepspeed
from thinwire.convert.fsdp2 import from_fsdp2
from thinwire.convert.outcome import Action, Conversion, Row
from thinwire.convert.source import read_source
