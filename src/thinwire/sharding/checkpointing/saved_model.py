"""Reads a checkpoint in a single process, without a job."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from thinwire.checkpoint import store
from thinwire.errors import CheckpointError
from thinwire.sharding.checkpointing.encoded_parameters import EncodedForm
from thinwire.sharding.checkpointing.manifest_values import check_values
from thinwire.sharding.checkpointing.stored_parameters import check_slices, sliced


class SavedModel:
    """Reads the parameters and buffers of a checkpoint one at a time, in a single process without a job.

    Attributes:
        shapes: Shapes of parameters and persistent buffers, by name.
        averaged: Whether the checkpoint holds an average of the weights, which is then read instead of them.

    Raises:
        CheckpointError: The checkpoint is missing, incomplete or corrupt.
    """

    def __init__(self, path: Path) -> None:
        self._opened, self._path = store.open_checkpoint(path), path
        self._manifest = self._opened.manifest
        self._opened.check_files()
        values = self._manifest.values
        check_values(values, f"{path}: corrupt")
        self.averaged = "average" in values
        self.shapes: dict[str, list[int]] = values.get("shapes", {})
        check_slices(self._manifest, self.shapes, path)
        self._cuts: dict[str, list[int]] = values.get("slices", {})

    def read(self, name: str) -> torch.Tensor:
        """Read a whole parameter or buffer, which is in :attr:`shapes`, even if it is stored in slices: on the CPU, in
        fp32; frozen parameters and buffers have their own dtype.

        Raises:
            CheckpointError: The tensor cannot be read, or its length does not match its shape.
        """
        vectors, prefix = self._manifest.vectors, "model"
        if f"buffer/{name}" in vectors:
            prefix = "buffer"
        elif f"average/{name}" in vectors or sliced(f"average/{name}", 0) in vectors:
            prefix = "average"  # which frozen parameters lack
        key, shape = f"{prefix}/{name}", list(self.shapes[name])
        form = EncodedForm.of(self._manifest.values, name, self._path)
        dim, ways = self._cuts.get(name, (0, 1))
        if name not in self._cuts:
            return self._shaped(key, shape, form)
        part = [*shape[:dim], shape[dim] // ways, *shape[dim + 1 :]]
        return torch.cat([self._shaped(sliced(key, index), part, form) for index in range(ways)], dim)

    def _shaped(self, key: str, shape: list[int], form: EncodedForm | None) -> torch.Tensor:
        name = key.partition("/")[2]
        if (key if form is None else f"codes/{name}") in self._manifest.absent:
            raise CheckpointError(
                f"{self._path}: {name} is stored nowhere, as it was saved with frozen='reference'; "
                "take it from the files that the run began with"
            )
        vector = self._opened.vector(key) if form is None else self._decoded(key, math.prod(shape), form)
        if vector.numel() != math.prod(shape):
            raise CheckpointError(f"corrupt: {key} has {vector.numel()} elements, and the shape {shape}")
        return vector.view(shape)

    def _decoded(self, key: str, numel: int, form: EncodedForm) -> torch.Tensor:
        spans = form.spans(numel, 0, numel)
        codes, scales = (self._opened.vector(f"{span.kind}/{key.partition('/')[2]}") for span in spans)
        for span, vector in zip(spans, (codes, scales), strict=True):
            if vector.numel() != span.numel or vector.dtype != span.dtype:
                raise CheckpointError(f"corrupt: the {span.kind} of {key} are {vector.numel()} of {vector.dtype}")
        return form.decode(codes, scales)[:numel]
