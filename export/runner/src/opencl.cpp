#include "opencl.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

namespace torchedge {
namespace {

constexpr const char* kPlaces[] = {
    "libOpenCL.so.1",
    "libOpenCL.so",
    // Android lets a program open these where its manifest names libOpenCL.so; a shell may always.
    "/vendor/lib64/libOpenCL.so",
    "/system/vendor/lib64/libOpenCL.so",
    "/vendor/lib64/egl/libGLES_mali.so",
    "/vendor/lib64/libPVROCL.so",
    "/system/lib64/libOpenCL.so",
};

template <class Info, class Handle>
std::string text_of(Info info, Handle handle, cl_uint key) {
  size_t size = 0;
  if (info(handle, key, 0, nullptr, &size) != 0 || size == 0 || size > (1u << 20)) return "";
  std::string text(size, '\0');
  if (info(handle, key, size, text.data(), nullptr) != 0) return "";
  return text.substr(0, std::strlen(text.c_str()));
}

template <class Value>
Value value_of(const ClLibrary& cl, cl_device device, cl_uint key, Value otherwise) {
  Value value{};
  return cl.GetDeviceInfo(device, key, sizeof value, &value, nullptr) == 0 ? value : otherwise;
}

ClDevice describe(const ClLibrary& cl, cl_platform platform, cl_device handle) {
  ClDevice device{};
  device.platform = platform;
  device.handle = handle;
  auto text = [&](cl_uint key) { return text_of(cl.GetDeviceInfo, handle, key); };
  device.name = text(0x102B);
  device.vendor = text(0x102C);
  device.driver = text(0x102D);
  device.version = text(0x102F);
  device.extensions = text(0x1030);
  device.platform_name = text_of(cl.GetPlatformInfo, platform, 0x0902);
  device.platform_version = text_of(cl.GetPlatformInfo, platform, 0x0901);
  device.type = value_of<cl_ulong>(cl, handle, 0x1000, 0);
  device.memory = value_of<cl_ulong>(cl, handle, 0x101F, 0);
  device.allocation = value_of<cl_ulong>(cl, handle, 0x1010, 0);
  device.local_bytes = value_of<cl_ulong>(cl, handle, 0x1023, 0);
  device.base_alignment = std::max<cl_uint>(value_of<cl_uint>(cl, handle, 0x1019, 8) / 8, 1);
  device.work_group = value_of<size_t>(cl, handle, 0x1004, 1);
  device.compute_units = value_of<cl_uint>(cl, handle, 0x1002, 1);
  device.clock_mhz = value_of<cl_uint>(cl, handle, 0x100C, 0);
  device.unified = value_of<cl_uint>(cl, handle, 0x1035, 0);
  size_t sizes[16] = {1, 1, 1};
  if (cl.GetDeviceInfo(handle, 0x1005, sizeof sizes, sizes, nullptr) == 0) std::copy(sizes, sizes + 3, device.work_item_sizes);
  if (value_of<cl_uint>(cl, handle, 0x1016, 0)) {
    device.image_width = value_of<size_t>(cl, handle, 0x1011, 0);
    device.image_height = value_of<size_t>(cl, handle, 0x1012, 0);
  }
  if (device.image_from_buffer()) device.pitch_alignment = value_of<cl_uint>(cl, handle, 0x104A, 0);
  return device;
}

std::string lower(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(), [](unsigned char c) { return std::tolower(c); });
  return text;
}

}  // namespace

Result<ClLibrary> open_opencl(const std::string& path) {
  std::vector<std::string> places;
  const char* variable = std::getenv("TORCHEDGE_OPENCL");
  if (!path.empty()) {
    places = {path};
  } else if (variable != nullptr && *variable != '\0') {
    places = {variable};
  } else {
    places.assign(std::begin(kPlaces), std::end(kPlaces));
  }
  void* handle = nullptr;
  for (const std::string& place : places)
    if ((handle = dlopen(place.c_str(), RTLD_NOW | RTLD_LOCAL)) != nullptr) break;
  if (handle == nullptr)
    return Error{"no OpenCL library was found at " + places[0] + (places.size() > 1 ? " or the vendors' places" : "") +
                 "; install a driver and its loader (Debian: ocl-icd-libopencl1), or name one in TORCHEDGE_OPENCL"};
  ClLibrary cl{};
  std::string missing;
  auto load = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(handle, name));
    if (function == nullptr) missing = name;
  };
