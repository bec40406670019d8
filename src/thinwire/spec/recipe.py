"""The recipe: model, data, training loop, optimizer, checkpoints and ranks of a run, and the name of its plan.

Relative paths in a recipe file are relative to that file, so you can move a recipe together with its data.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field

from thinwire.errors import SpecError
from thinwire.spec.base import Bytes, Count, Depth, Flag, Positive, Problem, Seconds, Share, Spec, rule
from thinwire.spec.factor import Factor
from thinwire.spec.io import apply_settings, read_toml_file
from thinwire.spec.machines.topology import TOPOLOGY_SOURCES
from thinwire.spec.models.recipe import ModelRecipe, model_table
from thinwire.spec.plan import Plan, Wire
from thinwire.spec.renames import PLAN_KEYS, hint, to_fields, to_file

__all__ = [
    "BATCH", "MOST_TRACED", "AverageRecipe", "CheckpointRecipe", "ClusterRecipe", "DataRecipe", "LossScaleRecipe",
    "ModelRecipe", "OptimizerRecipe", "Recipe", "TrainRecipe", "model_table", "plan_table",
]  # fmt: skip

_BelowOne = Annotated[float, Field(ge=0, lt=1)]

Paths = tuple[Annotated[str, Field(min_length=1)], ...]

MOST_TRACED = 20
"""Most steps that one trace may cover. A trace records every operation of every step."""


def _step_range(value: Any) -> Any:
    """Parse text such as ``10:13``, or a single step, into the first and the last step."""
    if isinstance(value, list | tuple) and len(value) == 2:
        return value
    match = re.fullmatch(r"(\d+)(?::(\d+))?", str(value))
    if match is None:
        raise SpecError("steps", f'{value!r} is no range of steps: expected "10:13", or a single step')
    return int(match[1]), int(match[2] or match[1])


StepRange = Annotated[tuple[int, int], BeforeValidator(_step_range)]
"""First and last step of a range, both inclusive. Text such as ``"10:13"`` is parsed."""

_FILES = (
    ("data", "paths"),
    ("data", "validation_paths"),
    ("data", "tokenizer"),
    ("data", "cache"),
    ("model", "path"),
    ("model", "config"),
    ("publish", "store"),
    ("plan", "file"),
    ("plan", "topology"),
    ("cluster", "keys"),
)
"""Section and key of every recipe value that is a path or a list of paths."""

_NO_FILES = ("bpe", *TOPOLOGY_SOURCES)
"""Values of these keys that name no file."""


class DataRecipe(Spec):
    """The training text and its tokenization."""

    source: Literal["stdlib", "text", "jsonl", "parquet", "datasets", "tokens"] = Field(
        default="stdlib",
        description="stdlib: the source of this machine's Python standard library; datasets: the output of "
        "save_to_disk of Hugging Face datasets, or other Arrow files; tokens: bins of token ids",
    )
    paths: Paths = Field(default=(), description="files, directories and globs to train on")
    validation_paths: Paths = Field(
        default=(),
        description="files, directories and globs to validate on; default: validation_share of the documents in paths",
    )
    validation_share: Share = Field(
        default=0.05, description="fraction of documents held out for validation, chosen by hash"
    )
    text_key: str = Field(default="text", description="JSON key, or Parquet or Arrow column, that holds the text")
    tokenizer: str = Field(
        default="bpe",
        description='"bpe" to train a tokenizer on this text, or a tokenizer.json, or a directory that holds one; '
        "a tokenizer in the model's directory is the default where there is one",
    )
    vocab: Count | None = Field(
        default=None,
        description="vocabulary size of the tokenizer to train (default: 4096), or of a bin that has no header",
    )
    token_type: Literal["uint16", "uint32"] | None = Field(
        default=None, description="integer type of a bin that has no header"
    )
    max_bytes: Bytes | None = Field(default=None, description='most text to read, for example "64MiB"')
    cache: str | None = Field(
        default=None, description="directory for tokenized text; default: $THINWIRE_CACHE or ~/.cache/thinwire"
    )

    def idle(self) -> dict[str, str]:
        """Keys that change nothing with this source, and why."""
        if self.source == "tokens":
            return dict.fromkeys(("tokenizer", "text_key", "max_bytes"), 'source = "tokens" reads no text')
        idle = {"token_type": 'it is for source = "tokens"'}
        if self.source in ("stdlib", "text"):
            idle["text_key"] = f'source = "{self.source}" has no keys'
        return idle

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
                "validation_share", f"= {self.validation_share} should lie between 0 and 1, or give validation_paths"
            )


class TrainRecipe(Spec):
    """The training loop: number of steps, global batch size, validation and logging."""

    steps: Count = Field(description="optimizer updates")
    seq: Count = Field(default=256, description="tokens per sequence")
    global_batch: Count | None = Field(
        default=None,
        description="sequences per step over all ranks, so that results do not depend on the number of ranks; sets the "
        "plan's micro_batches, and its micro_batch becomes an upper bound; default: the plan's batch",
    )
    seed: Depth = Field(
        default=0,
        description="seed of the initial weights, of the sample order, and of a model's dropout, which also depends on "
        "the division over ranks",
    )
    validate_every: Depth = Field(default=100, description="steps between validations; 0: at the end only")
    validation_samples: Count = Field(default=64, description="sequences per validation; always the same ones")
    log_every: Count = Field(default=1, description="steps between lines of metrics.jsonl")
    on_nonfinite: Literal["stop", "skip"] = Field(
        default="stop", description="action on a NaN or infinite loss or gradient: end the run, or skip the update"
    )
    check_replicas: Depth = Field(
        default=0, description="steps between comparisons of what ranks hold in common, to the last bit; 0: none"
    )
    peak_tflops: Positive | None = Field(
        default=None,
        description="peak TFLOP/s of one device, used for MFU; default: the published peak of a known GPU; without a "
        "peak, MFU is not reported",
    )
    tensorboard: Flag = Field(default=True, description="whether to write TensorBoard events")
    trackers: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        default=(),
        description='other trackers that get the metrics, for example ["wandb", "mlflow"]: wandb, mlflow, trackio, and '
        "those of other packages; their own environment variables configure them",
    )
    trace_steps: StepRange | None = Field(
        default=None, description='steps to trace, for example "10:13" for steps 10 to 13; default: none'
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


class OptimizerRecipe(Spec):
    """AdamW with linear warm-up and cosine decay. Weight decay skips norms, biases and other vectors."""

    lr: Positive = Field(default=3e-4, description="peak learning rate")
    warmup: Depth = Field(default=0, description="steps of linear warm-up")
    final_lr_share: Share = Field(default=0.1, description="learning rate of the last step, as a fraction of the peak")
    betas: tuple[_BelowOne, _BelowOne] = Field(
        default=(0.9, 0.95), description="decay rates of the moments, each below 1"
    )
    eps: Positive = Field(default=1e-8, description="constant added to the square root of the second moment")
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(
        default=0.1, description="decoupled weight decay of matrices"
    )
    clip: Annotated[float, Field(ge=0)] = Field(
        default=1.0, description="largest gradient norm; larger gradients are scaled down; 0: no clipping"
    )


class AverageRecipe(Spec):
    """An exponential average of the weights, updated after each step. Validations and ``thinwire export`` use it, and
    checkpoints hold it. It takes 4 bytes for each parameter that a rank updates."""

    decay: _BelowOne | None = Field(
        default=None, description="what a step keeps of the average, below 1, for example 0.999; default: no average"
    )


class LossScaleRecipe(Spec):
    """The loss scale of a plan with float16 gradients; other plans have none. It follows the gradients as that of
    ``torch.amp.GradScaler`` does. With ``growth = 1`` and ``backoff = 1``, it is constant."""

    initial: Positive = Field(default=65536.0, description="scale of the first step")
    growth: Annotated[float, Field(strict=True, ge=1, allow_inf_nan=False)] = Field(
        default=2.0, description="factor by which the scale grows"
    )
    growth_interval: Count = Field(default=2000, description="finite steps in a row after which the scale grows")
    backoff: Annotated[float, Field(strict=True, gt=0, le=1)] = Field(
        default=0.5, description="factor by which the scale shrinks after a skipped step, whose gradient overflowed"
    )
    floor: Positive = Field(
        default=1.0, description="smallest scale; a gradient that is not finite with this scale ends the run"
    )

    @rule("initial", "floor")
    def _initial_is_above_the_floor(self) -> Iterator[Problem]:
        if self.initial < self.floor:
            yield Problem("initial", f"= {self.initial:g} should be at least floor = {self.floor:g}")


class CheckpointRecipe(Spec):
    """When to save and how many checkpoints to keep."""

    every: Depth = Field(default=0, description="steps between checkpoints; 0: at the end only")
    keep: Count = Field(default=2, description="number of newest checkpoints to keep on disk")
    background: Flag = Field(
        default=True,
        description="whether training goes on while a checkpoint is written, from a copy of the state in host memory; "
        "false: training waits, without a copy",
    )
    timeout: Seconds = Field(
        default=3600.0,
        gt=0,
        description='longest time that a checkpoint may take, for example "10min"; a file system that hangs then fails '
        "the checkpoint",
    )
    on_failure: Literal["stop", "continue"] = Field(
        default="stop",
        description="action if a checkpoint cannot be written: end the run, or warn and try again at the next "
        "checkpoint; the run fails if its last checkpoint cannot be written",
    )


class PublishRecipe(Spec):
    """Versions of the weights for generators elsewhere, which ``thinwire follow`` takes."""

    store: Annotated[str, Field(min_length=1)] | None = Field(
        default=None, description="directory or URL that versions are written to; default: none are"
    )
    every: Count = Field(default=1, description="steps from one version to the next")


class ClusterRecipe(Spec):
    """The ranks that ``thinwire train`` starts. Under torchrun or SLURM the launcher sets their number."""

    nodes: Count | None = Field(
        default=None, description="nodes of the mesh; logical nodes if all ranks are on one machine"
    )
    nproc: Count | None = Field(default=None, description="ranks per node")
    without_gpu: Factor = Field(
        default=Factor(), description="ranks to start on a machine without a GPU if nodes and nproc are unset"
    )
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="device that holds the model")
    timeout: Seconds = Field(
        default=600.0, ge=1, description='longest wait in a collective, at least a second, for example "10min"'
    )
    max_restarts: Depth = Field(default=3, description="most restarts from the last checkpoint after a lost rank")
    elastic: Flag = Field(
        default=False,
        description="whether a run may continue with a different number of ranks; the kind of plan and the global "
        "batch stay the same",
    )
    keys: str | None = Field(
        default=None,
        description="directory of keys made by thinwire keys, the same on every host: what ranks of different hosts "
        "exchange over gloo is encrypted, and nobody without the keys can join; default: $THINWIRE_KEYS",
    )
    island: Depth | None = Field(
        default=None, description="plans with islands.elastic: number of the island that this job is, from 0"
    )
    lighthouse: Annotated[str, Field(min_length=1)] | None = Field(
        default=None, description="plans with islands.elastic: HOST:PORT where `thinwire lighthouse` listens"
    )


_DEFAULT_PLAN = "zero1-node"

BATCH: Final = ("micro_batch", "micro_batches", "recompute")
"""Keys of the plan's table that another plan on the command line does not replace."""


