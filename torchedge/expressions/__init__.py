"""What kernels compute, as data: index algebra, scalar expressions and their OpenCL text."""
