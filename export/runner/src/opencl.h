// OpenCL, opened at run time: a phone has its driver's library, and nothing to link against.
//
// The few types and constants below are those of the OpenCL 1.2 API; its binary interface does not change, so
// that no headers are needed to build.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "result.h"

namespace torchedge {

using cl_int = int32_t;
using cl_uint = uint32_t;
using cl_ulong = uint64_t;
using cl_platform = struct cl_platform_opaque*;
using cl_device = struct cl_device_opaque*;
using cl_context = struct cl_context_opaque*;
using cl_queue = struct cl_queue_opaque*;
using cl_mem = struct cl_mem_opaque*;
using cl_program = struct cl_program_opaque*;
using cl_kernel = struct cl_kernel_opaque*;
using cl_event = struct cl_event_opaque*;
using cl_recording = struct cl_recording_opaque*;
using cl_property = intptr_t;

struct ClImageFormat {
  cl_uint order, type;
};
struct ClImageDescriptor {
  cl_uint type;
  size_t width, height, depth, array_size, row_pitch, slice_pitch;
  cl_uint mip_levels, samples;
  cl_mem buffer;
};

/// The functions of the library, by their names without `cl`.
struct ClLibrary {
  // clang-format off
  cl_int (*GetPlatformIDs)(cl_uint, cl_platform*, cl_uint*);
  cl_int (*GetPlatformInfo)(cl_platform, cl_uint, size_t, void*, size_t*);
  cl_int (*GetDeviceIDs)(cl_platform, cl_ulong, cl_uint, cl_device*, cl_uint*);
  cl_int (*GetDeviceInfo)(cl_device, cl_uint, size_t, void*, size_t*);
  cl_context (*CreateContext)(const cl_property*, cl_uint, const cl_device*, void*, void*, cl_int*);
  cl_queue (*CreateCommandQueue)(cl_context, cl_device, cl_ulong, cl_int*);
  cl_mem (*CreateBuffer)(cl_context, cl_ulong, size_t, void*, cl_int*);
  cl_mem (*CreateSubBuffer)(cl_mem, cl_ulong, cl_uint, const void*, cl_int*);
  cl_mem (*CreateImage)(cl_context, cl_ulong, const ClImageFormat*, const ClImageDescriptor*, void*, cl_int*);
  cl_int (*GetSupportedImageFormats)(cl_context, cl_ulong, cl_uint, cl_uint, ClImageFormat*, cl_uint*);
  cl_program (*CreateProgramWithSource)(cl_context, cl_uint, const char**, const size_t*, cl_int*);
  cl_program (*CreateProgramWithBinary)(cl_context, cl_uint, const cl_device*, const size_t*, const unsigned char**, cl_int*, cl_int*);
  cl_int (*BuildProgram)(cl_program, cl_uint, const cl_device*, const char*, void*, void*);
  cl_int (*GetProgramInfo)(cl_program, cl_uint, size_t, void*, size_t*);
  cl_int (*GetProgramBuildInfo)(cl_program, cl_device, cl_uint, size_t, void*, size_t*);
  cl_kernel (*CreateKernel)(cl_program, const char*, cl_int*);
  cl_int (*GetKernelInfo)(cl_kernel, cl_uint, size_t, void*, size_t*);
  cl_int (*SetKernelArg)(cl_kernel, cl_uint, size_t, const void*);
  cl_int (*EnqueueNDRangeKernel)(cl_queue, cl_kernel, cl_uint, const size_t*, const size_t*, const size_t*, cl_uint, const cl_event*, cl_event*);
  cl_int (*EnqueueReadBuffer)(cl_queue, cl_mem, cl_uint, size_t, size_t, void*, cl_uint, const cl_event*, cl_event*);
  cl_int (*EnqueueWriteBuffer)(cl_queue, cl_mem, cl_uint, size_t, size_t, const void*, cl_uint, const cl_event*, cl_event*);
  cl_int (*EnqueueReadImage)(cl_queue, cl_mem, cl_uint, const size_t*, const size_t*, size_t, size_t, void*, cl_uint, const cl_event*, cl_event*);
  cl_int (*EnqueueWriteImage)(cl_queue, cl_mem, cl_uint, const size_t*, const size_t*, size_t, size_t, const void*, cl_uint, const cl_event*, cl_event*);
  cl_int (*Flush)(cl_queue);
  cl_int (*Finish)(cl_queue);
  cl_int (*WaitForEvents)(cl_uint, const cl_event*);
  cl_int (*GetEventProfilingInfo)(cl_event, cl_uint, size_t, void*, size_t*);
  cl_int (*GetKernelWorkGroupInfo)(cl_kernel, cl_device, cl_uint, size_t, void*, size_t*);
  cl_int (*ReleaseEvent)(cl_event);
  cl_int (*ReleaseKernel)(cl_kernel);
  cl_int (*ReleaseProgram)(cl_program);
  cl_int (*ReleaseMemObject)(cl_mem);
  cl_int (*ReleaseCommandQueue)(cl_queue);
  cl_int (*ReleaseContext)(cl_context);
  // Of OpenCL 2.0, and of Qualcomm's extension: null where the library has none.
  cl_queue (*CreateCommandQueueWithProperties)(cl_context, cl_device, const cl_ulong*, cl_int*);
  cl_recording (*NewRecordingQCOM)(cl_queue, cl_int*);
  cl_int (*EndRecordingQCOM)(cl_recording);
  cl_int (*EnqueueRecordingQCOM)(cl_queue, cl_recording, size_t, const void*, size_t, const void*, size_t, const void*, size_t, const void*, cl_uint, const cl_event*, cl_event*);
  cl_int (*ReleaseRecordingQCOM)(cl_recording);
  // clang-format on
};

/// Open the library that `path` names, else the first of $TORCHEDGE_OPENCL, the loader and the vendors' places
/// on Android. It stays open: drivers do not survive being closed.
Result<ClLibrary> open_opencl(const std::string& path);

/// A device and its limits.
struct ClDevice {
  cl_platform platform;
  cl_device handle;
  std::string name, vendor, version, driver, platform_name, platform_version, extensions;
  cl_ulong type = 0, memory = 0, allocation = 0, local_bytes = 0, base_alignment = 1;
  size_t work_group = 1, work_item_sizes[3] = {1, 1, 1}, image_width = 0, image_height = 0;
  cl_uint pitch_alignment = 0, compute_units = 1, clock_mhz = 0;
  bool unified = false;  // memory of its own, or the host's

  bool gpu() const { return type & 4; }
  bool has(const std::string& extension) const { return (" " + extensions + " ").find(" " + extension + " ") != std::string::npos; }
  /// Whether images can be made from buffers; drivers of processors that list it were seen to fail.
  bool image_from_buffer() const { return gpu() && has("cl_khr_image2d_from_buffer"); }
  std::string title() const { return name + " (" + platform_name + ")"; }
};

/// Return the device of which `query` is a part of "PLATFORM DEVICE VENDOR"; empty: the first GPU, else the first.
Result<ClDevice> choose_device(const ClLibrary& cl, const std::string& query);

std::string error_name(cl_int code);

constexpr cl_uint kFalse = 0, kTrue = 1, kRgba = 0x10B5, kFloat = 0x10DE, kHalfFloat = 0x10DD, kImage2d = 0x10F1;
constexpr cl_ulong kReadWrite = 1, kProfiling = 2, kRecordable = 1 << 30;
constexpr cl_uint kRegion = 0x1220, kNumArgs = 0x1191, kBuildLog = 0x1183, kBinarySizes = 0x1165, kBinaries = 0x1166;
constexpr cl_uint kStart = 0x1282, kEnd = 0x1283, kWarp = 0x11B3;

}  // namespace torchedge
