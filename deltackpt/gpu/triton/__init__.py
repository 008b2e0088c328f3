"""The kernels, in Triton."""
