#include "bundle.h"

#include <algorithm>
#include <set>

namespace torchedge {
namespace {

constexpr int64_t kMaxManifest = int64_t{1} << 25, kMaxProgram = int64_t{1} << 26, kMaxText = int64_t{1} << 22;
constexpr int64_t kMaxBytes = int64_t{1} << 50;
constexpr size_t kMaxFiles = size_t{1} << 17, kMaxPorts = size_t{1} << 16, kMaxMethods = 16;
constexpr size_t kPiece = size_t{1} << 20;
constexpr const char* kAgain = "; it was changed, or damaged on its way: copy or export the bundle again";

bool is_kernel(const std::string& name) {
  if (name.size() < 12 || name.rfind("kernels/", 0) != 0 || name.substr(name.size() - 3) != ".cl") return false;
  std::string stem = name.substr(8, name.size() - 11);
  return std::all_of(stem.begin(), stem.end(), [](unsigned char c) { return c == '_' || (c < 128 && std::isalnum(c)); });
}

/// The file of a program's streaming plan: that of program.NAME.json is streaming_plan.NAME.json.
std::string plan_file(const std::string& program) {
  return "streaming_plan." + (program.rfind("program.", 0) == 0 ? program.substr(8) : program);
}

/// The most bytes of a file that is read whole; 0 of other files.
int64_t most_bytes(const Bundle& bundle, const std::string& name) {
  for (const std::string& program : bundle.program_files())
    if (name == program || name == plan_file(program)) return kMaxProgram;
  return name == "check.json" ? kMaxProgram : is_kernel(name) ? kMaxText : 0;
}

std::vector<Port> read_ports(const Entry& entry) {
  std::vector<Port> ports;
  for (const Entry& item : entry.items(kMaxPorts)) {
    item.only({"name", "shape", "dtype"});
    ports.push_back({{item.at("shape").integers(0, kMaxSize, kMaxRank), read_dtype(item.at("dtype"))}, item.at("name").text()});
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

std::map<std::string, int64_t> read_memory(const Entry& entry) {
  std::map<std::string, int64_t> memory = {{"staging_bytes", 0}};
  entry.only({"resident_bytes", "arena_bytes", "live_bytes", "largest_bytes", "staging_bytes", "total_bytes"});
  for (const auto& [name, value] : entry.entries(6)) memory[name] = value.integer(0, kMaxBytes);
  return memory;
}

/// The methods that a manifest lists; without any, the one that it describes itself.
void read_methods(const Entry& entry, Bundle& bundle) {
  Method own{bundle.trains ? "train" : "infer", "program.json", read_ports(entry.at("inputs")), read_ports(entry.at("outputs")), {}};
  std::set<std::string> names;
  for (const Entry& item : entry.find("methods").items(kMaxMethods)) {
    item.only({"name", "program", "inputs", "outputs", "memory"});
    Method method{item.at("name").text(32), item.at("program").text(), read_ports(item.at("inputs")), read_ports(item.at("outputs")),
                  read_memory(item.at("memory"))};
    for (unsigned char c : method.name)
      if (!(c >= 'a' && c <= 'z') && (c == method.name[0] || (c != '_' && !(c >= '0' && c <= '9'))))
        item.refuse("has a name of other characters than small letters, then digits and _");
    if (!names.insert(method.name).second || method.file != (names.size() == 1 ? "program.json" : "program." + method.name + ".json"))
      item.refuse("has the name or the program of another method");
    bundle.methods.push_back(std::move(method));
  }
  bundle.several = !bundle.methods.empty();
  if (bundle.several && (bundle.trains || bundle.accumulation > 1)) entry.refuse("has methods and trains; expected methods of inferences");
  if (bundle.several && (bundle.methods[0].inputs != own.inputs || bundle.methods[0].outputs != own.outputs))
    entry.refuse("has other inputs or outputs than its first method");
  if (!bundle.several) bundle.methods.push_back(std::move(own));
}

/// The manifest, whose own digest has to be that of its entries.
Status read_manifest(const File& folder, const std::string& expected, Bundle& bundle) {
  TE_TRY(file, folder.below("manifest.json"));
  TE_TRY(text, file.read_all(kMaxManifest));
  TE_TRY(document, Document::parse(file.name(), text));
  Entry entry = document.root();
  entry.only({"schema", "model", "mode", "accumulation", "versions", "device", "inputs", "outputs", "hyperparameters",
              "memory", "onnx", "notes", "files", "sha256", "methods", "ends"});
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
  bundle.memory = read_memory(entry.at("memory"));
  for (const auto& [name, value] : entry.at("versions").entries(kMaxPorts)) value.text();
  for (const auto& [name, value] : entry.at("onnx").entries(kMaxPorts)) value.plain();
  for (const Entry& note : entry.at("notes").items(1000)) note.text(4000, 0);
  for (const Entry& token : entry.find("ends").items(100)) token.integer(0, INT32_MAX);
  read_methods(entry, bundle);
  for (const auto& [name, value] : entry.at("hyperparameters").entries(kMaxPorts)) bundle.hyperparameters[name] = value.number();
  for (const auto& [name, value] : entry.at("files").entries(kMaxFiles)) {
    value.only({"sha256", "bytes"});
    bundle.files[name] = {value.at("sha256").sha256(), value.at("bytes").integer(0, kMaxBytes)};
    const std::set<std::string> others = {"source.json", "weights.safetensors", "model.onnx", "model.onnx.data",
                                          "tokenizer.json"};
    if (most_bytes(bundle, name) == 0 && !others.count(name)) value.refuse("is listed; expected only files that export writes");
  }
  entry.at("files").at("weights.safetensors");
  const std::vector<std::string> programs = bundle.program_files();
  bundle.streams = std::any_of(programs.begin(), programs.end(), [&](auto& name) { return bundle.files.count(plan_file(name)) > 0; });
  for (const std::string& name : programs) {
    entry.at("files").at(name.c_str());
    if (bundle.streams) entry.at("files").at(plan_file(name).c_str());
  }
  return document.status();
}

Status check_digest(const File& file, const std::string& digest, const BundleFile& listed) {
  return digest == listed.sha256 ? Status() : Status(Error{file.name() + ": has another SHA-256 than manifest.json says" + kAgain});
}

/// Hash a file in small pieces: one that is not used in this run, such as model.onnx, or one that a plan streams.
Status check_digest(const File& file, const BundleFile& listed) {
  Sha256 state;
  std::string piece(std::min<int64_t>(kPiece, file.size()), '\0');
  for (int64_t at = 0; at < file.size(); at += piece.size()) {
    size_t count = std::min<int64_t>(piece.size(), file.size() - at);
    TE_CHECK(file.read(at, piece.data(), count));
    state.update(piece.data(), count);
  }
  return check_digest(file, state.hex(), listed);
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
    const int64_t most = most_bytes(bundle, name);
    if (most == 0) {
      TE_CHECK(check_digest(file, listed));
      continue;
    }
    TE_TRY(content, file.read_all(most));
    TE_CHECK(check_digest(file, sha256_of(content), listed));
    const bool ascii = std::all_of(content.begin(), content.end(), [](unsigned char c) { return c == '\n' || c == '\t' || (c >= 32 && c <= 126); });
    if (is_kernel(name) && !ascii) return Error{file.name() + ": is no text of printable ASCII; expected OpenCL C: export the model again"};
    contents[name] = std::move(content);
  }
  return contents;
}

bool same_ports(const Program& program, const std::vector<int64_t>& places, const std::vector<Port>& ports) {
  return std::equal(places.begin(), places.end(), ports.begin(), ports.end(),
                    [&](int64_t place, const Array& port) { return port == program.tensors[place].form; });
}

/// The manifest describes the programs, and both programs hold what they share in the same way.
Status check_same(const Bundle& bundle) {
  auto differ = [&](const std::string& what) {
    return Error{bundle.path + ": manifest.json and program.json have different " + what +
                 "; expected the same: export the model again"};
  };
  for (size_t k = 0; k < bundle.programs.size(); ++k) {
    const Program& program = bundle.programs[k];
    const Method& method = bundle.method_of(k);
    if (!same_ports(program, program.fed(), method.inputs)) return differ("inputs of " + method.name);
    if (!same_ports(program, program.outputs, method.outputs)) return differ("outputs of " + method.name);
    if (program.target != bundle.device_class) return differ("device classes");
    if (program.loads && program.loads->staging_bytes != bundle.programs[0].loads->staging_bytes) return differ("sizes of staging memory");
  }
  if (memory_of(bundle.programs) != bundle.memory) return differ("memory");
  std::set<std::string> fed;
  for (const Program& each : bundle.programs)
    for (const auto& [name, place] : each.hyperparameters) fed.insert(name);
  for (const auto& [name, value] : bundle.hyperparameters)
    if (!fed.count(name)) return differ("hyperparameters");
  if (fed.size() != bundle.hyperparameters.size()) return differ("hyperparameters");
  const std::vector<Port>& outputs = bundle.methods[0].outputs;
  if (bundle.trains && (outputs.empty() || !outputs[0].shape.empty()))
    return Error{bundle.path + ": manifest.json says mode 'train', and program.json gives no loss: export the model again"};
  auto held = [](const Tensor& tensor) { return std::tie(tensor.role, tensor.fill, tensor.form); };
  std::map<std::string, const Tensor*> known;
  for (const Program& each : bundle.programs)
    for (const Tensor& tensor : each.tensors)
      if (is_resident(tensor.role) && held(*known.emplace(tensor.name, &tensor).first->second) != held(tensor))
        return Error{bundle.path + ": its programs hold " + tensor.name + " in different ways; expected the same: export the model again"};
  return {};
}

/// What a weight or a state holds has to be in the range of each program that indexes with it.
void narrow_indices(std::vector<Program>& programs) {
  std::map<std::string, IndexRange> ranges;
  for (bool settled : {false, true})
    for (Program& program : programs)
      for (Tensor& tensor : program.tensors) {
        if (!is_resident(tensor.role)) continue;
        if (settled && ranges.count(tensor.name)) tensor.indices = ranges.at(tensor.name);
        if (settled || !tensor.indices) continue;
        IndexRange& range = ranges.emplace(tensor.name, *tensor.indices).first->second;
        range.low = std::max(range.low, tensor.indices->low), range.high = std::min(range.high, tensor.indices->high);
        if (range.ignored != tensor.indices->ignored) range.ignored.reset();
      }
}

/// The weights file holds the programs' tensors, each as the device keeps it, and nothing else.
Status check_weights(const Bundle& bundle) {
  const std::string& path = bundle.weights.name();
  auto schema = bundle.header.metadata.find("schema");
  if (schema == bundle.header.metadata.end() || schema->second != "torchedge-weights-1")
    return Error{path + ": has another schema; expected torchedge-weights-1: export the model again"};
  std::vector<const Tensor*> tensors;
  for (const Program& program : bundle.programs)
    for (const Tensor& tensor : program.tensors)
      if (is_resident(tensor.role)) tensors.push_back(&tensor);
  return check_entries(path, bundle.header, tensors, true, "; export the model again");
}

}  // namespace

std::map<std::string, int64_t> memory_of(const std::vector<Program>& programs) {
  int64_t total = 0, arena = 0, staging = 0, largest = 0;
  std::set<std::string> shared;
  for (const Program& program : programs) {
    if (program.loads) staging = program.loads->staging_bytes;
    for (size_t k = 0; k < program.tensors.size(); ++k) {
      const Tensor& tensor = program.tensors[k];
      if (tensor.role == Role::intermediate || program.in_arena(k)) continue;
      largest = std::max(largest, tensor.form.device_bytes());
      if (!is_resident(tensor.role) || shared.insert(tensor.name).second) total += tensor.form.device_bytes();
    }
  }
  const Arena common = common_arena(programs);
  for (int64_t bytes : common.allocations()) arena += bytes, largest = std::max(largest, bytes);
  largest = std::max(largest, staging);
  return {{"resident_bytes", total}, {"arena_bytes", arena}, {"live_bytes", common.live_bytes}, {"largest_bytes", largest}, {"staging_bytes", staging}, {"total_bytes", total + arena + staging}};
}

Result<Bundle> open_bundle(const std::string& folder, const std::string& sha256) {
  Bundle bundle;
  bundle.path = folder;
  TE_TRY(opened, File::folder(folder));
  TE_CHECK(read_manifest(opened, sha256, bundle));
  TE_TRY(contents, read_files(opened, bundle));
  for (const std::string& name : bundle.program_files()) {
    TE_TRY(program, read_program(folder + "/" + name, contents[name], contents));
    const Method& method = bundle.method_of(bundle.programs.size());
    if (bundle.several && memory_of({program}) != method.memory)
      return Error{folder + ": manifest.json and " + name + " have different memory; expected the same: export the model again"};
    const std::string plan = plan_file(name);
    if (bundle.streams) TE_CHECK(read_plan(folder + "/" + plan, contents[plan], bundle.header, bundle.weights.size(), program));
    bundle.programs.push_back(std::move(program));
  }
  TE_CHECK(check_same(bundle));
  narrow_indices(bundle.programs);
  TE_CHECK(check_weights(bundle));
  if (bundle.files.count("check.json")) TE_CHECK(read_check(folder + "/check.json", contents["check.json"], bundle));
  return bundle;
}

std::vector<std::string> Bundle::program_files() const {
  std::vector<std::string> names;
  for (const Method& method : methods) names.push_back(method.file);
  if (accumulation > 1) names.push_back("accumulating.json");
  return names;
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
    if (name[0] != '~') TE_CHECK(take(name, data.data()));
  }
  return check_digest(weights, state.hex(), files.at("weights.safetensors"));
}

Status Bundle::check_weights() const { return check_digest(weights, files.at("weights.safetensors")); }

}  // namespace torchedge
