"""The codecs as Triton kernels: CUDA and ROCm, and any device under Triton's interpreter."""
