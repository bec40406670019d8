"""A declaration that imports torch, which the planner must not."""

import torch
from planted_codecs import plugin

EAGER = plugin("eager", version=torch.__version__)
