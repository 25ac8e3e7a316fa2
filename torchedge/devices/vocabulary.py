"""The words of a `device.toml`: each figure with its unit, each fact, each runtime switch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class FigureRule:
    """Unit, meaning and range of a figure; `whole`: it is a whole number."""

    unit: str
    meaning: str
    whole: bool = False
    low: float = 1e-6
    high: float = 1e9


@dataclass(frozen=True, slots=True)
class FactRule:
    """Meaning of a fact and its allowed words; without words it is true or false."""

    meaning: str
    words: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RuntimeRule:
    """Type and meaning of a runtime switch; `words` lists the texts allowed, none allows any."""

    type: type
    meaning: str
    words: tuple[str, ...] = ()


def _count(meaning: str, low: float = 1, high: float = 1e6) -> FigureRule:
    return FigureRule("1", meaning, whole=True, low=low, high=high)


KNOWN_FIGURES: Mapping[str, FigureRule] = MappingProxyType(
    {
        # memory
        "memory_mib": FigureRule(
            "MiB", "memory of the device; of a unified board, as the system reports it", low=1
        ),
        "usable_memory_mib": FigureRule("MiB", "largest part of it that one training run can use", low=1),
        "context_mib": FigureRule(
            "MiB", "memory of a process beside its tensors: context, libraries, host side", low=0
        ),
        "workspace_mib": FigureRule(
            "MiB", "memory that math libraries (cuBLAS, cuDNN) reserve at first use", low=0
        ),
        # compute
        "peak_fp32_gflops": FigureRule(
            "GFLOP/s", "peak single-precision rate, a multiply-add counted as two"
        ),
        "peak_fp16_gflops": FigureRule("GFLOP/s", "peak half-precision rate outside of matrix units"),
        "peak_fp16_matrix_gflops": FigureRule(
            "GFLOP/s", "peak dense half-precision rate of matrix (tensor) units, sums in single precision"
        ),
        "peak_bf16_matrix_gflops": FigureRule("GFLOP/s", "peak dense bfloat16 rate of matrix (tensor) units"),
        "peak_tf32_gflops": FigureRule(
            "GFLOP/s",
            "peak dense TF32 rate of matrix (tensor) units, which cuDNN takes for float32 convolutions",
        ),
        "clock_mhz": FigureRule("MHz", "highest clock of the compute units"),
        "compute_units": _count("compute units: SMs, shader processors, shader cores, CPU cores"),
        "launch_overhead_us": FigureRule("us", "time of one kernel launch that no other work hides"),
        "eager_operator_us": FigureRule(
            "us",
            "time of the host's thread for one launch of eager PyTorch, where launch_overhead_us is not it",
        ),
        "host_launch_us": FigureRule("us", "time of the host's thread for one launch of a program", low=0),
        "host_transfer_us": FigureRule("us", "time of the host's thread for one streamed transfer", low=0),
        "step_time_ratio": FigureRule(
            "1", "measured training steps over the analytic estimate from the other figures"
        ),
        "inference_time_ratio": FigureRule(
            "1", "measured inference latency over the roofline of its operations alone"
        ),
        # memory rates
        "bandwidth_gb_s": FigureRule(
            "GB/s", "bandwidth of main memory, read and write together (10^9 bytes)"
        ),
        "measured_bandwidth_gb_s": FigureRule("GB/s", "bandwidth that a streaming kernel has reached"),
        "host_to_device_gb_s": FigureRule("GB/s", "copy from host to device memory"),
        "disk_read_gb_s": FigureRule("GB/s", "sequential read from storage to (unified) memory"),
        "unified_to_texture_gb_s": FigureRule(
            "GB/s", "copy from a buffer in unified memory into texture memory"
        ),
        "weight_load_gb_s": FigureRule(
            "GB/s", "a framework's load of weights from storage before inference, parsing included"
        ),
        "weight_transform_gb_s": FigureRule(
            "GB/s", "a framework's transformation of weights into texture layouts before inference"
        ),
        # execution model
        "warp_size": _count("work-items that run in lock-step", high=1024),
        "max_waves": _count("warps that one compute unit keeps in flight", high=4096),
        "max_work_group_size": _count("work-items of one work-group", high=65536),
        "register_bytes": _count("register file of one compute unit, in bytes", high=2**24),
        "local_memory_kib": FigureRule("KiB", "local (shared) memory that one work-group can have"),
        # caches
        "l1_cache_kib": FigureRule("KiB", "first-level data cache of one compute unit"),
        "l2_cache_kib": FigureRule("KiB", "last-level cache of the GPU, or second-level cache of the CPU"),
        "system_cache_kib": FigureRule("KiB", "cache shared with the rest of the chip"),
        "cache_line_bytes": FigureRule("B", "cache line on the buffer path", whole=True, low=1, high=4096),
        # texture path
        "texture_cache_bytes": FigureRule(
            "B", "first-level texture cache of one compute unit", whole=True, low=1
        ),
        "texture_cache_line_bytes": FigureRule("B", "its cache line", whole=True, low=1, high=4096),
        "texture_l1_gb_s": FigureRule("GB/s", "image reads that hit the texture cache"),
        "texture_l2_gb_s": FigureRule("GB/s", "image reads that hit the second level"),
        "texture_l1_latency_ns": FigureRule("ns", "latency of an image read that hits the texture cache"),
        "texture_l2_latency_ns": FigureRule("ns", "latency of an image read that hits the second level"),
        "texture_memory_latency_ns": FigureRule("ns", "latency of an image read from main memory"),
        "buffer_l2_gb_s": FigureRule("GB/s", "buffer reads that hit the second level"),
        "buffer_l2_latency_ns": FigureRule("ns", "latency of a buffer read that hits the second level"),
        "buffer_memory_latency_ns": FigureRule("ns", "latency of a buffer read from main memory"),
        "local_memory_gb_s": FigureRule("GB/s", "reads of local memory, all compute units together"),
        "constant_memory_gb_s": FigureRule("GB/s", "reads of constant memory, all compute units together"),
        # OpenCL limits
        "max_image_width": FigureRule("px", "widest 2-D image", whole=True, low=1, high=2**20),
        "max_image_height": FigureRule("px", "highest 2-D image", whole=True, low=1, high=2**20),
        "max_image_buffer_px": FigureRule(
            "px", "longest 1-D image made from a buffer", whole=True, low=1, high=2**40
        ),
        "image_pitch_alignment_px": FigureRule(
            "px", "row pitch of a 2-D image made from a buffer", whole=True, low=1
        ),
        "image_base_alignment_bytes": FigureRule(
            "B", "base address of an image made from a buffer", whole=True, low=1
        ),
        "max_allocation_mib": FigureRule("MiB", "largest single buffer", low=1),
    }
)
"""Rules by the names of figures. Other names or units, and values out of range, are errors of a profile."""

KNOWN_FACTS: Mapping[str, FactRule] = MappingProxyType(
    {
        "half_arithmetic": FactRule("computes in half precision (cl_khr_fp16 on OpenCL)"),
        "image_from_buffer": FactRule(
            "makes a 2-D image of a buffer without a copy (cl_khr_image2d_from_buffer)"
        ),
        "local_memory": FactRule("where local memory lies", ("on-chip", "global")),
        "slow_fma": FactRule("the OpenCL builtin fma() runs many times slower than x * y + z"),
    }
)
"""Rules by the names of facts."""

RUNTIME_KEYS: Mapping[str, RuntimeRule] = MappingProxyType(
    {
        "pytorch": RuntimeRule(str, "PyTorch version whose behaviour is simulated"),
        "zero_grad": RuntimeRule(
            str, "whether clearing gradients frees them or fills them with zeros", ("set_to_none", "zero")
        ),
        "clamp_keeps": RuntimeRule(
            str, "what in-place relu6 (hardtanh) keeps for backward", ("output", "copy")
        ),
        "sum_in_place": RuntimeRule(bool, "whether gradients that meet are added in place"),
        "foreach": RuntimeRule(bool, "whether an optimizer updates all parameters at once"),
        "backend": RuntimeRule(str, "which library's kernels run", ("cuda", "cpu")),
        "attention": RuntimeRule(str, "what scaled_dot_product_attention runs", ("fused", "math")),
        "winograd_tile": RuntimeRule(
            int, "tile of the Winograd weight gradient whose workspace the allocator holds; 0: none"
        ),
        "blas_workspace_mib": RuntimeRule(
            int, "MiB that the BLAS libraries keep from the allocator once they were used"
        ),
    }
)
"""Rules by the names of runtime switches. The simulation of training memory has a default for each."""
