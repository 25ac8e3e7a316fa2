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

/// The functions of a library, by their names without `cl`.
struct ClLibrary {
  explicit ClLibrary(void* library = nullptr) : library(library) {}

  void* library;
  std::string missing;  // a function that it lacks

  // clang-format off
  cl_int (*GetPlatformIDs)(cl_uint, cl_platform*, cl_uint*) = find("clGetPlatformIDs");
  cl_int (*GetPlatformInfo)(cl_platform, cl_uint, size_t, void*, size_t*) = find("clGetPlatformInfo");
  cl_int (*GetDeviceIDs)(cl_platform, cl_ulong, cl_uint, cl_device*, cl_uint*) = find("clGetDeviceIDs");
  cl_int (*GetDeviceInfo)(cl_device, cl_uint, size_t, void*, size_t*) = find("clGetDeviceInfo");
  cl_context (*CreateContext)(const cl_property*, cl_uint, const cl_device*, void*, void*, cl_int*) = find("clCreateContext");
  cl_queue (*CreateCommandQueue)(cl_context, cl_device, cl_ulong, cl_int*) = find("clCreateCommandQueue");
  cl_mem (*CreateBuffer)(cl_context, cl_ulong, size_t, void*, cl_int*) = find("clCreateBuffer");
  cl_mem (*CreateSubBuffer)(cl_mem, cl_ulong, cl_uint, const void*, cl_int*) = find("clCreateSubBuffer");
  cl_mem (*CreateImage)(cl_context, cl_ulong, const ClImageFormat*, const ClImageDescriptor*, void*, cl_int*) = find("clCreateImage");
  cl_program (*CreateProgramWithSource)(cl_context, cl_uint, const char**, const size_t*, cl_int*) = find("clCreateProgramWithSource");
  cl_program (*CreateProgramWithBinary)(cl_context, cl_uint, const cl_device*, const size_t*, const unsigned char**, cl_int*, cl_int*) = find("clCreateProgramWithBinary");
  cl_int (*BuildProgram)(cl_program, cl_uint, const cl_device*, const char*, void*, void*) = find("clBuildProgram");
  cl_int (*GetProgramInfo)(cl_program, cl_uint, size_t, void*, size_t*) = find("clGetProgramInfo");
  cl_int (*GetProgramBuildInfo)(cl_program, cl_device, cl_uint, size_t, void*, size_t*) = find("clGetProgramBuildInfo");
  cl_kernel (*CreateKernel)(cl_program, const char*, cl_int*) = find("clCreateKernel");
  cl_int (*GetKernelInfo)(cl_kernel, cl_uint, size_t, void*, size_t*) = find("clGetKernelInfo");
  cl_int (*SetKernelArg)(cl_kernel, cl_uint, size_t, const void*) = find("clSetKernelArg");
  cl_int (*EnqueueNDRangeKernel)(cl_queue, cl_kernel, cl_uint, const size_t*, const size_t*, const size_t*, cl_uint, const cl_event*, cl_event*) = find("clEnqueueNDRangeKernel");
  cl_int (*EnqueueReadBuffer)(cl_queue, cl_mem, cl_uint, size_t, size_t, void*, cl_uint, const cl_event*, cl_event*) = find("clEnqueueReadBuffer");
  cl_int (*EnqueueWriteBuffer)(cl_queue, cl_mem, cl_uint, size_t, size_t, const void*, cl_uint, const cl_event*, cl_event*) = find("clEnqueueWriteBuffer");
  cl_int (*EnqueueReadImage)(cl_queue, cl_mem, cl_uint, const size_t*, const size_t*, size_t, size_t, void*, cl_uint, const cl_event*, cl_event*) = find("clEnqueueReadImage");
  cl_int (*EnqueueWriteImage)(cl_queue, cl_mem, cl_uint, const size_t*, const size_t*, size_t, size_t, const void*, cl_uint, const cl_event*, cl_event*) = find("clEnqueueWriteImage");
  cl_int (*Flush)(cl_queue) = find("clFlush");
  cl_int (*Finish)(cl_queue) = find("clFinish");
  cl_int (*WaitForEvents)(cl_uint, const cl_event*) = find("clWaitForEvents");
  cl_int (*GetEventProfilingInfo)(cl_event, cl_uint, size_t, void*, size_t*) = find("clGetEventProfilingInfo");
  cl_int (*GetKernelWorkGroupInfo)(cl_kernel, cl_device, cl_uint, size_t, void*, size_t*) = find("clGetKernelWorkGroupInfo");
  cl_int (*ReleaseEvent)(cl_event) = find("clReleaseEvent");
  cl_int (*ReleaseKernel)(cl_kernel) = find("clReleaseKernel");
  cl_int (*ReleaseProgram)(cl_program) = find("clReleaseProgram");
  cl_int (*ReleaseMemObject)(cl_mem) = find("clReleaseMemObject");
  cl_int (*ReleaseCommandQueue)(cl_queue) = find("clReleaseCommandQueue");
  cl_int (*ReleaseContext)(cl_context) = find("clReleaseContext");
  // Of OpenCL 2.0, and of Qualcomm's extension: null where the library has none.
  cl_queue (*CreateCommandQueueWithProperties)(cl_context, cl_device, const cl_ulong*, cl_int*) = find_optional("clCreateCommandQueueWithProperties");
  cl_recording (*NewRecordingQCOM)(cl_queue, cl_int*) = find_optional("clNewRecordingQCOM");
  cl_int (*EndRecordingQCOM)(cl_recording) = find_optional("clEndRecordingQCOM");
  cl_int (*EnqueueRecordingQCOM)(cl_queue, cl_recording, size_t, const void*, size_t, const void*, size_t, const void*, size_t, const void*, cl_uint, const cl_event*, cl_event*) = find_optional("clEnqueueRecordingQCOM");
  cl_int (*ReleaseRecordingQCOM)(cl_recording) = find_optional("clReleaseRecordingQCOM");
  // clang-format on

 private:
  struct Address {
    void* address;
    template <class Function>
    operator Function*() const { return reinterpret_cast<Function*>(address); }
  };
  Address find_optional(const char* name) const;
  Address find(const char* name);
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

/// A text that a function such as clGetDeviceInfo tells of these objects; empty where it tells none.
template <class Info, class... Handles>
std::string info_text(Info info, cl_uint key, Handles... handles) {
  size_t size = 0;
  if (info(handles..., key, 0, nullptr, &size) != 0 || size == 0 || size > (size_t{1} << 24)) return "";
  std::string text(size, '\0');
  if (info(handles..., key, size, text.data(), nullptr) != 0) return "";
  return text.c_str();
}

constexpr cl_uint kFalse = 0, kTrue = 1, kRgba = 0x10B5, kFloat = 0x10DE, kHalfFloat = 0x10DD, kImage2d = 0x10F1;
constexpr cl_ulong kReadWrite = 1, kProfiling = 2, kRecordable = 1 << 30;
constexpr cl_uint kRegion = 0x1220, kNumArgs = 0x1191, kBuildLog = 0x1183, kBinarySizes = 0x1165, kBinaries = 0x1166;
constexpr cl_uint kStart = 0x1282, kEnd = 0x1283, kWarp = 0x11B3;

}  // namespace torchedge
