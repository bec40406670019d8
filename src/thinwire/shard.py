"""The name of the runtime's package until version 0.1; ``thinwire.shard`` is a function now and nothing else."""

raise ImportError(
    "thinwire.shard is a function, not a package: import its modules from thinwire.sharding, for example "
    "`from thinwire.sharding.memory.initial import parameters_on_meta`"
)
