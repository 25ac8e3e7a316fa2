#include "builds.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>

namespace torchedge {
namespace {

constexpr const char* kOptions = "-cl-std=CL1.2";  // none that loosen arithmetic
constexpr size_t kMostKernels = 16;                // of a program
constexpr int64_t kMaxEntry = int64_t{128} << 20;
// Key and form of an entry are those of torchedge/opencl/binary_caches.py: both sides share a folder.
constexpr std::string_view kMagic = "torchedge opencl binary 2\n";

struct Unit {
  std::string text;
  std::vector<const Kernel*> kernels;
};

/// Kernels with the same text before their `__kernel` share programs: that is far faster than one program each.
std::vector<Unit> units_of(const std::vector<Kernel>& kernels) {
  std::vector<Unit> units;
  std::map<std::string, size_t> open;  // the unit of a preamble that has room
  for (const Kernel& kernel : kernels) {
    size_t mark = kernel.source.find("__kernel");
    size_t line = mark == std::string::npos || mark == 0 ? 0 : kernel.source.rfind('\n', mark) + 1;
    std::string preamble = kernel.source.substr(0, line);
    auto found = open.find(preamble);
    if (found == open.end() || units[found->second].kernels.size() == kMostKernels) {
      found = open.insert_or_assign(preamble, units.size()).first;
      units.push_back({preamble, {}});
    }
    Unit& unit = units[found->second];
    unit.text += kernel.source.substr(line) + "\n";
    unit.kernels.push_back(&kernel);
  }
  return units;
}

std::string key_of(const ClDevice& device, const std::string& source) {
  Sha256 state;
  state.update(kMagic);
  std::array<std::string, 8> parts = {device.name,          device.vendor,           device.version, device.driver,
                                      device.platform_name, device.platform_version, kOptions,       source};
  for (const std::string& part : parts) state.update(bytes_of(part.size()) + part);
  return state.hex();
}

/// The hash that binds an entry to its key.
std::string seal_of(const std::string& key, std::string_view binary) {
  Sha256 state;
  state.update(key + "\n");
  state.update(binary);
  return state.bytes();
}

bool is_private(const std::string& path) {
  struct stat status;
  if (::lstat(path.c_str(), &status) != 0) return false;
  return status.st_uid == ::geteuid() && !S_ISLNK(status.st_mode) && (status.st_mode & (S_IWGRP | S_IWOTH)) == 0;
}

bool make_folders(const std::string& path) {
  for (size_t slash = path.find('/', 1);; slash = path.find('/', slash + 1)) {
    std::string part = path.substr(0, slash);
    if (::mkdir(part.c_str(), 0700) != 0 && errno != EEXIST) return false;
    if (slash == std::string::npos) return true;
  }
}

std::string read_entry(const std::string& folder, const std::string& key) {
  std::string path = folder + "/" + key + ".clbin";
  if (!is_private(folder) || !is_private(path)) return "";
  auto file = File::open(path);
  if (!file.ok()) return "";
  auto data = file.value().read_all(kMaxEntry);
  size_t head = kMagic.size() + 32;
  if (!data.ok() || data.value().size() <= head || data.value().compare(0, kMagic.size(), kMagic) != 0) return "";
  std::string_view binary = std::string_view(data.value()).substr(head);
  return data.value().compare(kMagic.size(), 32, seal_of(key, binary)) == 0 ? std::string(binary) : "";
}

/// Store an entry; a folder that cannot be written stores none.
void write_entry(const std::string& folder, const std::string& key, const std::string& binary) {
  if (binary.empty() || static_cast<int64_t>(binary.size()) > kMaxEntry - 64) return;
  if (!make_folders(folder) || !is_private(folder)) return;
  std::string seal = seal_of(key, binary);
  (void)write_atomically(folder + "/" + key + ".clbin", [&](const Sink& sink) -> Status {
    TE_CHECK(sink(kMagic.data(), kMagic.size()));
    TE_CHECK(sink(seal.data(), seal.size()));
    return sink(binary.data(), binary.size());
  });
}

/// Builds programs of one context; what is not wanted any more is released.
struct Builder {
  const ClLibrary& cl;
  const ClDevice& device;
  cl_context context;