#define TE_LOAD(name) load(cl.name, "cl" #name)
  TE_LOAD(GetPlatformIDs), TE_LOAD(GetPlatformInfo), TE_LOAD(GetDeviceIDs), TE_LOAD(GetDeviceInfo);
  TE_LOAD(CreateContext), TE_LOAD(CreateCommandQueue), TE_LOAD(CreateBuffer), TE_LOAD(CreateSubBuffer);
  TE_LOAD(CreateImage), TE_LOAD(GetSupportedImageFormats), TE_LOAD(CreateProgramWithSource);
  TE_LOAD(CreateProgramWithBinary), TE_LOAD(BuildProgram), TE_LOAD(GetProgramInfo), TE_LOAD(GetProgramBuildInfo);
  TE_LOAD(CreateKernel), TE_LOAD(GetKernelInfo), TE_LOAD(SetKernelArg), TE_LOAD(EnqueueNDRangeKernel);
  TE_LOAD(EnqueueReadBuffer), TE_LOAD(EnqueueWriteBuffer), TE_LOAD(EnqueueReadImage), TE_LOAD(EnqueueWriteImage);
  TE_LOAD(Flush), TE_LOAD(Finish), TE_LOAD(WaitForEvents), TE_LOAD(GetEventProfilingInfo), TE_LOAD(GetKernelWorkGroupInfo), TE_LOAD(ReleaseEvent), TE_LOAD(ReleaseKernel), TE_LOAD(ReleaseProgram), TE_LOAD(ReleaseMemObject);
  TE_LOAD(ReleaseCommandQueue), TE_LOAD(ReleaseContext);
  const std::string needed = missing;
  TE_LOAD(CreateCommandQueueWithProperties), TE_LOAD(NewRecordingQCOM), TE_LOAD(EndRecordingQCOM), TE_LOAD(EnqueueRecordingQCOM), TE_LOAD(ReleaseRecordingQCOM);
#undef TE_LOAD
  missing = needed;
  if (!missing.empty()) return Error{"the OpenCL library has no " + missing + "; expected OpenCL 1.2 or newer: update the driver"};
  return cl;
}

Result<ClDevice> choose_device(const ClLibrary& cl, const std::string& query) {
  cl_uint count = 0;
  std::vector<cl_platform> platforms;
  if (cl.GetPlatformIDs(0, nullptr, &count) == 0 && count > 0) {
    platforms.resize(count);
    if (cl.GetPlatformIDs(count, platforms.data(), nullptr) != 0) platforms.clear();
  }
  std::vector<ClDevice> devices;
  for (cl_platform platform : platforms) {
    constexpr cl_ulong all = 0xFFFFFFFF;
    if (cl.GetDeviceIDs(platform, all, 0, nullptr, &count) != 0 || count == 0) continue;
    std::vector<cl_device> handles(count);
    if (cl.GetDeviceIDs(platform, all, count, handles.data(), nullptr) != 0) continue;
    for (cl_device handle : handles) devices.push_back(describe(cl, platform, handle));
  }
  if (devices.empty()) return Error{"OpenCL has no device; install a driver, or name its library in TORCHEDGE_OPENCL"};
  std::vector<ClDevice> matches;
  std::string names;
  for (const ClDevice& device : devices) {
    names += (names.empty() ? "" : "; ") + device.platform_name + " " + device.name;
    std::string text = device.platform_name + " " + device.name + " " + device.vendor;
    if (lower(text).find(lower(query)) != std::string::npos) matches.push_back(device);
  }
  if (matches.empty() || (matches.size() > 1 && !query.empty()))
    return Error{"device '" + query + "' fits " + (matches.empty() ? "no" : std::to_string(matches.size())) +
                 (matches.size() == 1 ? " device" : " devices") + "; expected a part of one of: " + names};
  for (const ClDevice& device : matches)
    if (device.gpu()) return device;
  return matches[0];
}

std::string error_name(cl_int code) {
  switch (code) {
    case -4: return "CL_MEM_OBJECT_ALLOCATION_FAILURE";
    case -5: return "CL_OUT_OF_RESOURCES";
    case -6: return "CL_OUT_OF_HOST_MEMORY";
    case -11: return "CL_BUILD_PROGRAM_FAILURE";
    case -54: return "CL_INVALID_WORK_GROUP_SIZE";
    case -61: return "CL_INVALID_BUFFER_SIZE";
    default: return "OpenCL error " + std::to_string(code);
  }
}

}  // namespace torchedge
