"""Models of ``transformers`` over tensor-parallel ranks and pipeline stages train as in one process."""

from __future__ import annotations

import statistics
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.training.drafted import materialize

import thinwire as tw
from thinwire.errors import SpecError, UsageError
from thinwire.parallel import parallelize
from thinwire.spec.recipe import ModelRecipe
from thinwire.testing import run_ranks
from thinwire.train.data.samples import Batch
from thinwire.train.models.build import DraftedModel, draft
from thinwire.train.models.common import cross_entropy
from thinwire.train.models.huggingface import FAMILIES, STAGED

pytestmark = pytest.mark.ranks

VOCABULARY, LENGTH, STEPS = 64, 8, 3
TOLERANCE = 1e-6
"""Relative difference of gradient norms, and absolute of losses."""

NO_TOKENS = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
NO_DROPOUT = {"attention_dropout": 0.0, "residual_dropout": 0.0, "embedding_dropout": 0.0, "hidden_dropout": 0.0}
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 8,
    "num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 64,
    "attn_implementation": "eager", **NO_TOKENS, **NO_DROPOUT,
}  # fmt: skip

TIED = [family for family in FAMILIES if not family.startswith("gemma")]
"""Gemma's embeddings scale what they look up, so that their weight is not cut, and cannot be the head's."""


def drafted(family: str, **changes: Any) -> DraftedModel:
    config = {"model_type": family, "tie_word_embeddings": False, **SIZES, **changes}
    recipe = ModelRecipe(kind="huggingface", config=config, weights="random")
    return draft(recipe, vocab=VOCABULARY, seq=LENGTH, seed=3)


def batch(step: int, number: int, rank: int) -> Batch:
    generator = torch.Generator().manual_seed(1000 * step + 10 * number + rank)
    ids = torch.randint(0, VOCABULARY, (2, LENGTH + 1), generator=generator)
    return Batch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())


def plan_for(tp: int, pp: int, **fields: Any) -> tw.Plan:
    count = 2 if pp > 1 else 1
    preset = "zero1" if pp > 1 else "zero3"
    fields = {"compute_dtype": "float32", "micro_batches": count, "micro_batch": 2, **fields}
    return tw.Plan.preset(preset, nodes=1, local=4 // tp // pp, tp=tp, pp=pp, **fields)


def check(family: str, tp: int, pp: int, changes: dict[str, Any]) -> tuple[float, float]:
    """The largest relative difference of norms, and of losses that this rank knows."""
    plan = plan_for(tp, pp)
    start = drafted(family, **changes)
    model = parallelize(start.model, plan, loss=cross_entropy, values=start.values, device=torch.device("cpu"))
    optim = model.optimizer(torch.optim.AdamW, lr=1e-2, eps=1e-1)
    alone = materialize(drafted(family, **changes))
    plain = torch.optim.AdamW(alone.parameters(), lr=1e-2, eps=1e-1)
    rank = model.grid.data_ranks.index(dist.get_rank())
    norms, losses = [], []
    for step in range(STEPS):
        loss = model.step([batch(step, number, rank) for number in range(plan.micro_batches)])
        norm = model.clip_grad_norm_(1e9)
        optim.step()
        optim.zero_grad()
        whole: list[float] = []
        for other in range(plan.world):
            own = [alone(*batch(step, n, other)).loss / plan.micro_batches for n in range(plan.micro_batches)]
            for part in own:
                (part / plan.world).backward()
            whole.append(float(sum(own)))
        expected = float(torch.nn.utils.clip_grad_norm_(alone.parameters(), 1e9))
        plain.step()
        plain.zero_grad()
        norms.append(abs(norm - expected) / expected)
        losses.append(abs(float(loss) - whole[rank]) if model.knows_loss else 0.0)
    return max(norms), max(losses)


def check_all(families: list[str], grids: list[tuple[int, int]], changes: dict[str, Any]) -> dict[str, float]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {f"{family} {tp}x{pp}": max(check(family, tp, pp, changes)) for family in families for tp, pp in grids}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("families", "grids", "changes"),
    [
        pytest.param(STAGED, [(2, 1), (1, 2), (2, 2)], {}, id="stages"),
        pytest.param([f for f in FAMILIES if f not in STAGED], [(2, 1)], {}, id="tensor-parallel"),
        pytest.param(TIED, [(2, 1)], {"tie_word_embeddings": True}, id="tied"),
        pytest.param(["llama"], [(2, 1)], {"pad_token_id": 0}, id="padded"),
    ],
)
def test_same_as_alone(families: list[str], grids: list[tuple[int, int]], changes: dict[str, Any]) -> None:
    for differences in run_ranks(4, check_all, list(families), grids, changes):
        worst = max(differences, key=differences.__getitem__)
        assert differences[worst] < TOLERANCE, f"{worst}: {differences[worst]:.1e}"
        assert statistics.median(differences.values()) < TOLERANCE / 2


def refusals(cases: list[tuple[str, int, int, dict[str, Any]]]) -> list[str]:
    told = []
    for family, tp, pp, changes in cases:
        start = drafted(family, **changes)
        with pytest.raises((SpecError, UsageError)) as caught:
            parallelize(start.model, plan_for(tp, pp), loss=cross_entropy, values=start.values)
        told.append(str(caught.value))
    return told


@pytest.mark.slow
def test_what_cannot_be_cut_is_refused() -> None:
    cases: list[tuple[str, int, int, dict[str, Any]]] = [
        ("mixtral", 2, 1, {}),
        ("gemma2", 1, 2, {}),
        ("llama", 4, 1, {}),
        ("llama", 1, 2, {"tie_word_embeddings": True}),
        ("llama", 2, 1, {"tie_word_embeddings": True, "pad_token_id": 0}),
    ]
    for sentences in run_ranks(4, refusals, cases):
        mixtral, gemma, heads, tied, padded = sentences
        assert "tp = 2 does not work with model_type = 'mixtral': models of llama, mistral," in mixtral
        assert "pp = 2 does not work with model_type = 'gemma2'" in gemma
        assert "tp = 4 should divide the model's num_key_value_heads = 2" in heads
        assert "they share one weight" in tied
        assert "tp = 2 does not work with tie_word_embeddings and Embedding with pad_token_id = 0" in padded
