"""Causal language models of ``transformers`` as thinwire trains them, on one rank or split over several.

The ``base_model_tp_plan`` of a model names a style for each matrix. This module translates them to torch's styles,
whose sums go through the groups of the plan, with their codecs. Tokens are not divided between matrices, because
``transformers`` derives positions from the length of hidden states.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, SequenceParallel

from thinwire.errors import UsageError
from thinwire.train.models.common import CausalOutput, cross_entropy

PREFIX: Final = "model."
"""Of the names that a wrapped model's parameters have here."""

STAGED: Final = (
    "llama", "mistral", "qwen2", "qwen3", "smollm3", "starcoder2", "gemma", "granite", "arcee", "nemotron",
)  # fmt: skip
"""``model_type`` of the models that tests split by ``tp`` and ``pp``. Other models may scale or cap the input or output
of their blocks, which stages in the middle must not do."""

FAMILIES: Final = (*STAGED, "gemma2", "phi", "cohere")
"""``model_type`` of the models that tests split by ``tp``."""

EXPERTS: Final = ("mixtral", "qwen3_moe")
"""``model_type`` of the mixtures of experts that tests share by ``ep``."""

_HEAD_DIM: Final = 2
"""Dimension of the heads in normalised queries and keys, ``(B, T, heads, width)``."""


