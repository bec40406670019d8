"""The model of a recipe."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from thinwire.errors import SpecError
from thinwire.spec.base import Count, Flag, Positive, Problem, Share, rule
from thinwire.spec.models.huggingface import huggingface_shape, read_config
from thinwire.spec.models.model import Dimensions, ModelSpec

_DIMENSIONS = (
    "preset", "layers", "hidden", "heads", "kv_heads", "ffn", "experts", "active_experts", "expert_ffn",
)  # fmt: skip
"""Keys of a model's shape."""

_OF_GPT = ("positions", "rotary_share", "parallel_residual")
"""Keys that only models of kind gpt have."""


class ModelRecipe(Dimensions):
    """The model: a Llama or GPT by dimensions or preset, or a Hugging Face model by path or configuration."""

    preset: str | None = Field(
        default=None, description='a published shape, for example "llama-7b"; other keys of this section override it'
    )
    max_seq: Count | None = Field(default=None, description="longest sequence, in tokens; default: train.seq")
    norm_eps: Positive = Field(default=1e-5, description="epsilon of the normalization layers")
    rope_theta: Positive = Field(default=10_000.0, description="base of the rotary frequencies")
    positions: Literal["rotary", "learned"] = Field(default="rotary", description="position embedding (gpt)")
    rotary_share: Share = Field(default=0.25, description="fraction of each head's channels to rotate (gpt)")
    parallel_residual: Flag = Field(
        default=True, description="whether attention and feed-forward read the same input, as in GPT-NeoX (gpt)"
    )
    path: str | None = Field(default=None, description="directory with config.json and weights (huggingface)")
    weights: Literal["file", "random"] | None = Field(
        default=None,
        description="initial weights: the safetensors files in path, or random values from train.seed; default: "
        "file with path, random with config (huggingface)",
    )
    config: str | dict[str, Any] | None = Field(
        default=None,
        description="a config.json, or a table of its keys including model_type; weights start at random (huggingface)",
    )

    @property
    def source(self) -> str | dict[str, Any] | None:
        """Where a Hugging Face model's configuration is, or the configuration itself."""
        return self.path if self.config is None else self.config

    @cached_property
    def configuration(self) -> dict[str, Any] | None:
        """The configuration of a Hugging Face model, which is read once.

        Raises:
            SpecError: It cannot be read, or ``path`` is a file.
        """
        if self.config is None and self.path is not None and Path(self.path).expanduser().is_file():
            raise SpecError(
                "model.path", f"{self.path} is a file; give the directory that holds it, or set model.config to it"
            )
        return None if self.source is None else read_config(self.source)

    @property
    def starts_from_files(self) -> bool:
        """Whether training starts from weights in files rather than random values."""
        return self.path is not None and self.weights != "random"

    @property
    def family(self) -> str:
        """``kind``, or that of the preset, or ``llama``."""
        preset = self.preset if self.preset in ModelSpec.preset_names() else None
        return self.kind or ("llama" if preset is None else ModelSpec.preset(preset).kind)

    def stated(self) -> ModelRecipe:
        """The same model, with ``kind`` and ``tied_embedding`` also where its preset or a default says them."""
        if self.family == "huggingface":
            return self
        shape = self.shape(vocab=1, seq=1)
        return self.with_(kind=shape.kind, tied_embedding=shape.tied_embedding)

    def idle(self) -> dict[str, str]:
        """Keys that change nothing in this model, and why."""
        if self.family == "huggingface":
            own = ("vocab", "tied_embedding", "max_seq", "norm_eps", "rope_theta", *_OF_GPT)
            return dict.fromkeys(own, 'a model of kind = "huggingface" is what its config.json says')
        idle = {}
        if self.family == "llama":
            idle = dict.fromkeys(_OF_GPT, 'it is for kind = "gpt", and this is kind = "llama"')
        elif self.positions == "learned":
            idle = dict.fromkeys(("rope_theta", "rotary_share"), 'positions = "learned" rotate nothing')
        if self.shape(vocab=1, seq=1).experts is None:
            idle["expert_ffn"] = "there are no experts"
        return idle

    def shape(self, *, vocab: int, seq: int) -> ModelSpec:
        """Resolve the model's dimensions.

        Args:
            vocab: Tokens in the vocabulary, used if the recipe sets none.
            seq: Longest sequence in tokens, used if the recipe sets none.

        Returns:
            The shape.

        Raises:
            SpecError: A dimension is missing or does not divide another, or ``ModelSpec`` cannot describe the
                architecture (an unknown family of mixtures of experts).
        """
        if self.kind == "huggingface":
            assert self.source is not None, "a rule of this type"
            return ModelSpec.parse({**huggingface_shape(self.source), "seq": seq}, "model")
        own = {name: getattr(self, name) for name in Dimensions.model_fields}
        own |= {"vocab": self.vocab or vocab, "seq": self.max_seq or seq}
        given = {key: value for key, value in own.items() if value is not None}
        if self.preset is None:
            return ModelSpec.parse(given, "model")
        return ModelSpec.preset(self.preset, **given)

    @rule(*_DIMENSIONS, "kind", "tied_embedding")
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
        if shape.kind == "gpt" and shape.kv_heads != shape.heads:
            yield Problem("kv_heads", f"= {shape.kv_heads} is not heads = {shape.heads}; gpt has no grouped queries")

    @rule("kind", "path", "weights")
    def _weights_are_somewhere(self) -> Iterator[Problem]:
        if self.weights is not None and self.kind != "huggingface":
            yield Problem("weights", f'is for kind = "huggingface" only; kind = "{self.family}"')
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
            yield Problem(given[0], f'is for kind = "huggingface" only; kind = "{self.family}"')

    @rule(*_DIMENSIONS, "kind")
    def _huggingface_has_its_own_shape(self) -> Iterator[Problem]:
        if self.kind == "huggingface":
            for name in _DIMENSIONS:
                if getattr(self, name) is not None:
                    yield Problem(
                        name, 'has no effect: a model of kind = "huggingface" has the shape that its config.json says'
                    )


def model_table(source: str) -> dict[str, Any]:
    """Expand ``--model`` into a recipe's ``model`` table.

    Args:
        source: A Hugging Face model's directory, with or without weights, or a ``config.json``.

    Returns:
        A table with ``path`` if the directory holds weights, otherwise with ``config``.

    Raises:
        SpecError: ``source`` has no configuration.
    """
    place = Path(source).expanduser()
    if not (place / "config.json" if place.is_dir() else place).is_file():
        raise SpecError(
            "--model", f"{source} is no directory with a config.json, and no such file (nothing is downloaded)"
        )
    # Pickled weights count as weights: a user who has them expects training to start from them, so loading refuses
    # them rather than starting at random.
    weights = place.is_dir() and any([*place.glob("*.safetensors*"), *place.glob("pytorch_model*.bin")])
    return {"kind": "huggingface", ("path" if weights else "config"): str(place.absolute())}