  cl_program from_source(const std::string& source, std::string& log) const {
    const char* text = source.c_str();
    size_t length = source.size();
    cl_int code = 0;
    cl_program program = cl.CreateProgramWithSource(context, 1, &text, &length, &code);
    return built(program, code, log);
  }

  cl_program from_binary(const std::string& binary) const {
    const auto* data = reinterpret_cast<const unsigned char*>(binary.data());
    size_t length = binary.size();
    cl_int status = 0, code = 0;
    std::string log;
    cl_program program = cl.CreateProgramWithBinary(context, 1, &device.handle, &length, &data, &status, &code);
    return built(program, code, log);
  }

  cl_program built(cl_program program, cl_int code, std::string& log) const {
    if (program != nullptr) code = cl.BuildProgram(program, 1, &device.handle, kOptions, nullptr, nullptr);
    if (program != nullptr && code == 0) return program;
    log = error_name(code);
    if (program == nullptr) return nullptr;
    log += ": " + info_text(cl.GetProgramBuildInfo, kBuildLog, program, device.handle);
    for (char& c : log)  // an error is one line
      if (static_cast<unsigned char>(c) < 32) c = ' ';
    log.resize(std::min<size_t>(log.size(), 400));
    cl.ReleaseProgram(program);
    return nullptr;
  }

  std::string binary_of(cl_program program) const {
    size_t size = 0;
    if (cl.GetProgramInfo(program, kBinarySizes, sizeof size, &size, nullptr) != 0 || size == 0 || size > kMaxEntry) return "";
    std::string binary(size, '\0');
    char* data = binary.data();
    return cl.GetProgramInfo(program, kBinaries, sizeof data, &data, nullptr) == 0 ? binary : "";
  }

  Error failed(const Unit& unit, const std::string& log) const {
    for (const Kernel* kernel : unit.kernels) {
      std::string own;
      cl_program program = from_source(kernel->source, own);
      if (program == nullptr) return Error{"kernel " + kernel->name + " does not build: " + own + "; update the driver, or export for this device"};
      cl.ReleaseProgram(program);
    }
    return Error{"kernels build one by one but not together: " + log + "; export the model again"};
  }
};

}  // namespace

Status build_kernels(const ClLibrary& cl, const ClDevice& device, cl_context context, const std::vector<Kernel>& kernels,
                     const torchedge_options& options, Built& built) {
  const std::string cache = given(options.cache);
  Builder builder{cl, device, context};
  std::vector<Unit> units = units_of(kernels);
  // PoCL has a cache of its own, and would compile all kernels once more to return a binary.
  bool cached = !cache.empty() && device.platform_name != "Portable Computing Language";
  auto progress = [&](size_t done) {
    if (options.progress != nullptr) options.progress(options.context, static_cast<int>(done), static_cast<int>(units.size()));
  };
  for (size_t k = 0; k < units.size(); ++k) {
    progress(k);
    const Unit& unit = units[k];
    std::string key = cached ? key_of(device, unit.text) : "", binary = cached ? read_entry(cache, key) : "", log;
    cl_program program = binary.empty() ? nullptr : builder.from_binary(binary);
    if (program != nullptr) {
      ++built.from_cache;
    } else {
      program = builder.from_source(unit.text, log);
      if (program == nullptr) return builder.failed(unit, log);
      if (cached) write_entry(cache, key, builder.binary_of(program));
    }
    built.programs.push_back(program);
    for (const Kernel* kernel : unit.kernels) built.by_kernel[kernel->name] = program;
  }
  progress(units.size());
  return {};
}

}  // namespace torchedge