class HuggingFaceCausal(nn.Module):
    """A ``transformers`` causal language model with our convention for labels and our loss.

    ``transformers`` shifts labels inside the model and makes a float32 copy of all logits; here labels are
    already the next tokens, as everywhere in thinwire, and the loss is
    :func:`~thinwire.train.models.common.cross_entropy`.

    If its family is in :data:`FAMILIES`, it can be split over ranks: a :class:`thinwire.parallel.Divisible`.

    Args:
        model: For example a ``LlamaForCausalLM``; it is changed in place.

    Attributes:
        first: Whether this stage has the embedding.
        last: Whether this stage has the head.
        sequence_ways: Always 1, because tokens are not divided between matrices.
        cuts_sequences: Always ``False``, for the same reason.
    """

    sequence_ways = 1
    cuts_sequences = False

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.first = self.last = True
        config = model.config
        self.balance = float(getattr(config, "router_aux_loss_coef", 0.0) or 0.0)
        self.has_router = bool(getattr(config, "output_router_logits", False))
        # A model that takes images as well may want to know where they are: nowhere.
        takes = inspect.signature(model.forward).parameters
        self.has_token_types = "token_type_ids" in takes and getattr(config, "vision_config", None) is not None

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> CausalOutput | Tensor:
        """Predict the next tokens.

        Inputs are int64 ``(B, T)``, in later stages of a pipeline hidden states ``(B, T, D)``; labels are int64
        ``(B, T)``, the token that follows each input. Returns logits, and with labels the loss, in training including
        a mixture-of-experts' balance loss where the configuration sets ``output_router_logits``; in earlier stages of
        a pipeline hidden states.
        """
        extra = {"token_type_ids": torch.zeros_like(input_ids)} if self.has_token_types else {}
        name = "input_ids" if self.first else "inputs_embeds"
        output = self.model(**{name: input_ids}, use_cache=False, **extra)
        logits: Tensor = output.logits
        if not self.last:
            return logits
        if labels is None:
            return CausalOutput(logits)
        loss = cross_entropy(logits, labels)
        if self.training and self.has_router and output.aux_loss is not None:
            loss = loss + self.balance * output.aux_loss.float()
        return CausalOutput(logits, loss)

    # -- sizes -------------------------------------------------------------------------------------------------

    @property
    def num_blocks(self) -> int:
        return len(self._base.layers)

    @property
    def width(self) -> int:
        """Width of the hidden states, D."""
        return int(self._config.hidden_size)

    @property
    def vocabulary(self) -> int:
        """Size of the vocabulary, V."""
        return int(self._config.vocab_size)

    @property
    def tensor_parallel_sizes(self) -> Mapping[str, int]:
        """Sizes that the number of tensor-parallel ranks must divide, by name."""
        names = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size")
        return {name: int(getattr(self._config, name)) for name in names}

    @property
    def is_tied(self) -> bool:
        """Whether the head shares the embedding's weight."""
        return bool(self._config.tie_word_embeddings)

    @property
    def shares_experts(self) -> bool:
        """Whether the model is of a family whose experts ranks can share."""
        return self._config.model_type in EXPERTS

    def check_divisible(self, *, tp: int, pp: int) -> None:
        """Raise unless the model can be split like this.

        Raises:
            UsageError: The model's family, or its tied embedding, is not supported.
        """
        kind = self._config.model_type
        for key, ways, families in (("tp", tp, FAMILIES), ("pp", pp, STAGED)):
            if ways > 1 and kind not in families:
                raise UsageError(
                    f"{key} = {ways} does not work with model_type = {kind!r}: models of {', '.join(families)} can be "
                    f"split so, and thinwire's own (kind = 'llama' or 'gpt'); use {key} = 1"
                )
        if tp > 1 and self.is_tied and not self._cuts_embedding:
            embedding = self._embedding
            raise UsageError(
                f"tp = {tp} does not work with tie_word_embeddings and {type(embedding).__name__} with pad_token_id "
                f"= {embedding.padding_idx}: the head is split by vocabulary, and this embedding is not. Set "
                "pad_token_id to null if the embedding is an Embedding, or tie_word_embeddings to false, or use tp = 1"
            )

    # -- splitting ---------------------------------------------------------------------------------------------

    def tensor_parallel_styles(self, *, sequence: bool) -> dict[str, ParallelStyle]:
        """torch's style of each module of this stage, by name."""
        assert not sequence
        styles: dict[str, ParallelStyle] = {}
        shared = set()
        for pattern, style in self._config.base_model_tp_plan.items():
            name = f"{PREFIX}{self.model.base_model_prefix}.{pattern}"
            styles[name] = _style(style)
            if style == "colwise":
                shared.add(name.rpartition(".")[0])
        # All matrices read one DTensor, so that their gradients are added up before they are sent.
        styles |= {name: _SharedInput() for name in shared}
        if self.first and self._cuts_embedding:
            styles[f"{PREFIX}{self.model.base_model_prefix}.embed_tokens"] = RowwiseParallel(
                input_layouts=Replicate(), output_layouts=Replicate()
            )
        if self.last:
            styles[f"{PREFIX}lm_head"] = ColwiseParallel(output_layouts=Shard(-1))
        return styles

    def tie(self) -> None:
        """Share the embedding's weight with the head, if they are tied."""
        if self.is_tied and self.first and self.last:
            self.model.lm_head.weight = self._embedding.weight

    def keep(self, blocks: range, *, first: bool, last: bool) -> None:
        """Keep one stage of a pipeline. Blocks keep their names."""
        base = self._base
        kept = nn.ModuleList()
        for index in blocks:
            kept.add_module(str(index), base.layers[index])
        base.layers = kept
        base.config = copy.deepcopy(base.config)  # the forward reads each block's kind of attention from it
        if getattr(base.config, "layer_types", None) is not None:
            base.config.layer_types = base.config.layer_types[blocks.start : blocks.stop]
        base.config.num_hidden_layers = len(blocks)
        if not first:
            base.embed_tokens = None
        if not last:
            base.norm = nn.Identity()
            self.model.lm_head = nn.Identity()
        self.first, self.last = first, last

    @property
    def _config(self) -> Any:
        return self.model.config

    @property
    def _base(self) -> Any:
        return getattr(self.model, self.model.base_model_prefix)

    @property
    def _cuts_embedding(self) -> bool:
        """Whether the embedding is split by vocabulary: only if it just looks up, and has no padding token."""
        return type(self._embedding) is nn.Embedding and self._embedding.padding_idx is None

    @property
    def _embedding(self) -> nn.Embedding:
        embedding: nn.Embedding = self._base.embed_tokens
        return embedding


class _SharedInput(ParallelStyle):
    """Converts hidden states to one DTensor for all matrices of a module."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def share(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if args:
                return (_replicated(args[0], device_mesh), *args[1:]), kwargs
            return args, kwargs | {"hidden_states": _replicated(kwargs["hidden_states"], device_mesh)}

        module.register_forward_pre_hook(share, with_kwargs=True)
        return module


def _replicated(tensor: Tensor, mesh: DeviceMesh) -> DTensor:
    return DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)


def _style(name: str) -> ParallelStyle:
    """torch's style for a style of ``transformers``."""
    if name == "colwise":
        return ColwiseParallel()
    if name == "rowwise":
        return RowwiseParallel(output_layouts=Replicate())
    if name == "replicated_with_grad_allreduce":  # norms of queries and keys, of which each rank has its heads
        return SequenceParallel(sequence_dim=_HEAD_DIM, use_local_output=True)
    raise UsageError(f"a tensor-parallel style of transformers, {name!r}, is not supported; use tp = 1")
