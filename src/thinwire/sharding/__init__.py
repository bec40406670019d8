"""The sharded runtime: parameters, gradients and optimizer states of a model, cut as a plan says."""
