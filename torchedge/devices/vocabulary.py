"""The words of a `device.toml`: each figure with its unit, each fact, each runtime switch."""

from __future__ import annotations

import re
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


_FIGURES = """
# memory
memory_mib MiB 1..: memory of the device; of a unified board, as the system reports it
usable_memory_mib MiB 1..: largest part of it that one training run can use
context_mib MiB 0..: memory of a process beside its tensors: context, libraries, host side
workspace_mib MiB 0..: memory that math libraries (cuBLAS, cuDNN) reserve at first use
# compute
peak_fp32_gflops GFLOP/s: peak single-precision rate, a multiply-add counted as two
peak_fp16_gflops GFLOP/s: peak half-precision rate outside of matrix units
peak_fp16_matrix_gflops GFLOP/s: peak dense half-precision rate of matrix (tensor) units, sums in single
    precision
peak_bf16_matrix_gflops GFLOP/s: peak dense bfloat16 rate of matrix (tensor) units
peak_tf32_gflops GFLOP/s: peak dense TF32 rate of matrix (tensor) units, which cuDNN takes for float32
    convolutions
clock_mhz MHz: highest clock of the compute units
power_w W 1..1e+05: power limit of the board (thermal design power)
compute_units 1 whole 1..1e+06: compute units: SMs, shader processors, shader cores, CPU cores
launch_overhead_us us: time of one kernel launch that no other work hides
eager_operator_us us: time of the host's thread for one launch of eager PyTorch, where launch_overhead_us is
    not it
host_launch_us us 0..: time of the host's thread for one launch of a program
host_transfer_us us 0..: time of the host's thread for one streamed transfer
step_time_ratio 1: measured training steps over the analytic estimate from the other figures
inference_time_ratio 1: measured inference latency over the roofline of its operations alone
# rates of memories
bandwidth_gb_s GB/s: bandwidth of main memory, read and write together (10^9 bytes)
measured_bandwidth_gb_s GB/s: bandwidth that a streaming kernel has reached
host_to_device_gb_s GB/s: copy from host to device memory
disk_read_gb_s GB/s: sequential read from storage to (unified) memory
unified_to_texture_gb_s GB/s: copy from a buffer in unified memory into texture memory
weight_load_gb_s GB/s: a framework's load of weights from storage before inference, parsing included
weight_transform_gb_s GB/s: a framework's transformation of weights into texture layouts before inference
# execution model
compute_capability 1 1..99: CUDA's compute capability, 9.0 for Hopper
warp_size 1 whole 1..1024: work-items that run in lock-step
max_waves 1 whole 1..4096: warps that one compute unit keeps in flight
max_work_group_size 1 whole 1..65536: work-items of one work-group
register_bytes 1 whole 1..16777216: register file of one compute unit, in bytes
local_memory_kib KiB: local (shared) memory that one work-group can have
# caches
l1_cache_kib KiB: first-level data cache of one compute unit
l2_cache_kib KiB: last-level cache of the GPU, or second-level cache of the CPU
system_cache_kib KiB: cache shared with the rest of the chip
cache_line_bytes B whole 1..4096: cache line on the buffer path
# texture path
texture_cache_bytes B whole 1..: first-level texture cache of one compute unit
texture_cache_line_bytes B whole 1..4096: its cache line
texture_l1_gb_s GB/s: image reads that hit the texture cache
texture_l2_gb_s GB/s: image reads that hit the second level
texture_l1_latency_ns ns: latency of an image read that hits the texture cache
texture_l2_latency_ns ns: latency of an image read that hits the second level
texture_memory_latency_ns ns: latency of an image read from main memory
buffer_l2_gb_s GB/s: buffer reads that hit the second level
buffer_l2_latency_ns ns: latency of a buffer read that hits the second level
buffer_memory_latency_ns ns: latency of a buffer read from main memory
local_memory_gb_s GB/s: reads of local memory, all compute units together
constant_memory_gb_s GB/s: reads of constant memory, all compute units together
# OpenCL limits
max_image_width px whole 1..1048576: widest 2-D image
max_image_height px whole 1..1048576: highest 2-D image
max_image_buffer_px px whole 1..1099511627776: longest 1-D image made from a buffer
image_pitch_alignment_px px whole 1..: row pitch of a 2-D image made from a buffer
image_base_alignment_bytes B whole 1..: base address of an image made from a buffer
max_allocation_mib MiB 1..: largest single buffer
"""
"""NAME UNIT [whole] [LOW..HIGH]: MEANING, of each figure; 1e-6..1e9 where a bound is omitted."""


def _rules(table: str) -> dict[str, FigureRule]:
    rules = {}
    for line in re.sub(r"\n {4}", " ", table).splitlines():
        if line and not line.startswith("#"):
            head, _, meaning = line.partition(": ")
            name, unit, *limits = head.split()
            low, _, high = (limits[-1] if limits else "..").partition("..")
            whole = "whole" in limits
            rules[name] = FigureRule(unit, meaning, whole, float(low or 1e-6), float(high or 1e9))
    return rules


KNOWN_FIGURES: Mapping[str, FigureRule] = MappingProxyType(_rules(_FIGURES))
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
