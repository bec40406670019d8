"""Activations of tensor-parallel ranks with sequence parallelism and without."""

from __future__ import annotations

import itertools

from thinwire.cost import largest_memory
from thinwire.spec import ModelSpec, Plan


def test_what_lies_between_matrices_is_whole_without_sequence_parallelism() -> None:
    """Korthikanti et al. 2022, equations 2 and 4; recomputation keeps the input of each block."""
    model, ways, seq = ModelSpec.preset("llama-7b"), 8, 2048
    kept = {}
    for cut, recompute in itertools.product((True, False), repeat=2):
        plan = Plan.preset("zero1", nodes=1, local=1, tp=ways, sequence_parallel=cut, recompute=recompute)
        kept[cut, recompute] = largest_memory(model, plan, seq=seq, overhead=0).activations
    elsewhere = 2 * model.hidden * seq * (ways - 1) // ways  # bytes of hidden states that are on other ranks
    # Of four inputs and outputs of norms in a block, torch keeps two whole in both forms.
    assert kept[False, False] - kept[True, False] == (2 * model.layers + 2) * elsewhere
    assert kept[False, True] - kept[True, True] == (model.layers + 2 + 2) * elsewhere
