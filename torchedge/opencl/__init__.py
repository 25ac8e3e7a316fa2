"""OpenCL devices: the only room that imports pyopencl."""
