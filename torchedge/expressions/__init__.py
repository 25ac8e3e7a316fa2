"""The computations of kernels as data: index algebra, scalar expressions and their OpenCL text."""
