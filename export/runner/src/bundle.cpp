#include "bundle.h"

#include <algorithm>
#include <set>

#include "plan.h"

namespace torchedge {
namespace {

constexpr int64_t kMaxManifest = int64_t{1} << 25, kMaxProgram = int64_t{1} << 26, kMaxText = int64_t{1} << 22;
constexpr int64_t kMaxBytes = int64_t{1} << 50;
constexpr size_t kMaxFiles = size_t{1} << 17, kMaxPorts = size_t{1} << 16;
constexpr size_t kPiece = size_t{1} << 20;
constexpr const char* kAgain = "; it was changed, or damaged on its way: copy or export the bundle again";

bool is_kernel(const std::string& name) {
  if (name.size() < 12 || name.rfind("kernels/", 0) != 0 || name.substr(name.size() - 3) != ".cl") return false;
  std::string stem = name.substr(8, name.size() - 11);
  return std::all_of(stem.begin(), stem.end(), [](unsigned char c) { return c == '_' || (c < 128 && std::isalnum(c)); });
}

std::vector<Port> read_ports(const Entry& entry) {
  std::vector<Port> ports;
  for (const Entry& item : entry.items(kMaxPorts)) {
    item.only({"name", "shape", "dtype"});
    ports.push_back({item.at("name").text(), item.at("shape").integers(0, kMaxSize, kMaxRank), read_dtype(item.at("dtype"))});
  }
  return ports;
}

void read_target(const Entry& entry, Bundle& bundle) {
  entry.only({"name", "title", "fingerprint", "class", "limits", "unknown_limits"});
  bundle.made_for = entry.at("name").text();
  entry.at("title").text();
  entry.at("fingerprint").sha256();
  bundle.device_class = entry.at("class").word(kClasses);
  for (const auto& [name, value] : entry.at("limits").entries(1000)) value.integer(0, kMaxBytes);
  for (const Entry& name : entry.at("unknown_limits").items(1000)) name.text(4000, 0);
}

/// The manifest, whose own digest has to be that of its entries.
Status read_manifest(const File& folder, const std::string& expected, Bundle& bundle) {
  TE_TRY(file, folder.below("manifest.json"));
  TE_TRY(text, file.read_all(kMaxManifest));
  TE_TRY(document, Document::parse(file.name(), text));
  Entry entry = document.root();
  entry.only({"schema", "model", "mode", "accumulation", "versions", "device", "inputs", "outputs", "hyperparameters",
              "memory", "onnx", "notes", "files", "sha256"});
  entry.at("schema").word({"torchedge-bundle-2"});
  bundle.sha256 = entry.at("sha256").sha256();
  TE_CHECK(document.status());
  if (sha256_of(document.canonical_without("sha256")) != bundle.sha256) return Error{file.name() + ": has another SHA-256 than it says" + kAgain};
  if (!expected.empty() && expected != bundle.sha256)
    return Error{file.name() + ": has the SHA-256 " + bundle.sha256 + "; expected " + expected + ": it is another bundle"};
  bundle.model = entry.at("model").text();
  bundle.trains = entry.at("mode").word({"infer", "train"}) == 1;
  bundle.accumulation = entry.at("accumulation").integer(1, INT32_MAX);
  read_target(entry.at("device"), bundle);
  const Entry memory = entry.at("memory");
  memory.only({"resident_bytes", "arena_bytes", "live_bytes", "largest_bytes", "staging_bytes", "total_bytes"});
  for (const auto& [name, value] : memory.entries(6)) bundle.memory[name] = value.integer(0, kMaxBytes);
  for (const auto& [name, value] : entry.at("versions").entries(kMaxPorts)) value.text();
  for (const auto& [name, value] : entry.at("onnx").entries(kMaxPorts)) value.plain();
  for (const Entry& note : entry.at("notes").items(1000)) note.text(4000, 0);
  bundle.inputs = read_ports(entry.at("inputs"));
  bundle.outputs = read_ports(entry.at("outputs"));
  for (const auto& [name, value] : entry.at("hyperparameters").entries(kMaxPorts)) bundle.hyperparameters[name] = value.number();
  for (const auto& [name, value] : entry.at("files").entries(kMaxFiles)) {
    value.only({"sha256", "bytes"});
    bundle.files[name] = {value.at("sha256").sha256(), value.at("bytes").integer(0, kMaxBytes)};
    bool known = name == "source.json" || name == "program.json" || name == "accumulating.json" ||
                 name == "streaming_plan.json" || name == "weights.safetensors" || name == "model.onnx" ||
                 name == "model.onnx.data" || name == "check.json" || is_kernel(name);
    if (!known) value.refuse("is listed; expected only files that export writes");
  }
  for (const char* name : {"program.json", "weights.safetensors", "accumulating.json"})
    if (!bundle.files.count(name) && (bundle.accumulation > 1 || name[0] != 'a')) entry.at("files").at(name);
  bundle.streams = bundle.files.count("streaming_plan.json") > 0;
  return document.status();
}

/// Hash a file that is not used in this run, such as model.onnx.
Result<std::string> digest_of(const File& file) {
  Sha256 state;
  std::string piece(std::min<int64_t>(kPiece, file.size()), '\0');
  for (int64_t at = 0; at < file.size(); at += piece.size()) {
    size_t count = std::min<int64_t>(piece.size(), file.size() - at);
    TE_CHECK(file.read(at, piece.data(), count));
    state.update(piece.data(), count);
  }
  return state.hex();
}

/// Check every file but the weights, which are hashed when they are loaded; return the small ones.
Result<std::map<std::string, std::string>> read_files(const File& folder, Bundle& bundle) {
  std::map<std::string, std::string> contents;
  for (const auto& [name, listed] : bundle.files) {
    TE_TRY(file, folder.below(name));
    if (file.size() != listed.nbytes)
      return Error{file.name() + ": holds " + std::to_string(file.size()) + " bytes; manifest.json lists " +
                   std::to_string(listed.nbytes) + kAgain};
    if (name == "weights.safetensors") {
      TE_TRY(header, read_file_header(file));
      bundle.header = std::move(header);
      bundle.weights = std::move(file);
      continue;
    }
    std::string digest;
    if (is_kernel(name) || name == "program.json" || name == "accumulating.json" || name == "streaming_plan.json" || name == "check.json") {
      TE_TRY(content, file.read_all(is_kernel(name) ? kMaxText : kMaxProgram));
      digest = sha256_of(content);
      contents[name] = std::move(content);
    } else {
      TE_TRY(hashed, digest_of(file));
      digest = hashed;
    }
    if (digest != listed.sha256) return Error{file.name() + ": has another SHA-256 than manifest.json says" + kAgain};
  }
  return contents;
}

Result<std::map<std::string, std::string>> kernel_texts(const Bundle& bundle, const std::map<std::string, std::string>& contents) {
  std::map<std::string, std::string> sources;
  for (const auto& [name, text] : contents) {
    if (!is_kernel(name)) continue;
    for (unsigned char c : text)
      if (c != '\n' && c != '\t' && (c < 32 || c > 126))
        return Error{bundle.path + "/" + name + ": is no text of printable ASCII; expected OpenCL C: export the model again"};
    sources[name.substr(8, name.size() - 11)] = text;
  }
  return sources;
}

bool same_ports(const Program& program, const std::vector<int64_t>& places, const std::vector<Port>& ports) {
  if (places.size() != ports.size()) return false;
  for (size_t k = 0; k < places.size(); ++k) {
    const Form& form = program.tensors[places[k]].form;
    if (form.shape != ports[k].shape || form.dtype != ports[k].dtype) return false;
  }
  return true;
}

/// Bytes of device memory; streamed weights lie in the arena.
std::map<std::string, int64_t> memory_of(const std::vector<Program>& programs) {
  int64_t total = 0, arena = 0, live = 0, staging = 0;
  for (const Program& program : programs)
    if (program.loads) staging = program.loads->staging_bytes;
  int64_t largest = staging;
  std::set<std::string> shared;
  for (const Program& program : programs) {
    for (size_t k = 0; k < program.tensors.size(); ++k) {
      const Tensor& tensor = program.tensors[k];
      if (tensor.role == Role::intermediate || program.in_arena(k)) continue;
      largest = std::max(largest, tensor.form.device_bytes());
      if (!is_shared(tensor.role) || shared.insert(tensor.name).second) total += tensor.form.device_bytes();
    }
    for (int64_t bytes : program.arena.pieces) arena += bytes, largest = std::max(largest, bytes);
    for (const Slot& slot : program.arena.slots) {
      int64_t bytes = slot.width * slot.height * 4 * size_of(slot.dtype);
      arena += bytes, largest = std::max(largest, bytes);
    }
    live += program.arena.live_bytes;
  }
  return {{"resident_bytes", total}, {"arena_bytes", arena}, {"live_bytes", live}, {"largest_bytes", largest}, {"staging_bytes", staging}, {"total_bytes", total + arena + staging}};
}

/// The manifest describes the programs, and both programs hold what they share in the same way.
Status check_same(const Bundle& bundle) {
  auto differ = [&](const std::string& what) {
    return Error{bundle.path + ": manifest.json and program.json have different " + what +
                 "; expected the same: export the model again"};
  };
  for (const Program& program : bundle.programs) {
    if (!same_ports(program, program.fed(), bundle.inputs)) return differ("inputs");
    if (!same_ports(program, program.outputs, bundle.outputs)) return differ("outputs");
    if (program.target != bundle.device_class) return differ("device classes");
  }
  const Program& program = bundle.programs[0];
  std::map<std::string, int64_t> memory = memory_of(bundle.programs), listed = bundle.memory;
  listed.insert({"staging_bytes", 0});
  if (memory != listed) return differ("memory");
  for (const auto& [name, value] : bundle.hyperparameters)
    if (!program.hyperparameters.count(name)) return differ("hyperparameters");
  if (program.hyperparameters.size() != bundle.hyperparameters.size()) return differ("hyperparameters");
  if (bundle.trains && (bundle.outputs.empty() || !bundle.outputs[0].shape.empty()))
    return Error{bundle.path + ": manifest.json says mode 'train', and program.json gives no loss: export the model again"};
  std::map<std::string, const Tensor*> known;
  for (const Tensor& tensor : program.tensors)
    if (is_resident(tensor.role)) known[tensor.name] = &tensor;
  for (size_t k = 1; k < bundle.programs.size(); ++k)
    for (const Tensor& tensor : bundle.programs[k].tensors) {
      auto other = is_resident(tensor.role) ? known.find(tensor.name) : known.end();
      if (other == known.end()) continue;
      const Form &a = tensor.form, &b = other->second->form;
      bool same = a.shape == b.shape && a.dtype == b.dtype && tensor.role == other->second->role &&
                  a.layout.order == b.layout.order && a.layout.storage == b.layout.storage &&
                  a.layout.split == b.layout.split && a.layout.fold == b.layout.fold &&
                  a.layout.pattern == b.layout.pattern && a.layout.row_texels == b.layout.row_texels;
      if (!same)
        return Error{bundle.path + ": program.json and accumulating.json hold " + tensor.name +
                     " in different ways; expected the same: export the model again"};
    }
  return {};
}

/// The weights file holds the programs' tensors, each as the device keeps it, and nothing else.
Status check_weights(const Bundle& bundle) {
  const std::string& path = bundle.weights.name();
  auto schema = bundle.header.metadata.find("schema");
  if (schema == bundle.header.metadata.end() || schema->second != "torchedge-weights-1")
    return Error{path + ": has another schema; expected torchedge-weights-1: export the model again"};
  std::set<std::string> names;
  for (const Program& program : bundle.programs)
    for (const Tensor& tensor : program.tensors) {
      if (!is_resident(tensor.role)) continue;
      names.insert(tensor.name);
      auto entry = bundle.header.entries.find(tensor.name);
      if (entry == bundle.header.entries.end()) {
        if (tensor.role == Role::state) continue;
        return Error{path + ": holds no " + name_of(tensor.role) + " " + tensor.name + "; export the model again"};
      }
      if (entry->second.dtype != tensor.form.dtype || entry->second.shape != tensor.form.packed_shape())
        return Error{path + ": holds " + tensor.name + " with another shape or dtype than the program; export the model again"};
    }
  for (const auto& [name, entry] : bundle.header.entries)
    if (!names.count(name) && name.rfind("~padding.", 0) != 0)
      return Error{path + ": holds " + name.substr(0, 80) + ", which the program does not keep; export the model again"};
  return {};
}

}  // namespace

Result<Bundle> open_bundle(const std::string& folder, const std::string& sha256) {
  Bundle bundle;
  bundle.path = folder;
  TE_TRY(opened, File::folder(folder));
  TE_CHECK(read_manifest(opened, sha256, bundle));
  TE_TRY(contents, read_files(opened, bundle));
  TE_TRY(sources, kernel_texts(bundle, contents));
  std::vector<std::string> names = {"program.json"};
  if (bundle.accumulation > 1) names.push_back("accumulating.json");
  for (const std::string& name : names) {
    TE_TRY(program, read_program(folder + "/" + name, contents[name], sources));
    bundle.programs.push_back(std::move(program));
  }
  if (bundle.streams) {
    const std::string name = folder + "/streaming_plan.json";
    if (bundle.trains || bundle.accumulation > 1) return Error{name + ": belongs to a training step; expected an inference: export the model again"};
    TE_CHECK(read_plan(name, contents["streaming_plan.json"], bundle.header, bundle.weights.size(), bundle.programs[0]));
  }
  TE_CHECK(check_same(bundle));
  TE_CHECK(check_weights(bundle));
  if (bundle.files.count("check.json")) TE_CHECK(read_check(folder + "/check.json", contents["check.json"], bundle));
  return bundle;
}

Status Bundle::read_weights(const std::function<Status(const std::string&, const void*)>& take) const {
  std::vector<std::pair<std::string, FileEntry>> entries(header.entries.begin(), header.entries.end());
  std::sort(entries.begin(), entries.end(), [](auto& a, auto& b) {
    return std::pair(a.second.begin, a.second.end) < std::pair(b.second.begin, b.second.end);
  });
  Sha256 state;
  std::string data(header.begin, '\0');  // one tensor at a time, the header first
  TE_CHECK(weights.read(0, data.data(), data.size()));
  state.update(data);
  for (const auto& [name, entry] : entries) {
    data.resize(std::max<size_t>(data.size(), entry.end - entry.begin));
    TE_CHECK(weights.read(entry.begin, data.data(), entry.end - entry.begin));
    state.update(data.data(), entry.end - entry.begin);
    if (entry.dtype == DType::boolean)
      for (int64_t k = 0; k < entry.end - entry.begin; ++k)
        if (static_cast<unsigned char>(data[k]) > 1)
          return Error{weights.name() + ": holds a byte of " + name + " that is no boolean; expected 0 or 1: copy it again"};
    if (name[0] != '~') TE_CHECK(take(name, data.data()));
  }
  if (state.hex() != files.at("weights.safetensors").sha256)
    return Error{weights.name() + ": has another SHA-256 than manifest.json says" + kAgain};
  return {};
}

Status Bundle::check_weights() const {
  TE_TRY(digest, digest_of(weights));
  if (digest != files.at("weights.safetensors").sha256) return Error{weights.name() + ": has another SHA-256 than manifest.json says" + kAgain};
  return {};
}

}  // namespace torchedge
