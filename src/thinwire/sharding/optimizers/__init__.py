"""Properties of optimizers that sharding depends on."""
