"""DDP for fine-tuning callbacks, registered as ``ddp_knows_frozen``."""

from __future__ import annotations

from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry

__all__ = ["KnowsFrozen"]


class KnowsFrozen(DDPStrategy):
    """DDP that also combines the gradients of parameters that are frozen at first; its own trains them apart."""

    def __init__(self) -> None:
        super().__init__(find_unused_parameters=True)

    def configure_ddp(self) -> None:
        """Wrap the module while every parameter can be trained."""
        frozen = [item for item in self.model.parameters() if not item.requires_grad]
        for item in frozen:
            item.requires_grad_(True)
        super().configure_ddp()
        for item in frozen:
            item.requires_grad_(False)


StrategyRegistry.register("ddp_knows_frozen", KnowsFrozen)
