"""Direct calls of a part of a Hugging Face model, as the model's own methods make them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from tests.support.families import catalog
from tests.support.families.training import plan, quiet
from tests.support.ranks import on_ranks

import thinwire as tw

pytestmark = pytest.mark.ranks

Call = Callable[[Any, catalog.Batch], Any]

PARTS: Final[dict[str, tuple[str, Call]]] = {
    "encoder of T5": ("t5", lambda model, batch: model.get_encoder()(batch["input_ids"]).last_hidden_state),
    "encoder of BART": ("bart", lambda model, batch: model.get_encoder()(batch["input_ids"]).last_hidden_state),
    "base model of BERT": ("bert", lambda model, batch: model.bert(batch["input_ids"]).last_hidden_state),
    "decoder of Llama": ("llama", lambda model, batch: model.model(batch["input_ids"]).last_hidden_state),
    "embeddings of Llama": ("llama", lambda model, batch: model.get_input_embeddings()(batch["input_ids"])),
    "images of CLIP": ("clip", lambda model, batch: model.get_image_features(batch["pixel_values"]).pooler_output),
    "texts of CLIP": ("clip", lambda model, batch: model.get_text_features(batch["input_ids"]).pooler_output),
    "encoder of Whisper": ("whisper", lambda model, batch: model.get_encoder()(batch["input_features"])[0]),
}


@pytest.mark.parametrize("plan_name", ["zero1", "zero3"])
@pytest.mark.parametrize("part", PARTS)
@on_ranks(2)
def test_a_part_called_by_itself(part: str, plan_name: str) -> None:
    """On every rank, a part computes the same as unsharded, with and without gradients, before and after a step."""
    name, call = PARTS[part]
    with quiet():
        reference = catalog.build(name).eval()
        model = tw.shard(catalog.build(name), plan(plan_name)).eval()
        batch = catalog.batch(name, 0, 0)
        for _ in range(2):
            with torch.no_grad():
                torch.testing.assert_close(call(model, batch), call(reference, batch))
            torch.testing.assert_close(call(model, batch), call(reference, batch))
            with torch.no_grad():
                torch.testing.assert_close(model(**batch).loss, reference(**batch).loss)