def plan_table(value: Any) -> Any:
    """Expand a plan's shorthand into a table.

    Args:
        value: A preset's name (``zero1-node`` or ``preset:zero1-node``), a ``.toml`` file, or a table. A table
            may name ``preset`` or ``file`` in addition to the plan's own keys and set ``compute_dtype = "auto"``.

    Returns:
        A table with ``preset`` or ``file``, and keys as a plan's fields are named; a value that is neither text nor a
        table is returned unchanged.
    """
    if isinstance(value, Mapping):
        fields = {**Plan.renewed(to_fields(value, PLAN_KEYS))}
        wire = fields.get("wire")
        # A former gain by itself says nothing until it meets the plan that it changes.
        if isinstance(wire, Mapping) and ("error_feedback" in wire or "feedback_gain" not in wire):
            fields["wire"] = {**Wire.renewed(wire)}
        return fields
    if not isinstance(value, str):
        return value
    if value.startswith("preset:"):
        return {"preset": value.removeprefix("preset:")}
    return {"file": value} if value.endswith(".toml") or "/" in value else {"preset": value}


class Recipe(Spec):
    """A training run: its plan, model, data, optimizer, checkpoints and ranks."""

    plan: Annotated[dict[str, Any], BeforeValidator(plan_table)] = Field(
        default=plan_table(_DEFAULT_PLAN),
        description="a preset's name, a plan file, or a table with preset or file and the plan's keys to change",
    )
    model: ModelRecipe = Field(description="model to build")
    data: DataRecipe = Field(default=DataRecipe(), description="text to train on")
    train: TrainRecipe = Field(description="steps, batch size, validation and logging")
    optimizer: OptimizerRecipe = Field(default=OptimizerRecipe(), description="AdamW and its learning rate schedule")
    average: AverageRecipe = Field(default=AverageRecipe(), description="average of the weights")
    loss_scale: LossScaleRecipe = Field(default=LossScaleRecipe(), description="loss scale of plans with float16")
    checkpoint: CheckpointRecipe = Field(default=CheckpointRecipe(), description="when to save checkpoints")
    publish: PublishRecipe = Field(default=PublishRecipe(), description="where to publish weights while they train")
    cluster: ClusterRecipe = Field(default=ClusterRecipe(), description="ranks to start")

    @classmethod
    def read(
        cls, path: str | Path, settings: Sequence[str] = (), *, plan: str | None = None, model: str | None = None
    ) -> Recipe:
        """Read a recipe file and change it from the command line.

        Args:
            path: TOML file.
            settings: Changes, each ``dotted.key=value``; ``plan.*`` changes keys of the plan.
            plan: Preset or plan file that replaces the recipe's plan.
            model: Hugging Face model directory or ``config.json`` that replaces the recipe's model.

        Returns:
            The recipe, with absolute paths.

        Raises:
            SpecError: The recipe is invalid, or a key of its model or data has no effect; the error lists every
                problem.
        """
        table = read_toml_file(path)
        named = table.get("plan")
        old = {f"train.{key}": f"plan.{key}" for key in _former_batch(table)}
        if isinstance(named, Mapping):
            old |= {f"plan.{key}": f"plan.{new}" for key, new in Plan.old_spellings(named).items()}
        hint(str(path), old)
        table = _absolute(cls.prepare(table), Path(path).resolve().parent)
        whole = [setting for setting in settings if setting.partition("=")[0].strip() == "plan"]
        named = apply_settings({}, whole).get("plan", plan)
        if isinstance(named, str):  # --set plan=NAME is --plan NAME
            settings = [setting for setting in settings if setting not in whole]
            table["plan"] = _instead(table.get("plan"), named)
        if model is not None:
            table["model"] = model_table(model)
        # Expand the shorthand first, so that settings can change single keys of the plan.
        table["plan"] = plan_table(table.get("plan", _DEFAULT_PLAN))
        table = apply_settings(table, _present(settings))
        recipe = cls.parse(_with_tokenizer(_absolute(table, Path.cwd())), str(path))
        # Not a rule of the type: the recipes that older runs have written can be read still.
        if problems := [*_idle("model", recipe.model), *_idle("data", recipe.data)]:
            raise SpecError(str(path), problems)
        return recipe

    @classmethod
    def prepare(cls, data: Mapping[str, Any]) -> Mapping[str, Any]:
        """Batch and recomputation were keys of ``train`` before release 0.3, and took precedence over the plan's."""
        batch = _former_batch(data)
        plan = plan_table(data.get("plan", _DEFAULT_PLAN))
        if not batch or not isinstance(plan, Mapping):
            return data
        train = {key: value for key, value in data["train"].items() if key not in batch}
        given = {key: value for key, value in batch.items() if value is not None}
        return {**data, "train": train, "plan": {**plan, **given}}

    def to_file(self, *, full: bool = True) -> dict[str, Any]:
        """Plain dictionaries with the keys of files, those of the plan among them."""
        table = super().to_file(full=full)
        return table | ({"plan": to_file(table["plan"], PLAN_KEYS)} if "plan" in table else {})

    @rule("plan", "train")
    def _one_batch_size(self) -> Iterator[Problem]:
        batch, sequences = self.plan.get("micro_batches"), self.train.global_batch
        # A whole plan has every key, and the global batch takes precedence.
        if batch is not None and sequences is not None and "mesh" not in self.plan:
            yield Problem(
                "train.global_batch", f"= {sequences} already sets plan.micro_batches = {batch}; leave one out"
            )

    @rule("model", "data")
    def _trained_weights_keep_their_tokenizer(self) -> Iterator[Problem]:
        if self.model.starts_from_files and self.data.source != "tokens" and self.data.tokenizer == "bpe":
            yield Problem(
                "data.tokenizer",
                f'= "bpe" trains a new one, but the weights in model.path = {self.model.path} know the ids of theirs; '
                'set it to a directory with that tokenizer.json, or model.weights = "random"',
            )


