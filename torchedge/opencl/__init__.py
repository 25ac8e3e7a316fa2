"""OpenCL devices: the only room that imports pyopencl."""

from torchedge.opencl.choosing import choose_device
from torchedge.opencl.compiling import compile_kernels
from torchedge.opencl.contexts import DeviceContext, open_context
from torchedge.opencl.platforms import ClDevice, list_opencl_devices

__all__ = [
    "ClDevice",
    "DeviceContext",
    "choose_device",
    "compile_kernels",
    "list_opencl_devices",
    "open_context",
]
