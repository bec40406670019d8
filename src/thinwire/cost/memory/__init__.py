"""Peak memory of one rank, by how long what it holds lives.

Model states live from step to step (``states.py``), activations from forward to backward (``activations.py``), gathered
units and gradients on their way for a while (``workspace.py``). The ranks of a pipeline differ (``stages.py``), and the
one that needs the most counts (``peak.py``). ``peers.py`` has the formulae of other systems.
"""

from thinwire.cost.memory.activations import (
    GPU_LOSS_CHUNK,
    HOST_LOSS_CHUNK,
    activation_bytes,
    kept_activations,
    logit_bytes,
    working_memory,
)
from thinwire.cost.memory.peak import OVERHEAD, Memory, largest_memory, memory
from thinwire.cost.memory.peers import PEER_SYSTEMS, ZeroSettings, peer_memory
from thinwire.cost.memory.stages import PipelineShare, demanding_stages, held_units, stage_model, stages
from thinwire.cost.memory.states import AMSP_STATES, ModelStates, States
from thinwire.cost.memory.workspace import Workspace

__all__ = [
    "AMSP_STATES",
    "GPU_LOSS_CHUNK",
    "HOST_LOSS_CHUNK",
    "OVERHEAD",
    "PEER_SYSTEMS",
    "Memory",
    "ModelStates",
    "PipelineShare",
    "States",
    "Workspace",
    "ZeroSettings",
    "activation_bytes",
    "demanding_stages",
    "held_units",
    "kept_activations",
    "largest_memory",
    "logit_bytes",
    "memory",
    "peer_memory",
    "stage_model",
    "stages",
    "working_memory",
]
