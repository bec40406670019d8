"""What optimizers do to parameters, as far as sharding depends on it."""
