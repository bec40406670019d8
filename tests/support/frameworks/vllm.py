"""A double of the part of vLLM that an engine of its weight transfer is called by, from the signatures of 0.33.

It stands in where vLLM is not installed, as on machines without a GPU.
"""

from __future__ import annotations

import sys
import tomllib
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from tests.support.paths import ROOT
from torch import nn

__all__ = ["Model", "Worker", "install"]

_BASE = "vllm.distributed.weight_transfer.base"
_FACTORY = "vllm.distributed.weight_transfer.factory"
_RELOAD = "vllm.model_executor.model_loader.reload"


class Model(nn.Module):
    """A model that fuses two tensors of the checkpoint, and takes weights only while it is being reloaded."""

    def __init__(self) -> None:
        super().__init__()
        self.fused = nn.Parameter(torch.zeros(4, 4))
        self.reloading = False

    def load_weights(self, weights: Any) -> set[str]:
        """As models of vLLM: names of the checkpoint, to the parameters here."""
        assert self.reloading
        rows = {"q.weight": slice(0, 2), "k.weight": slice(2, 4)}
        with torch.no_grad():
            for name, value in weights:
                self.fused[rows[name]] = value
        return {"fused"}


class _Engine:
    init_info_cls: type
    update_info_cls: type

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: nn.Module) -> None:
        self.config, self.vllm_config, self.device, self.model = config, vllm_config, device, model
        self.model_config = vllm_config.model_config

    def parse_init_info(self, init_dict: dict[str, Any]) -> Any:
        return self.init_info_cls(**init_dict)

    def parse_update_info(self, update_dict: dict[str, Any]) -> Any:
        return self.update_info_cls(**update_dict)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))  # type: ignore[attr-defined]


class _Factory:
    _registry: dict[str, Any]

    @classmethod
    def register_engine(cls, name: str, module: str, class_name: str) -> None:
        if name in cls._registry:
            raise ValueError(f"Weight transfer engine '{name}' is already registered.")
        cls._registry[name] = lambda: getattr(__import__(module, fromlist=[class_name]), class_name)

    @classmethod
    def create_engine(cls, config: Any, vllm_config: Any, device: torch.device, model: nn.Module) -> Any:
        return cls._registry[config.backend]()(config, vllm_config, device, model)


def _initialize(model: Model) -> None:
    model.reloading = True


def _finalize(model: Model, model_config: Any) -> None:
    del model_config
    model.reloading = False


def install(patch: pytest.MonkeyPatch) -> None:
    """Let ``import vllm...`` find the double."""
    bases = {name: dataclass(type(name, (), {})) for name in ("WeightTransferInitInfo", "WeightTransferUpdateInfo")}
    contents: dict[str, dict[str, Any]] = {
        _BASE: {"WeightTransferEngine": _Engine, **bases},
        _FACTORY: {"WeightTransferEngineFactory": type("WeightTransferEngineFactory", (_Factory,), {"_registry": {}})},
        _RELOAD: {"initialize_layerwise_reload": _initialize, "finalize_layerwise_reload": _finalize},
    }
    for path, content in contents.items():
        parts = path.split(".")
        for number in range(1, len(parts) + 1):
            name = ".".join(parts[:number])
            if name not in sys.modules:
                patch.setitem(sys.modules, name, ModuleType(name))
        for key, value in content.items():
            setattr(sys.modules[path], key, value)
    patch.delitem(sys.modules, "thinwire.integrations.vllm_engine", raising=False)


@dataclass
class Worker:
    """What a worker of vLLM does with its engine."""

    model: nn.Module = field(default_factory=Model)
    engine: Any = None

    def start(self) -> None:
        """Load plug-ins, and make the engine that the configuration names."""
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        plugin = EntryPoint("thinwire", project["entry-points"]["vllm.general_plugins"]["thinwire"], "")
        plugin.load()()
        plugin.load()()  # vLLM may do so twice
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

        config = SimpleNamespace(backend="thinwire")
        vllm_config = SimpleNamespace(model_config=SimpleNamespace(hf_config=None), parallel_config=None)
        self.engine = WeightTransferEngineFactory.create_engine(config, vllm_config, torch.device("cpu"), self.model)

    def update(self, **update_info: Any) -> None:
        """The calls of one update, in vLLM's order."""
        self.engine.start_weight_update()
        self.engine.update_weights(update_info)
        self.engine.finish_weight_update()
