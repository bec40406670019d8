"""pytest plug-in (``-p native_module``): the tests of this process use another build of the native codecs.

``THINWIRE_NATIVE_MODULE`` is the path of that build. It is loaded under the module's own name as this file is imported,
which is before any test or ``conftest.py`` imports that name.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys

_NAME = "thinwire.codecs.cpp._native"

assert _NAME not in sys.modules
_spec = importlib.util.spec_from_loader(
    _NAME, importlib.machinery.ExtensionFileLoader(_NAME, os.environ["THINWIRE_NATIVE_MODULE"])
)
assert _spec is not None
assert _spec.loader is not None
sys.modules[_NAME] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(sys.modules[_NAME])
