"""What the user says: frozen, validated specifications, TOML in and out. Never imports torch."""

from thinwire.spec.base import Problem, Spec, rule
from thinwire.spec.codec import CodecSpec
from thinwire.spec.codec_plugin import CodecPlugin
from thinwire.spec.factor import Factor
from thinwire.spec.io import apply_settings, read_toml, read_toml_file, write_toml
from thinwire.spec.machines.cluster import ClusterSpec, Links, first_nodes, mean_peak, seen_by
from thinwire.spec.machines.fabric import Fabric, Route
from thinwire.spec.machines.nodes import Failures, Link, NodeGroup, Spot
from thinwire.spec.models.model import ModelSpec
from thinwire.spec.plan import Overlap, Plan, UnitOverride, Wire

__all__ = [
    "ClusterSpec", "CodecPlugin", "CodecSpec", "Fabric", "Factor", "Failures", "Link", "Links", "ModelSpec",
    "NodeGroup", "Overlap", "Plan", "Problem", "Route", "Spec", "Spot", "UnitOverride", "Wire", "apply_settings",
    "first_nodes", "mean_peak", "read_toml", "read_toml_file", "rule", "seen_by", "write_toml",
]  # fmt: skip
