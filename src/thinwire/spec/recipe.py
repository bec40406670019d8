"""The recipe: everything a training run is made of, except the decisions of the plan.

Relative paths in a recipe file are relative to that file, so that a recipe and its data move together.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from thinwire.errors import SpecError
from thinwire.spec.base import Bytes, Count, Depth, Flag, Positive, Problem, Seconds, Share, Spec, rule
from thinwire.spec.factor import Factor
from thinwire.spec.huggingface import huggingface_shape
from thinwire.spec.io import apply_settings, read_toml_file
from thinwire.spec.model import ModelSpec

Paths = tuple[Annotated[str, Field(min_length=1)], ...]

MOST_TRACED = 20
"""Steps that may be traced at once: a trace holds every operation of every one of them."""


def _step_range(value: Any) -> Any:
    """First and last step of text such as ``10:13``, or of a single step."""
    if isinstance(value, list | tuple) and len(value) == 2:
        return value
    match = re.fullmatch(r"(\d+)(?::(\d+))?", str(value))
    if match is None:
        raise SpecError("steps", [f'{value!r} is no range of steps: expected "10:13", or a single step'])
    return int(match[1]), int(match[2] or match[1])


StepRange = Annotated[tuple[int, int], BeforeValidator(_step_range)]
"""The first and the last of some steps, both among them; text such as ``"10:13"`` is understood."""

_FILES = (
    ("data", "paths"),
    ("data", "validation_paths"),
    ("data", "tokenizer"),
    ("data", "cache"),
    ("model", "path"),
    ("model", "config"),
    ("plan", "file"),
)
"""The keys that name files."""


class ModelRecipe(Spec):
    """Which model to build: Llama and GPT by dimensions or preset, Hugging Face by path or configuration."""

    kind: Literal["llama", "gpt", "huggingface"] = Field(default="llama", description="family of the model")
    preset: str | None = Field(
        default=None, description='a published shape, for example "llama-7b"; keys beside it win'
    )
    layers: Count | None = Field(default=None, description="transformer blocks")
    hidden: Count | None = Field(default=None, description="width of the residual stream")
    heads: Count | None = Field(default=None, description="attention heads; they divide hidden")
    kv_heads: Count | None = Field(default=None, description="key and value heads (llama); unset: heads")
    ffn: Count | None = Field(default=None, description="width of the feed-forward network; unset: the kind's custom")
    vocab: Count | None = Field(default=None, description="rows of the embedding; unset: the tokenizer's vocabulary")
    max_seq: Count | None = Field(default=None, description="longest sequence; unset: train.seq")
    tied_embedding: Flag = Field(default=False, description="embedding and head share one weight")
    norm_eps: Positive = Field(default=1e-5, description="epsilon of the norms")
    rope_theta: Positive = Field(default=10_000.0, description="base of the rotary frequencies")
    positions: Literal["rotary", "learned"] = Field(default="rotary", description="position embedding (gpt)")
    rotary_share: Share = Field(default=0.25, description="share of a head's channels that is rotated (gpt)")
    parallel_residual: Flag = Field(
        default=True, description="attention and feed-forward read the same input, as NeoX does (gpt)"
    )
    path: str | None = Field(default=None, description="directory with config.json and weights (huggingface)")
    weights: Literal["file", "random"] | None = Field(
        default=None,
        description="start from the safetensors files in path, or at random from train.seed; unset: path has files, "
        "config has not (huggingface)",
    )
    config: str | dict[str, Any] | None = Field(
        default=None,
        description="a config.json, or its keys with model_type, for fresh weights (huggingface)",
    )

    @property
    def starts_from_files(self) -> bool:
        """Whether training starts from weights in files, not at random."""
        return self.path is not None and self.weights != "random"

    def shape(self, *, vocab: int, seq: int) -> ModelSpec:
        """The dimensions.

        Args:
            vocab: the vocabulary, where this recipe leaves it open.
            seq: the longest sequence, where this recipe leaves it open.

        Returns:
            The shape.

        Raises:
            SpecError: a dimension is missing or does not divide another, or is none of which a ``ModelSpec`` knows
                (mixtures of experts).
        """
        if self.kind == "huggingface":
            source = self.path if self.config is None else self.config
            assert source is not None, "a rule of this type"
            return ModelSpec.parse({**huggingface_shape(source), "seq": self.max_seq or seq}, "model")
        own = {
            "kind": self.kind,
            "layers": self.layers,
            "hidden": self.hidden,
            "heads": self.heads,
            "kv_heads": self.kv_heads,
            "ffn": self.ffn,
            "vocab": self.vocab or vocab,
            "seq": self.max_seq or seq,
            "tied_embedding": self.tied_embedding,
        }
        given = {key: value for key, value in own.items() if value is not None}
        if self.preset is None:
            return ModelSpec.parse(given, "model")
        # A preset's name implies its kind; llama is only this recipe's default.
        if "kind" not in self.model_fields_set:
            del given["kind"]
        return ModelSpec.preset(self.preset, **given)

    @rule("kind", "preset", "layers", "hidden", "heads", "kv_heads", "ffn", "tied_embedding")
    def _dimensions_are_whole(self) -> Iterator[Problem]:
        if self.kind == "huggingface":
            return
        if self.preset is not None and self.preset not in (names := ModelSpec.preset_names()):
            yield Problem("preset", f"= {self.preset!r} is no published shape; valid are {', '.join(names)}")
            return
        try:
            shape = self.shape(vocab=1, seq=1)
        except SpecError as error:
            for problem in error.problems:
                key, _, why = problem.partition(" ")
                yield Problem(key, why)
            return
        if self.positions == "rotary" and shape.head_dim % 2:
            yield Problem(
                "heads", f"= {shape.heads} gives an odd head width {shape.head_dim}; rotary needs an even one"
            )
        if self.kind == "gpt" and shape.kv_heads != shape.heads:
            yield Problem("kv_heads", f"= {shape.kv_heads} is not heads = {shape.heads}; gpt has no grouped queries")

    @rule("kind", "path", "weights")
    def _weights_are_somewhere(self) -> Iterator[Problem]:
        if self.weights is not None and self.kind != "huggingface":
            yield Problem("weights", f'is for kind = "huggingface" only; kind = "{self.kind}"')
        elif self.weights == "file" and self.path is None:
            yield Problem("weights", '= "file" needs path, the directory that holds the files')

    @rule("kind", "path", "config")
    def _huggingface_has_a_source(self) -> Iterator[Problem]:
        given = [name for name in ("path", "config") if getattr(self, name) is not None]
        if self.kind == "huggingface" and len(given) != 1:
            yield Problem(
                "kind", f'= "huggingface" needs either path or config; given: {" and ".join(given) or "none"}'
            )
        if self.kind != "huggingface" and given:
            yield Problem(given[0], f'is for kind = "huggingface" only; kind = "{self.kind}"')

    @rule("kind", "preset", "layers", "hidden", "heads", "kv_heads", "ffn")
    def _huggingface_has_its_own_shape(self) -> Iterator[Problem]:
        if self.kind == "huggingface":
            for name in ("preset", "layers", "hidden", "heads", "kv_heads", "ffn"):
                if getattr(self, name) is not None:
                    yield Problem(
                        name, 'has no effect: a model of kind = "huggingface" has the shape that its config.json says'
                    )


class DataRecipe(Spec):
    """Which text to train on and how it becomes tokens."""

    source: Literal["stdlib", "text", "jsonl", "parquet", "datasets", "tokens"] = Field(
        default="stdlib",
        description="stdlib: this machine's Python standard library; datasets: what save_to_disk of Hugging Face's "
        "datasets wrote, and other Arrow files; tokens: bins that hold token ids",
    )
    paths: Paths = Field(default=(), description="files, directories and globs")
    validation_paths: Paths = Field(
        default=(), description="the same for validation; unset: validation_share of the documents in paths"
    )
    validation_share: Share = Field(default=0.05, description="share of documents kept for validation, by their hash")
    text_key: str = Field(default="text", description="JSON key, or column of Parquet or Arrow, that holds the text")
    tokenizer: str = Field(
        default="bpe",
        description='"bpe" trains one on this text; or a tokenizer.json, or a directory that holds one; unset: that of '
        "the model's directory, if there is one",
    )
    vocab: Count | None = Field(
        default=None, description="ids of the trained tokenizer (4096), or of a bin without header"
    )
    token_type: Literal["uint16", "uint32"] | None = Field(default=None, description="type of a bin without header")
    max_bytes: Bytes | None = Field(default=None, description='read at most this much text, for example "64MiB"')
    cache: str | None = Field(
        default=None, description="directory of tokenized text; unset: $THINWIRE_CACHE or ~/.cache/thinwire"
    )

    @rule("source", "paths")
    def _source_has_paths(self) -> Iterator[Problem]:
        if self.source != "stdlib" and not self.paths:
            yield Problem("paths", f'is empty; source = "{self.source}" reads files, directories or globs')
        if self.source == "stdlib" and self.paths:
            yield Problem(
                "paths",
                'is set, but source = "stdlib" ignores it; set source to text, jsonl, parquet, datasets or tokens',
            )

    @rule("validation_paths", "validation_share")
    def _there_is_validation(self) -> Iterator[Problem]:
        if not self.validation_paths and not 0 < self.validation_share < 1:
            yield Problem(
                "validation_share",
                f"= {self.validation_share} should lie between 0 and 1, or give validation_paths",
            )


class TrainRecipe(Spec):
    """How long and on how much at a time."""

    steps: Count = Field(description="optimizer updates")
    seq: Count = Field(default=256, description="tokens of a sequence")
    micro_batch: Count | None = Field(default=None, description="sequences per rank and micro-batch; unset: the plan's")
    micro_batches: Count | None = Field(default=None, description="micro-batches per step; unset: the plan's")
    global_batch: Count | None = Field(
        default=None,
        description="sequences per step over all ranks, so that any number of ranks trains alike: sets micro_batches, "
        "and micro_batch becomes an upper bound",
    )
    recompute: Flag | None = Field(default=None, description="recompute activations in backward; unset: the plan's")
    seed: Depth = Field(default=0, description="of the initial weights and the order of the samples")
    validate_every: Depth = Field(default=100, description="steps between validations; 0: at the end only")
    validation_samples: Count = Field(default=64, description="sequences of a validation, always the same ones")
    log_every: Count = Field(default=1, description="steps between lines of metrics.jsonl")
    on_nonfinite: Literal["stop", "skip"] = Field(
        default="stop",
        description="what a NaN or infinite loss or gradient does: end the run, or skip the update",
    )
    peak_tflops: Positive | None = Field(
        default=None,
        description="peak TFLOP/s of one device for MFU; unset: known GPUs have theirs, others no MFU",
    )
    tensorboard: Flag = Field(default=True, description="write TensorBoard events")
    trace_steps: StepRange | None = Field(
        default=None, description='steps to trace, "10:13" from the 10th to the 13th; unset: none'
    )

    @rule("steps", "trace_steps")
    def _traced_steps_are_made(self) -> Iterator[Problem]:
        if self.trace_steps is None:
            return
        first, last = self.trace_steps
        if not 1 <= first <= last:
            yield Problem(
                "trace_steps", f'= "{first}:{last}" should go from a step of at least 1 to the same or a later one'
            )
        elif last > self.steps:
            yield Problem("trace_steps", f'= "{first}:{last}" ends after the last step, train.steps = {self.steps}')
        elif last - first >= MOST_TRACED:
            yield Problem(
                "trace_steps", f'= "{first}:{last}" is {last - first + 1} steps; at most {MOST_TRACED} can be traced'
            )

    @rule("micro_batches", "global_batch")
    def _one_batch_size(self) -> Iterator[Problem]:
        if self.micro_batches is not None and self.global_batch is not None:
            yield Problem(
                "global_batch",
                f"= {self.global_batch} already sets micro_batches = {self.micro_batches}; leave one out",
            )


class OptimizerRecipe(Spec):
    """AdamW with warm-up and cosine decay; norms, biases and other vectors are not decayed."""

    lr: Positive = Field(default=3e-4, description="highest learning rate")
    warmup: Depth = Field(default=0, description="steps of linear warm-up")
    final_lr_share: Share = Field(default=0.1, description="learning rate of the last step over the highest")
    betas: tuple[Share, Share] = Field(default=(0.9, 0.95), description="decay rates of the moments")
    eps: Positive = Field(default=1e-8, description="added to the root of the second moment")
    weight_decay: Annotated[float, Field(ge=0)] = Field(default=0.1, description="decoupled weight decay of matrices")
    clip: Annotated[float, Field(ge=0)] = Field(
        default=1.0, description="largest gradient norm, larger gradients are scaled down; 0: no clipping"
    )


class CheckpointRecipe(Spec):
    """When to save and how many checkpoints to keep."""

    every: Depth = Field(default=0, description="steps between checkpoints; 0: at the end only")
    keep: Count = Field(default=2, description="newest checkpoints that stay on disk")
    on_failure: Literal["stop", "continue"] = Field(
        default="stop",
        description="what a checkpoint that cannot be written does: end the run, or say so and try again with the "
        "next; the last one must be written",
    )


class ClusterRecipe(Spec):
    """Ranks to start. torchrun and SLURM decide themselves how many there are."""

    nodes: Count | None = Field(default=None, description="nodes of the mesh; on one machine they are logical")
    nproc: Count | None = Field(default=None, description="ranks of a node")
    without_gpu: Factor = Field(
        default=Factor(), description="ranks on a machine without GPU, where nodes and nproc are unset"
    )
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="where the model lives")
    timeout: Seconds = Field(default=600.0, description='longest wait in a collective, for example "10min"')
    max_restarts: Depth = Field(
        default=3, description="how often a lost rank restarts the run from its last checkpoint"
    )
    elastic: Flag = Field(
        default=False,
        description="go on with the ranks there are, if they are not those of before: same kind of plan, same global "
        "batch",
    )


_DEFAULT_PLAN = "zero1-node"


def plan_table(value: Any) -> Any:
    """The table that a plan's shorthand stands for.

    Args:
        value: a preset's name (``zero1-node`` or ``preset:zero1-node``), a ``.toml`` file, or a table, which
            may name ``preset`` or ``file`` beside the plan's own keys and set ``compute_dtype = "auto"``.

    Returns:
        A table.
    """
    if not isinstance(value, str):
        return value
    if value.startswith("preset:"):
        return {"preset": value.removeprefix("preset:")}
    return {"file": value} if value.endswith(".toml") or "/" in value else {"preset": value}


def model_table(source: str) -> dict[str, Any]:
    """The table that ``--model`` stands for.

    Args:
        source: a Hugging Face model's directory, with weights or without, or a ``config.json``.

    Returns:
        A table: ``path`` where there are weights, else ``config``.

    Raises:
        SpecError: there is no configuration.
    """
    place = Path(source).expanduser()
    if not (place / "config.json" if place.is_dir() else place).is_file():
        raise SpecError(
            "--model", [f"{source} is no directory with a config.json, and no such file (nothing is downloaded)"]
        )
    # Pickled weights, too: refusing them is better than starting at random where somebody expects them.
    weights = place.is_dir() and any([*place.glob("*.safetensors*"), *place.glob("pytorch_model*.bin")])
    return {"kind": "huggingface", ("path" if weights else "config"): str(place.absolute())}


class Recipe(Spec):
    """A training run."""

    plan: Annotated[dict[str, Any], BeforeValidator(plan_table)] = Field(
        default=plan_table(_DEFAULT_PLAN),
        description="a preset's name, a plan file, or a table: preset or file and the plan's keys to change",
    )
    model: ModelRecipe = Field(description="which model to build")
    data: DataRecipe = Field(default=DataRecipe(), description="which text to train on")
    train: TrainRecipe = Field(description="how long and on how much at a time")
    optimizer: OptimizerRecipe = Field(default=OptimizerRecipe(), description="how to update")
    checkpoint: CheckpointRecipe = Field(default=CheckpointRecipe(), description="when to save")
    cluster: ClusterRecipe = Field(default=ClusterRecipe(), description="ranks to start")

    @classmethod
    def read(
        cls,
        path: str | Path,
        settings: Sequence[str] = (),
        *,
        plan: str | None = None,
        model: str | None = None,
    ) -> Recipe:
        """Read a recipe file and change it from the command line.

        Args:
            path: the TOML file.
            settings: ``dotted.key=value`` each; ``plan.*`` changes keys of the plan.
            plan: replaces the recipe's plan: a preset's name or a plan file.
            model: replaces the recipe's model: a Hugging Face model's directory, or its ``config.json``.

        Returns:
            The recipe, with absolute paths.

        Raises:
            SpecError: naming every problem.
        """
        table = _absolute(read_toml_file(path), Path(path).resolve().parent)
        if plan is not None:
            table["plan"] = plan
        if model is not None:
            table["model"] = model_table(model)
        # A table from the start, so that settings can change single keys of it.
        table["plan"] = plan_table(table.get("plan", _DEFAULT_PLAN))
        return cls.parse(_with_tokenizer(_absolute(apply_settings(table, settings), Path.cwd())), str(path))

    @rule("model", "data")
    def _trained_weights_keep_their_tokenizer(self) -> Iterator[Problem]:
        if self.model.starts_from_files and self.data.source != "tokens" and self.data.tokenizer == "bpe":
            yield Problem(
                "data.tokenizer",
                f'= "bpe" trains a new one, but the weights in model.path = {self.model.path} know the ids of theirs; '
                'set it to a directory with that tokenizer.json, or model.weights = "random"',
            )


def _with_tokenizer(table: dict[str, Any]) -> dict[str, Any]:
    """A recipe's table with the tokenizer of its model's directory, where it names none."""
    model, data = table.get("model"), table.setdefault("data", {})
    if not isinstance(model, dict) or not isinstance(data, dict) or model.get("kind") != "huggingface":
        return table
    source = model.get("path") or model.get("config")
    if "tokenizer" in data or data.get("source") == "tokens" or not isinstance(source, str):
        return table
    place = Path(source)
    home = place.parent if place.is_file() else place
    if (home / "tokenizer.json").is_file():
        data["tokenizer"] = str(home)
    return table


def _absolute(table: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """Make the file names in a recipe's table absolute; what is no text is left for validation to refuse."""

    def fix(value: Any) -> Any:
        if isinstance(value, str) and value != "bpe":
            return str(directory / Path(value).expanduser())
        return [fix(item) for item in value] if isinstance(value, list) else value

    result = {key: dict(value) if isinstance(value, Mapping) else value for key, value in table.items()}
    if "plan" in result:
        result["plan"] = plan_table(result["plan"])
    for section, key in _FILES:
        keys = result.get(section)
        if isinstance(keys, dict) and key in keys:
            keys[key] = fix(keys[key])
    return result