def _idle(section: str, of: ModelRecipe | DataRecipe) -> list[str]:
    """What is wrong with a section whose keys have no effect, one sentence for each key that is set."""
    return [
        f"{section}.{key} = {value!r} has no effect: {why}; leave it out"
        for key, why in of.idle().items()
        if (value := getattr(of, key)) != type(of).model_fields[key].default
    ]


def _former_batch(table: Mapping[str, Any]) -> dict[str, Any]:
    train = table.get("train")
    return {key: train[key] for key in BATCH if key in train} if isinstance(train, Mapping) else {}


def _present(settings: Sequence[str]) -> list[str]:
    """Settings with present keys. Former ones come first: where both are given, the present one counts."""
    former = {f"train.{key}": f"plan.{key}" for key in BATCH}
    keys = [setting.partition("=")[0].strip() for setting in settings]
    hint("--set", {key: former[key] for key in keys if key in former})
    renamed = [one.replace(key, former[key], 1) for key, one in zip(keys, settings, strict=True) if key in former]
    return renamed + [one for key, one in zip(keys, settings, strict=True) if key not in former]


def _instead(old: Any, plan: str) -> dict[str, Any]:
    """The table of a plan from the command line, with the batch of the recipe's own."""
    before = plan_table(old)
    kept = {key: before[key] for key in BATCH if key in before} if isinstance(before, Mapping) else {}
    named = plan_table(plan)
    return {**named, **kept}


def _with_tokenizer(table: dict[str, Any]) -> dict[str, Any]:
    """Fill in the tokenizer of the model's directory if the recipe names none."""
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
    """Make the file names in a recipe's table absolute. Values that are not text are left for validation to reject."""

    def fix(value: Any) -> Any:
        if isinstance(value, str) and value not in _NO_FILES and "://" not in value:
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
