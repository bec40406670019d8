"""vLLM: the backend ``thinwire`` of its weight transfer, which follows a trainer's weights.

vLLM finds it by itself, as a plug-in of the group ``vllm.general_plugins``: choose it by
``WeightTransferConfig(backend="thinwire")``.
"""

from __future__ import annotations


def register() -> None:
    """Enter the engine in vLLM's factory, in every process of vLLM. Its module is loaded where it is used."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if "thinwire" not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine("thinwire", "thinwire.integrations.vllm_engine", "ThinwireEngine")
