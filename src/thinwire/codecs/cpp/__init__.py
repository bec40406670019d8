"""The codecs on CPU, in C++ from ``csrc/``, with one version of every kernel per instruction set."""
