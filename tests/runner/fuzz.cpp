// A libFuzzer target: an input takes the place of one file of a bundle, every digest is computed anew, and the bundle
// is opened. It needs no OpenCL. Documents, and headers of tensors, are changed value by value, some bytes at random.
// $TORCHEDGE_FUZZ_BUNDLE: the bundle's folder, which is written to: a folder in memory for each process.
// $TORCHEDGE_FUZZ_FILE: the file.
#include <cstdio>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <random>

#include "bundle.h"

using namespace torchedge;

extern "C" size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t most);

namespace {

std::string folder, fuzzed;
Json manifest;

void put(const std::string& name, const std::string& content) {
  FILE* file = std::fopen((folder + "/" + name).c_str(), "wb");
  if (file == nullptr || std::fwrite(content.data(), 1, content.size(), file) != content.size()) std::abort();
  std::fclose(file);
}

std::string text_of(const Json& document) { return document.dump(-1, ' ', false, Json::error_handler_t::replace); }

/// Write a manifest with its own SHA-256, as `write_manifest` of Python does.
void put_manifest(Json document) {
  document.erase("sha256");
  document["sha256"] = sha256_of(canonical(document));
  put("manifest.json", text_of(document));
}

/// All values of a document but the outermost.
void collect(Json& value, std::vector<Json*>& values) {
  if (!value.is_structured()) return;
  for (Json& item : value) {
    values.push_back(&item);
    collect(item, values);
  }
}

Json near(const Json& value, std::minstd_rand& draw) {
  static const std::vector<Json> others = {
      0, 1, -1, 2, 4, 64, 65536, INT32_MAX, int64_t{1} << 31, int64_t{1} << 40, INT64_MAX, INT64_MIN, UINT64_MAX, 0.5, -1e300,
      nullptr, true, false, "", "x", "../x", "float16", "int64", "state", "input", "intermediate", "image", "update", Json::array(), Json::object()};
  if (!value.is_number_integer() || draw() % 3 == 0) return others[draw() % others.size()];
  const uint64_t number = value.get<uint64_t>();
  const uint64_t choices[] = {number + 1, number - 1, number * 2, number / 2, number << 20, 0 - number};
  return static_cast<int64_t>(choices[draw() % 6]);
}

/// Replace, remove, repeat or copy a value of a document.
void change(Json& document, std::minstd_rand& draw) {
  std::vector<Json*> values = {&document};
  collect(document, values);
  Json& value = *values[draw() % values.size()];
  const unsigned what = draw() % 8;
  if (what == 0 && value.is_structured() && !value.empty()) {
    auto place = value.begin();
    std::advance(place, draw() % value.size());
    value.erase(place);
  } else if (what == 1 && value.is_array() && !value.empty()) {
    value.push_back(Json(value[draw() % value.size()]));
  } else if (what == 2 && value.is_object() && !value.empty()) {
    auto place = value.begin();
    std::advance(place, draw() % value.size());
    value[place.key() + "x"] = Json(place.value());
  } else if (what < 4) {
    value = Json(*values[draw() % values.size()]);
  } else if (!value.is_structured() || what == 4) {
    value = near(value, draw);
  }
}

}  // namespace

extern "C" int LLVMFuzzerInitialize(int*, char***) {
  const char *bundle = std::getenv("TORCHEDGE_FUZZ_BUNDLE"), *file = std::getenv("TORCHEDGE_FUZZ_FILE");
  if (bundle == nullptr || file == nullptr) {
    std::fputs("set TORCHEDGE_FUZZ_BUNDLE to a bundle that may be written to, and TORCHEDGE_FUZZ_FILE to a file in it\n", stderr);
    std::exit(2);
  }
  folder = bundle;
  fuzzed = file;
  manifest = Json::parse(File::folder(folder).value().below("manifest.json").value().read_all(1 << 26).value());
  return 0;
}

extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t most, unsigned seed) {
  std::minstd_rand draw(seed);
  size_t begin = 0, end = size;
  if (fuzzed == "weights.safetensors") {
    begin = 8;
    end = size < 8 ? 0 : begin + (data[0] | data[1] << 8 | data[2] << 16);
  } else if (fuzzed.find(".json") == std::string::npos) {
    return LLVMFuzzerMutate(data, size, most);
  }
  const std::string all(reinterpret_cast<char*>(data), size);
  Json document = begin <= end && end <= size ? Json::parse(all.begin() + begin, all.begin() + end, nullptr, false) : Json(Json::value_t::discarded);
  if (document.is_discarded() || draw() % 4 == 0) return LLVMFuzzerMutate(data, size, most);
  for (unsigned count = 1 + draw() % 3; count > 0; --count) change(document, draw);
  const std::string text = text_of(document);
  const std::string changed = (begin == 0 ? "" : bytes_of(text.size())) + text + all.substr(end);
  if (changed.size() > most) return LLVMFuzzerMutate(data, size, most);
  std::copy(changed.begin(), changed.end(), data);
  return changed.size();
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string content(reinterpret_cast<const char*>(data), size);
  if (fuzzed == "manifest.json") {
    // What `Document` refuses, such as a thousand levels, stays as it is.
    bool object = Document::parse(fuzzed, content).ok();
    object ? put_manifest(Json::parse(content)) : put(fuzzed, content);
  } else {
    put(fuzzed, content);
    Json changed = manifest;
    changed["files"][fuzzed] = {{"sha256", sha256_of(content)}, {"bytes", content.size()}};
    put_manifest(std::move(changed));
  }
  auto bundle = open_bundle(folder, "");
  if (bundle.ok()) (void)bundle.value().read_weights([](auto&, auto) { return Status(); }).ok();
  return 0;
}
