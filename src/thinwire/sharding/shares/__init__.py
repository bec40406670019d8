"""Parameters, gradients and optimizer states as a rank holds them: tensors of the whole shape that store one piece."""
