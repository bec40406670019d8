"""What the scripts read, made here: random models of a few thousand weights, texts and pictures, under the names by
which the scripts ask the Hugging Face Hub for theirs. A local directory of that name goes first."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator
from pathlib import Path

import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

__all__ = ["make_backbone", "make_inputs"]

_WORDS = [
    "a",
    "slow",
    "network",
    "carries",
    "small",
    "numbers",
    "while",
    "every",
    "rank",
    "computes",
    "and",
    "waits",
    "for",
    "the",
    "next",
    "one",
]

_METRICS = """
class _Metric:
    def __init__(self):
        self.pairs = []

    def add_batch(self, predictions, references):
        self.pairs += zip(list(predictions), list(references), strict=True)

    def compute(self, predictions=(), references=(), **options):
        self.add_batch(predictions, references)
        equal = sum(bool(one == other) for one, other in self.pairs) / len(self.pairs)
        self.pairs = []
        return {"accuracy": equal, "f1": equal}  # averaged over examples, F1 of one label each is the accuracy


def load(*names, **options):
    return _Metric()
"""

_REWARDS = """
def variety(completions, **columns):
    return [len(set(completion)) / 10 for completion in completions]
"""


def make_inputs(folder: Path) -> None:
    """Write models, data and two modules that the scripts import.

    Args:
        folder: Where they are written; the scripts run in it.
    """
    torch.manual_seed(0)
    for name, model in _models():
        model.save_pretrained(folder / name)
        _tokenizer().save_pretrained(folder / name)
    for name, splits in _data():
        for split, rows in splits.items():
            _write(folder / name / f"{split}.json", rows)
    (folder / "nyu-mll/glue/README.md").write_text(_configuration("mrpc"), encoding="utf-8")
    (folder / "Salesforce/wikitext/README.md").write_text(_configuration("wikitext-2-v1"), encoding="utf-8")
    (folder / "text.txt").write_text("\n".join(_sentence(number, 12) for number in range(120)), encoding="utf-8")
    (folder / "evaluate.py").write_text(_METRICS, encoding="utf-8")  # the real one downloads each metric
    (folder / "rewards.py").write_text(_REWARDS, encoding="utf-8")
    (folder / "nltk_data/tokenizers/punkt").mkdir(parents=True)  # looked for, and used only to score summaries
    _digits(folder / "data/MNIST/complete")
    _cats_and_dogs(folder / "data")


def make_backbone(folder: Path) -> None:
    """Write random weights of torchvision's ResNet-50 where torch.hub looks for those that it has downloaded.

    Args:
        folder: Value of the variable ``TORCH_HOME``.
    """
    from torchvision.models import ResNet50_Weights, resnet50

    torch.manual_seed(0)
    path = folder / "hub/checkpoints" / Path(ResNet50_Weights.DEFAULT.url).name
    path.parent.mkdir(parents=True)
    torch.save(resnet50().state_dict(), path)


def _models() -> Iterator[tuple[str, PreTrainedModel]]:
    vocabulary = len(_tokenizer())
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    yield "bert-base-cased", BertForSequenceClassification(BertConfig(vocab_size=vocabulary, **sizes))
    for name in ("HuggingFaceTB/SmolLM-360M", "llama"):
        yield name, LlamaForCausalLM(LlamaConfig(vocab_size=vocabulary, pad_token_id=0, eos_token_id=1, **sizes))
    yield (
        "t5",
        T5ForConditionalGeneration(
            T5Config(vocab_size=vocabulary, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2, pad_token_id=0,
                     eos_token_id=1, decoder_start_token_id=0)
        ),
    )  # fmt: skip


def _tokenizer() -> PreTrainedTokenizerFast:
    """A token for each byte."""
    letters = {letter: number + 2 for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = Tokenizer(models.BPE(vocab={"<pad>": 0, "<eos>": 1, **letters}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", model_max_length=128)


def _data() -> Iterator[tuple[str, dict[str, list[dict[str, str | int]]]]]:
    """Folders of data sets, with the rows of each split."""
    pairs = [
        {"sentence1": _sentence(number, 4), "sentence2": _sentence(number + number % 2, 4), "label": number % 2,
         "idx": number}
        for number in range(100)
    ]  # fmt: skip
    yield "nyu-mll/glue", {"train": pairs[:70], "validation": pairs[70:85], "test": pairs[85:]}
    texts: list[dict[str, str | int]] = [{"text": _sentence(number, 8)} for number in range(532)]
    yield "Salesforce/wikitext", {"train": texts[:500], "validation": texts[500:516], "test": texts[516:]}
    yield "texts", {"train": texts[:32], "test": texts[32:48]}
    preferences: list[dict[str, str | int]] = [
        {"prompt": _sentence(number, 3), "chosen": _sentence(number + 1, 4), "rejected": _sentence(number + 5, 3)}
        for number in range(32)
    ]
    yield "preferences", {"train": preferences[:24], "test": preferences[24:]}
    yield "prompts", {"train": [{"prompt": _sentence(number, 3)} for number in range(24)]}
    summaries: list[dict[str, str | int]] = [
        {"document": _sentence(number, 9), "summary": _sentence(number, 3)} for number in range(40)
    ]
    yield "summaries", {"train": summaries[:32], "validation": summaries[32:]}


def _configuration(name: str) -> str:
    """The header of a data set's README that names its files."""
    files = "".join(f"  - split: {split}\n    path: {split}.json\n" for split in ("train", "validation", "test"))
    return f"---\nconfigs:\n- config_name: {name}\n  data_files:\n{files}---\n"


def _write(path: Path, rows: list[dict[str, str | int]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _sentence(number: int, length: int) -> str:
    """Words that follow from a number."""
    return " ".join(_WORDS[(number * 7 + place * (1 + number % 5)) % len(_WORDS)] for place in range(length))


def _digits(folder: Path) -> None:
    """Pictures in the files of Lightning's own copy of MNIST."""
    folder.mkdir(parents=True)
    for name, number in (("training.pt", 5160), ("test.pt", 32)):
        torch.save(
            (torch.randint(0, 256, (number, 28, 28), dtype=torch.uint8), torch.arange(number) % 10), folder / name
        )


def _cats_and_dogs(folder: Path) -> None:
    """The archive of Lightning's example, as if it were downloaded, with pictures of noise."""
    with zipfile.ZipFile(folder / "cats_and_dogs_filtered.zip", "w") as archive:
        for split, number in (("train", 8), ("validation", 4)):
            for kind in ("cats", "dogs"):
                for index in range(number):
                    pixels = torch.randint(0, 256, (32, 32, 3), dtype=torch.uint8)
                    with archive.open(f"cats_and_dogs_filtered/{split}/{kind}/{index}.png", "w") as file:
                        Image.fromarray(pixels.numpy()).save(file, "PNG")
