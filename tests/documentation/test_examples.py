"""The examples, started with torchrun on four ranks as a reader would."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from examples import huggingface_model, loop
from tests.support.paths import ROOT

from thinwire.testing import run_ranks

pytestmark = pytest.mark.ranks


def test_a_plain_loop_in_thirty_lines_learns() -> None:
    code = [line for line in (ROOT / "examples/loop.py").read_text().splitlines() if line.strip()]
    assert len(code[code.index("import thinwire as tw") :]) <= 30
    losses = run_ranks(4, loop.train, 20)
    assert all(rank_losses == losses[0] for rank_losses in losses), "losses are means over ranks"
    assert losses[0][0] > 5.4, "nothing is known of 256 bytes"
    assert losses[0][-1] < 0.7 * losses[0][0]


@pytest.mark.slow
def test_a_hugging_face_model_learns_and_is_written_as_transformers_reads_it(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    losses = run_ranks(4, huggingface_model.train, str(tmp_path), 12)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ids = torch.tensor(list(huggingface_model.TEXT.read_bytes()[:64])).unsqueeze(0)
    with torch.no_grad():
        loss = model(input_ids=ids, labels=ids).loss.item()
    for rank_losses in losses:
        assert rank_losses[-1] < 0.8 * rank_losses[0]
        assert abs(loss - rank_losses[-1]) < 1.0, "what was written is what was trained"
