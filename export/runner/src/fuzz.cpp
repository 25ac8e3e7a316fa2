// A libFuzzer target: one file of a bundle is replaced, every digest computed anew, and the bundle opened. The first
// byte of an input chooses the file, in the order of their names; the others are its content. It needs no OpenCL.
// $TORCHEDGE_FUZZ_BUNDLE: the bundle's folder, which is written to, so that each process has one of its own.
#include <cstdio>
#include <cstdlib>
#include <nlohmann/json.hpp>

#include "bundle.h"

using namespace torchedge;

namespace {

std::string folder;
std::map<std::string, std::string> files;  // all but the manifest
std::vector<std::string> names;
Json manifest;

void put(const std::string& name, const std::string& content) {
  FILE* file = std::fopen((folder + "/" + name).c_str(), "wb");
  if (file == nullptr || std::fwrite(content.data(), 1, content.size(), file) != content.size()) std::abort();
  std::fclose(file);
}

/// Write a manifest with its own SHA-256, as `write_manifest` of Python does.
void put_manifest(Json document) {
  document.erase("sha256");
  document["sha256"] = sha256_of(canonical(document));
  put("manifest.json", document.dump(-1, ' ', false, Json::error_handler_t::replace));
}

}  // namespace

extern "C" int LLVMFuzzerInitialize(int*, char***) {
  const char* variable = std::getenv("TORCHEDGE_FUZZ_BUNDLE");
  if (variable == nullptr) return std::fputs("set TORCHEDGE_FUZZ_BUNDLE to a bundle that may be written to\n", stderr), std::exit(2), 0;
  folder = variable;
  auto opened = File::folder(folder);
  auto read = [&](const std::string& name) { return opened.value().below(name).value().read_all(1 << 26).value(); };
  manifest = Json::parse(read("manifest.json"));
  for (const auto& [name, entry] : manifest["files"].items()) files[name] = read(name);
  names.emplace_back("manifest.json");
  for (const auto& [name, content] : files) names.push_back(name);
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return -1;
  const std::string& name = names[data[0] % names.size()];
  const std::string content(reinterpret_cast<const char*>(data) + 1, size - 1);
  if (name == "manifest.json") {
    // What `Document` refuses, such as a thousand levels, stays as it is.
    bool object = Document::parse(name, content).ok();
    object ? put_manifest(Json::parse(content)) : put(name, content);
  } else {
    put(name, content);
    Json changed = manifest;
    changed["files"][name] = {{"sha256", sha256_of(content)}, {"bytes", content.size()}};
    put_manifest(std::move(changed));
  }
  auto bundle = open_bundle(folder, "");
  if (bundle.ok()) (void)bundle.value().read_weights([](auto&, auto) { return Status(); }).ok();
  if (name != "manifest.json") put(name, files[name]);
  return 0;
}
