"""OpenCL devices: the only room that imports pyopencl."""

from torchedge.opencl.compiling import compile_kernels
from torchedge.opencl.contexts import DeviceContext, open_context
from torchedge.opencl.platforms import ClDevice, choose_device, list_opencl_devices

__all__ = [
    "ClDevice",
    "DeviceContext",
    "choose_device",
    "compile_kernels",
    "list_opencl_devices",
    "open_context",
]
