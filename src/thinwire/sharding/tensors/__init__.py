"""Share tensors: parameters, gradients and optimizer states with the whole shape that store one rank's piece."""
