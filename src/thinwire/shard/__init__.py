"""The sharded runtime.

The package is callable: ``thinwire.shard`` names both this package and the function users call, and importing any
module of it would otherwise hide the function behind the package.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _CallablePackage(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Shard a model: see :func:`thinwire.shard.api.shard`."""
        from thinwire.shard.api import shard

        return shard(*args, **kwargs)


sys.modules[__name__].__class__ = _CallablePackage
