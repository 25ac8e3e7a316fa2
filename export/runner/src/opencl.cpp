#include "opencl.h"

#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <cstdlib>

#include "files.h"

namespace torchedge {
namespace {

constexpr cl_uint kMostDevices = 64;  // of a platform, and as many platforms
constexpr cl_ulong kAnyDevice = 0xFFFFFFFF;
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

ClDevice describe(const ClLibrary& cl, cl_platform platform, cl_device handle) {
  ClDevice device{};
  device.platform = platform;
  device.handle = handle;
  auto text = [&](cl_uint key) { return info_text(cl.GetDeviceInfo, key, handle); };
  auto get = [&](cl_uint key, auto& field) {
    auto value = field;
    if (cl.GetDeviceInfo(handle, key, sizeof value, &value, nullptr) == 0) field = value;
  };
  device.name = text(0x102B);
  device.vendor = text(0x102C);
  device.driver = text(0x102D);
  device.version = text(0x102F);
  device.extensions = text(0x1030);
  device.platform_name = info_text(cl.GetPlatformInfo, 0x0902, platform);
  device.platform_version = info_text(cl.GetPlatformInfo, 0x0901, platform);
  cl_uint align_bits = 8, unified = 0, images = 0;
  std::array<size_t, 16> sizes{1, 1, 1};  // a device may have more than three dimensions
  get(0x1000, device.type);
  get(0x101F, device.memory);
  get(0x1010, device.allocation);
  get(0x1023, device.local_bytes);
  get(0x1019, align_bits);
  get(0x1004, device.work_group);
  get(0x1002, device.compute_units);
  get(0x100C, device.clock_mhz);
  get(0x1035, unified);
  get(0x1016, images);
  get(0x1005, sizes);
  if (images) get(0x1011, device.image_width), get(0x1012, device.image_height);
  if (device.image_from_buffer()) get(0x104A, device.pitch_alignment);
  device.base_alignment = std::max<cl_uint>(align_bits / 8, 1);
  device.unified = unified;
  std::copy_n(sizes.begin(), 3, device.work_item_sizes);
  return device;
}

std::string lower(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(), [](unsigned char c) { return std::tolower(c); });
  return text;
}

}  // namespace

Result<ClLibrary> open_opencl(const std::string& path) {
  const std::string named = path.empty() ? given(std::getenv("TORCHEDGE_OPENCL")) : path;
  std::vector<std::string> places(std::begin(kPlaces), std::end(kPlaces));
  if (!named.empty()) places = {named};
  void* handle = nullptr;
  for (const std::string& place : places)
    if ((handle = dlopen(place.c_str(), RTLD_NOW | RTLD_LOCAL)) != nullptr) break;
  if (handle == nullptr)
    return Error{"no OpenCL library was found at " + places[0] + (places.size() > 1 ? " or the vendors' places" : "") +
                 "; install a driver and its loader (Debian: ocl-icd-libopencl1), or name one in TORCHEDGE_OPENCL"};
  ClLibrary cl(handle);
  if (!cl.missing.empty()) return Error{"the OpenCL library has no " + cl.missing + "; expected OpenCL 1.2 or newer: update the driver"};
  return cl;
}

ClLibrary::Address ClLibrary::find_optional(const char* name) const { return {library ? dlsym(library, name) : nullptr}; }

ClLibrary::Address ClLibrary::find(const char* name) {
  Address address = find_optional(name);
  if (address.address == nullptr) missing = name;
  return address;
}

Result<ClDevice> choose_device(const ClLibrary& cl, const std::string& query) {
  std::vector<ClDevice> devices;
  cl_platform platforms[kMostDevices] = {};
  cl_device handles[kMostDevices] = {};
  cl_uint count = 0, number = 0;
  if (cl.GetPlatformIDs(kMostDevices, platforms, &count) != 0) count = 0;
  for (cl_uint p = 0; p < std::min(count, kMostDevices); ++p) {
    if (cl.GetDeviceIDs(platforms[p], kAnyDevice, kMostDevices, handles, &number) != 0) continue;
    for (cl_uint d = 0; d < std::min(number, kMostDevices); ++d) devices.push_back(describe(cl, platforms[p], handles[d]));
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
