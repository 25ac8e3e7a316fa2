// torchedge-open DEVICE CACHE: opens the bundles that standard input lists, a folder a line, runs a step of every method
// on a device, and saves and loads the state. It answers "refused" and why, "failed" and why, or "ran". It is built with
// the sanitizers alone, for benchmarks/bundle_mutations.py.
#include <cstdio>
#include <iostream>
#include <nlohmann/json.hpp>

#include "tensors.h"
#include "torchedge.h"

using namespace torchedge;

/// Drivers keep memory to the end; a leak of the runner's own has no frame in them.
extern "C" __attribute__((visibility("default"))) const char* __lsan_default_suppressions() {
  return "leak:libintelocl\nleak:libcommon_clang\nleak:libtbb\nleak:libpocl\nleak:libLLVM\nleak:libOpenCL\nleak:libnvidia\n";
}

namespace {

/// Floats of several sizes; whole numbers from 0 to 3.
std::string drawn(const Json& port) {
  std::string data(port["bytes"].get<size_t>(), '\0');
  const DType dtype = port["dtype"] == "float32" ? DType::float32 : port["dtype"] == "int64" ? DType::int64 : DType::uint8;
  for (size_t k = 0; k < data.size() / size_of(dtype); ++k) put_element(dtype, data.data(), k, is_float(dtype) ? (k * 37 % 61) / 16.0 - 2 : k % 4);
  if (dtype == DType::uint8) std::fill(data.begin(), data.end(), '\0');
  return data;
}

bool step(torchedge_bundle* handle, const Json& method) {
  const std::string name = method["name"];
  for (const Json& port : method["inputs"]) {
    const std::string data = drawn(port), input = port["name"];
    if (torchedge_set_input(handle, name.c_str(), input.c_str(), data.data(), data.size()) != 0) return false;
  }
  if (torchedge_step(handle, name.c_str()) != 0) return false;
  for (const Json& port : method["outputs"]) {
    std::string data(port["bytes"].get<size_t>(), '\0');
    if (torchedge_get_output(handle, port["name"].get<std::string>().c_str(), data.data(), data.size()) != 0) return false;
  }
  return true;
}

std::string run(const std::string& folder, const char* device, const char* cache) {
  torchedge_options options{};
  options.device = device;
  options.cache = cache;
  torchedge_bundle* handle = nullptr;
  const bool opened = torchedge_open(folder.c_str(), &options, &handle) == 0;
  const Json described = Json::parse(torchedge_describe(handle));
  bool right = opened;
  const std::string state = folder + ".state";
  for (int64_t count = opened ? std::min<int64_t>(described["accumulation"].get<int64_t>(), 4) : 0; right && count > 0; --count)
    for (const Json& method : described["methods"]) right = right && step(handle, method);
  right = right && torchedge_save(handle, state.c_str()) == 0 && torchedge_load(handle, state.c_str()) == 0;
  const std::string answer = right ? "ran" : (opened ? "failed " : "refused ") + std::string(torchedge_error(handle));
  torchedge_close(handle);
  std::remove(state.c_str());
  return answer;
}

}  // namespace

int main(int count, char** words) {
  std::string folder;
  while (count == 3 && std::getline(std::cin, folder)) {
    std::printf("%s\n", run(folder, words[1], words[2]).c_str());
    std::fflush(stdout);
  }
  return 0;
}
