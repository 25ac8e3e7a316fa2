"""From a captured step to a short list of OpenCL kernels over buffers and textures (TMModel, section 5)."""
