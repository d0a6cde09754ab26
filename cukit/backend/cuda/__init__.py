"""The CUDA backend: the same names as the NumPy shelf, launching kernels/*.cu."""
