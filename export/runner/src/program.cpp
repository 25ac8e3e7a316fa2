#include "program.h"

#include <algorithm>
#include <numeric>

namespace torchedge {
namespace {

constexpr size_t kMaxItems = size_t{1} << 16;
constexpr size_t kMaxArguments = 256;
const std::vector<const char*> kRoles = {"input", "parameter", "buffer", "state", "constant", "output", "intermediate"};
constexpr int64_t kItemsPerElement = 64;  // far more work-items than any schedule takes

Tensor read_tensor(const Entry& entry) {
  Tensor tensor;
  entry.only({"name", "shape", "dtype", "role", "layout", "fill", "indices", "divisor"});
  tensor.name = entry.at("name").text();
  tensor.form.shape = entry.at("shape").integers(0, kMaxSize, kMaxRank);
  tensor.form.dtype = read_dtype(entry.at("dtype"));
  tensor.role = static_cast<Role>(entry.at("role").word(kRoles));
  tensor.form.layout = read_layout(entry.at("layout"), tensor.form.shape);
  tensor.fill = entry.find("fill").number();
  tensor.divisor = entry.find("divisor").boolean();
  if (auto indices = entry.find("indices"); indices.present()) {
    indices.only({"low", "high", "ignored"});
    IndexRange range{indices.at("low").integer(-kMaxSize, kMaxSize), indices.at("high").integer(-kMaxSize, kMaxSize), {}};
    if (auto ignored = indices.find("ignored"); ignored.present()) range.ignored = ignored.integer(INT64_MIN, INT64_MAX);
    tensor.indices = range;
  }
  if (tensor.form.elements() > kMaxSize || tensor.form.device_bytes() > kMaxSize)
    entry.refuse("is too large; expected at most 2^40 bytes");
  bool channel = tensor.form.dtype == DType::float32 || tensor.form.dtype == DType::float16;
  if (tensor.form.layout.image() && !channel) entry.refuse("is an image of whole numbers or float64; expected floats");
  return tensor;
}

Kernel read_kernel(const Entry& entry, const std::map<std::string, std::string>& files) {
  Kernel kernel;
  entry.only({"name", "access", "kind", "load_class", "checks", "in_place", "local_bytes", "sizes", "sha256"});
  kernel.name = entry.at("name").text(128);
  entry.at("kind").text();
  entry.at("load_class").word({"elemental", "hierarchical", "reusable"});
  for (const Entry& access : entry.at("access").items(kMaxArguments))
    kernel.access.push_back(static_cast<Access>(access.word({"read", "write", "update"})));
  for (const Entry& pair : entry.find("in_place").items(kMaxItems)) {
    auto places = pair.integers(0, static_cast<int64_t>(kernel.access.size()) - 1, 2, 2);
    if (places.size() == 2) kernel.in_place.emplace(places[0], places[1]);
  }
  kernel.local_bytes = entry.find("local_bytes").integer(0, kMaxSize);
  kernel.sizes = entry.find("sizes").integer(0, kMaxArguments - 1);
  if (entry.find("checks").boolean()) entry.refuse("was made with checks; expected one without: export the bundle again");
  auto digest = entry.at("sha256").sha256();
  auto source = files.find("kernels/" + kernel.name + ".cl");
  if (source == files.end()) return entry.refuse("has no text in kernels/; expected one for each kernel"), kernel;
  kernel.source = source->second;
  if (!digest.empty() && digest != sha256_of(kernel.source)) entry.refuse("has the SHA-256 of another text");
  return kernel;
}

std::vector<size_t> work_items(const Entry& entry) {
  std::vector<size_t> items;
  for (int64_t count : entry.integers(1, kMaxSize, 3, 1)) items.push_back(count);
  return items;
}

Launch read_launch(const Entry& entry, const Program& program) {
  Launch launch;
  entry.only({"kernel", "tensors", "global_size", "local_size", "scope", "sizes", "flops", "nbytes", "reference"});
  launch.kernel = entry.at("kernel").integer(0, static_cast<int64_t>(program.kernels.size()) - 1);
  launch.tensors = entry.at("tensors").integers(0, static_cast<int64_t>(program.tensors.size()) - 1, kMaxArguments);
  launch.global = work_items(entry.at("global_size"));
  launch.local = work_items(entry.find("local_size"));
  launch.scope = entry.find("scope").text(4000, 0);
  launch.sizes = entry.find("sizes").integers(INT32_MIN, INT32_MAX, kMaxArguments);
  return launch;
}

/// What a launch says of its kernel and tensors has to fit both.
void check_launch(const Entry& entry, const Launch& launch, const Program& program) {
  const Kernel& kernel = program.kernels[launch.kernel];
  if (launch.tensors.size() != kernel.access.size() || static_cast<int64_t>(launch.sizes.size()) != kernel.sizes)
    return entry.refuse("has " + std::to_string(launch.tensors.size()) + " tensors and " +
                        std::to_string(launch.sizes.size()) + " sizes; kernel " + kernel.name + " takes " +
                        std::to_string(kernel.access.size()) + " and " + std::to_string(kernel.sizes));
  int64_t elements = 0;
  for (size_t k = 0; k < launch.tensors.size(); ++k) {
    const Tensor& tensor = program.tensors[launch.tensors[k]];
    elements += std::max<int64_t>(tensor.form.elements(), 1);
    if (kernel.access[k] == Access::read) continue;
    if (tensor.role == Role::input || tensor.role == Role::constant)
      return entry.refuse("writes " + std::string(name_of(tensor.role)) + " " + tensor.name + "; expected it to stay the same");
    if (std::count(launch.tensors.begin(), launch.tensors.end(), launch.tensors[k]) > 1)
      return entry.refuse("writes " + tensor.name + ", which is another argument, too");
  }
  if (!launch.local.empty() && launch.local.size() != launch.global.size())
    return entry.refuse("has a local_size of other dimensions than its global_size");
  int64_t items = 1, most = kItemsPerElement * elements;
  for (size_t d = 0; d < launch.global.size(); ++d) {
    size_t local = launch.local.empty() ? 1 : launch.local[d];
    if (launch.global[d] % local != 0)
      return entry.refuse("has a global_size that is no multiple of its local_size");
    int64_t count = static_cast<int64_t>(launch.global[d] - local) + 1;  // what groups are rounded up to is free
    items = count > most / items ? most + 1 : items * count;
  }
  if (items > most)
    entry.refuse("has more work-items than " + std::to_string(most) + ", the most for tensors of these sizes");
}

void read_places(const Entry& entry, int64_t tensors, int64_t most, std::map<int64_t, int64_t>& places) {
  for (const Entry& pair : entry.items(kMaxItems)) {
    auto numbers = pair.integers(0, kMaxSize, 2, 2);
    if (numbers.size() != 2) return;
    if (numbers[0] >= tensors || numbers[1] > most) return pair.refuse("is out of range");
    if (!places.emplace(numbers[0], numbers[1]).second) return pair.refuse("gives a tensor a second place");
  }
}

Arena arena_of(const Entry& entry, const Program& program) {
  Arena arena;
  entry.only({"nbytes", "offsets", "slots", "slot_of", "live_bytes", "allocation_bytes", "pieces"});
  arena.nbytes = entry.at("nbytes").integer(0, kMaxSize);
  arena.live_bytes = entry.at("live_bytes").integer(0, kMaxSize);
  arena.pieces = entry.find("pieces").integers(1, kMaxSize, kMaxItems);
  if (arena.pieces.empty() && arena.nbytes > 0) arena.pieces = {arena.nbytes};
  if (std::accumulate(arena.pieces.begin(), arena.pieces.end(), int64_t{0}) != arena.nbytes)
    entry.refuse("has pieces of other bytes than " + std::to_string(arena.nbytes));
  for (const Entry& slot : entry.at("slots").items(kMaxItems)) {
    auto parts = slot.items(3, 3);
    if (parts.size() != 3) break;
    arena.slots.push_back({parts[0].integer(1, kMaxExtent), parts[1].integer(1, kMaxExtent), read_dtype(parts[2])});
    if (arena.slots.back().dtype > DType::float16) slot.refuse("is no image of floats");
  }
  int64_t tensors = program.tensors.size(), slots = arena.slots.size();
  read_places(entry.at("offsets"), tensors, arena.nbytes, arena.offsets);
  read_places(entry.at("slot_of"), tensors, slots - 1, arena.slot_of);
  return arena;
}

/// Each intermediate that a launch touches has one place, of its kind and size.
void check_places(const Entry& entry, const Program& program) {
  const Arena& arena = program.arena;
  std::set<int64_t> placed, touched;
  for (const Launch& launch : program.launches) touched.insert(launch.tensors.begin(), launch.tensors.end());
  for (auto [index, offset] : arena.offsets) {
    const Tensor& tensor = program.tensors[index];
    int64_t end = offset + tensor.form.device_bytes();
    if (end > arena.nbytes)
      return entry.refuse("places " + tensor.name + " at bytes " + std::to_string(offset) + " to " + std::to_string(end) +
                          "; expected them within " + std::to_string(arena.nbytes));
    auto [piece, within] = arena.place(offset);
    if (within + tensor.form.device_bytes() > arena.pieces[piece]) return entry.refuse("places " + tensor.name + " in two pieces");
    if (tensor.form.layout.storage == Storage::image) return entry.refuse("places the image " + tensor.name + " in a buffer");
    placed.insert(index);
  }
  for (auto [index, number] : arena.slot_of) {
    const Form& form = program.tensors[index].form;
    const Slot& slot = arena.slots[number];
    bool fits = form.layout.width <= slot.width && form.layout.height <= slot.height && form.dtype == slot.dtype;
    if (form.layout.storage != Storage::image || !fits)
      return entry.refuse("places " + program.tensors[index].name + " in a slot that does not fit it");
    if (!placed.insert(index).second) return entry.refuse("gives " + program.tensors[index].name + " two places");
  }
  for (size_t k = 0; k < program.tensors.size(); ++k) {
    bool streamed = program.loads && program.loads->streamed.count(k);
    bool inside = program.tensors[k].role == Role::intermediate || streamed, has = placed.count(k) > 0;
    if (has && !inside) return entry.refuse("places " + program.tensors[k].name + ", which is no intermediate");
    if (!has && (streamed || (inside && touched.count(k)))) return entry.refuse("has no place for " + program.tensors[k].name);
  }
}

/// Follow the step through the arena: what a launch reads must be what an earlier one, or copies, wrote there.
void check_contents(const Entry& entry, const Program& program) {
  const Arena& arena = program.arena;
  std::map<int64_t, std::pair<int64_t, int64_t>> owners;  // begin of a range: its end and the tensor written there
  auto range_of = [&](int64_t index) {
    auto slot = arena.slot_of.find(index);
    if (slot != arena.slot_of.end()) return std::pair(arena.nbytes + slot->second, arena.nbytes + slot->second + 1);
    int64_t begin = arena.offsets.at(index);
    return std::pair(begin, begin + program.tensors[index].form.device_bytes());
  };
  auto intact = [&](int64_t index) {
    auto [begin, end] = range_of(index);
    auto owner = owners.find(begin);
    return owner != owners.end() && owner->second == std::pair(end, index);
  };
  auto lost = [&](int64_t index, const std::string& reader) {
    entry.refuse("overwrites " + program.tensors[index].name + " before " + reader + " reads it, or nothing writes it");
  };
  auto taken = [&](int64_t index, auto disturbed) {
    auto [begin, end] = range_of(index);
    auto first = owners.lower_bound(begin);
    if (first != owners.begin() && std::prev(first)->second.first > begin) --first;
    while (first != owners.end() && first->first < end) {
      if (disturbed(first->second.second)) return first->second.second;
      first = owners.erase(first);
    }
    owners[begin] = {end, index};
    return int64_t{-1};
  };
  std::vector<int64_t> copied;  // tensors, by copy
  if (program.loads)
    for (const Read& read : program.loads->run)
      for (const Copy& copy : read.copies) copied.push_back(copy.tensor);
  int64_t copies = 0;
  for (size_t position = 0; position < program.launches.size(); ++position) {
    const Launch& launch = program.launches[position];
    const Kernel& kernel = program.kernels[launch.kernel];
    for (; program.loads && copies < program.loads->waits[position]; ++copies) {
      int64_t index = copied[copies];
      if (program.loads->streamed.at(index).first == copies + 1) taken(index, [](int64_t) { return false; });
      if (!intact(index)) return lost(index, "launch " + std::to_string(position));
    }
    // An operand of this launch in whose place argument k may not write.
    auto disturbed = [&](int64_t owner, size_t k) {
      for (size_t read = 0; read < launch.tensors.size(); ++read)
        if (launch.tensors[read] == owner && read != k && !kernel.in_place.count({read, k})) return true;
      return false;
    };
    for (int phase = 0; phase < 2; ++phase)  // reads come before writes: a result may take an operand's place
      for (size_t k = 0; k < launch.tensors.size(); ++k) {
        int64_t index = launch.tensors[k];
        bool streamed = program.loads && program.loads->streamed.count(index);
        if (program.tensors[index].role != Role::intermediate && !streamed) continue;
        bool reads = kernel.access[k] != Access::write;
        if (phase == 0 && reads && !intact(index)) return lost(index, "launch " + std::to_string(position));
        if (streamed && (kernel.access[k] != Access::read || program.loads->streamed.at(index).second > copies))
          return entry.refuse("has " + program.tensors[index].name + " written, or read before its copies, in launch " + std::to_string(position));
        if (phase == 0 || kernel.access[k] == Access::read || intact(index)) continue;
        int64_t owner = taken(index, [&](int64_t other) { return disturbed(other, k); });
        if (owner >= 0) return lost(owner, "launch " + std::to_string(position));
      }
  }
}

void check_names(const Entry& entry, const Program& program) {
  std::set<std::string> names;
  for (const Tensor& tensor : program.tensors)
    if (tensor.role != Role::intermediate && !names.insert(tensor.name).second)
      return entry.refuse("has two tensors called " + tensor.name);
  std::set<std::string> kernels;
  for (const Kernel& kernel : program.kernels)
    if (!kernels.insert(kernel.name).second) return entry.refuse("has two kernels called " + kernel.name);
}

void check_ports(const Entry& entry, const Program& program) {
  for (int64_t index : program.inputs)
    if (program.tensors[index].role != Role::input)
      return entry.refuse("feeds " + program.tensors[index].name + ", which has another role than input");
  if (std::set<int64_t>(program.inputs.begin(), program.inputs.end()).size() != program.inputs.size())
    return entry.refuse("lists an input twice");
  for (int64_t index : program.outputs)
    if (program.tensors[index].role == Role::intermediate)
      return entry.refuse("returns " + program.tensors[index].name + ", which is an intermediate");
  for (const auto& [name, index] : program.hyperparameters) {
    const Tensor& tensor = program.tensors[index];
    bool number = tensor.form.shape.empty() && tensor.form.plain() && tensor.role == Role::input;
    if (!number || (tensor.form.dtype != DType::float32 && tensor.form.dtype != DType::float64))
      return entry.refuse("has the hyperparameter " + name + ", which is no single number with the role input");
  }
}

}  // namespace

void read_arena(const Entry& entry, Program& program) {
  program.arena = arena_of(entry, program);
  if (entry.ok()) check_places(entry, program);
  if (entry.ok()) check_contents(entry, program);
}

const char* name_of(Role role) {
  return kRoles[static_cast<int>(role)];
}

std::vector<int64_t> Arena::allocations() const {
  std::vector<int64_t> bytes = pieces;
  for (const Slot& slot : slots) bytes.push_back(slot.width * slot.height * 4 * size_of(slot.dtype));
  return bytes;
}

Arena common_arena(const std::vector<Program>& programs) {
  Arena common;
  std::map<Slot, int64_t> most;
  for (const Program& program : programs) {
    const Arena& arena = program.arena;
    std::map<Slot, int64_t> counts;
    common.pieces.resize(std::max(common.pieces.size(), arena.pieces.size()));
    for (size_t k = 0; k < arena.pieces.size(); ++k) common.pieces[k] = std::max(common.pieces[k], arena.pieces[k]);
    for (const Slot& slot : arena.slots)
      if (++counts[slot] > most[slot]) ++most[slot], common.slots.push_back(slot);
    common.live_bytes = std::max(common.live_bytes, arena.live_bytes);
  }
  return common;
}

void split_arena(Program& program, int64_t most, int64_t alignment) {
  struct Place {
    int64_t index, first, last, bytes, begin;  // first, last: the launches that touch it
  };
  std::map<int64_t, Place> touched;
  for (size_t position = 0; position < program.launches.size(); ++position)
    for (int64_t index : program.launches[position].tensors) {
      int64_t launch = static_cast<int64_t>(position), bytes = program.tensors[index].form.device_bytes();
      if (!program.arena.offsets.count(index)) continue;
      touched.emplace(index, Place{index, launch, launch, (bytes + alignment - 1) / alignment * alignment, 0}).first->second.last = launch;
    }
  std::vector<Place> places;
  int64_t wall = most / alignment * alignment;  // no tensor lies across a multiple of it
  for (auto& [index, place] : touched) places.push_back(place), wall = std::max(wall, place.bytes);
  std::stable_sort(places.begin(), places.end(), [](auto& a, auto& b) { return a.bytes > b.bytes; });
  std::vector<int64_t> used;
  for (size_t k = 0; k < places.size(); ++k) {
    Place& place = places[k];
    std::map<int64_t, int64_t> taken;  // by tensors that are needed at the same time
    for (size_t other = 0; other < k; ++other)
      if (places[other].first <= place.last && place.first <= places[other].last)
        taken[places[other].begin] = std::max(taken[places[other].begin], places[other].begin + places[other].bytes);
    auto within = [&](int64_t at) { return at % wall + place.bytes > wall ? (at / wall + 1) * wall : at; };
    for (auto [begin, end] : taken) {
      if (within(place.begin) + place.bytes <= begin) break;
      place.begin = std::max(place.begin, end);
    }
    place.begin = within(place.begin);
    used.resize(std::max<size_t>(used.size(), place.begin / wall + 1));
    used[place.begin / wall] = std::max(used[place.begin / wall], place.begin % wall + place.bytes);
  }
  program.arena.pieces = used;
  program.arena.nbytes = std::accumulate(used.begin(), used.end(), int64_t{0});
  program.arena.offsets.clear();
  for (const Place& place : places)
    program.arena.offsets[place.index] = place.begin % wall + std::accumulate(used.begin(), used.begin() + place.begin / wall, int64_t{0});
}

std::pair<size_t, int64_t> Arena::place(int64_t offset) const {
  size_t piece = 0;
  while (piece + 1 < pieces.size() && offset >= pieces[piece]) offset -= pieces[piece++];
  return {piece, offset};
}

std::vector<int64_t> Program::fed() const {
  std::vector<int64_t> fed;
  for (int64_t index : inputs)
    if (std::none_of(hyperparameters.begin(), hyperparameters.end(), [&](auto& item) { return item.second == index; }))
      fed.push_back(index);
  return fed;
}

Status check_entries(const std::string& path, const FileHeader& header, const std::vector<const Tensor*>& tensors, bool packed, const std::string& advice) {
  std::set<std::string> names;
  for (const Tensor* tensor : tensors) {
    const Form& form = tensor->form;
    names.insert(tensor->name);
    auto entry = header.entries.find(tensor->name);
    if (entry == header.entries.end() && tensor->role == Role::state) continue;
    if (entry == header.entries.end()) return Error{path + ": holds no " + name_of(tensor->role) + " " + tensor->name + advice};
    if (!(entry->second == Array{packed ? form.packed_shape() : form.shape, form.dtype}))
      return Error{path + ": holds " + tensor->name + " with another shape or dtype than the program's " + form.text() + advice};
  }
  for (const auto& [name, entry] : header.entries)
    if (!names.count(name) && !(packed && name.rfind("~padding.", 0) == 0))
      return Error{path + ": holds " + name.substr(0, 80) + ", which the model does not keep" + advice};
  return {};
}

Result<Program> read_program(const std::string& name, const std::string& text, const std::map<std::string, std::string>& files) {
  TE_TRY(document, Document::parse(name, text));
  Entry entry = document.root();
  Program program;
  entry.only({"schema", "name", "tensors", "kernels", "launches", "inputs", "outputs", "arena", "hyperparameters",
              "target", "notes"});
  entry.at("schema").word({"torchedge-program-1"});
  entry.at("name").text();
  program.target = entry.at("target").word(kClasses);
  for (const Entry& note : entry.at("notes").items(1000)) note.text(4000, 0);
  for (const Entry& item : entry.at("tensors").items(kMaxItems)) program.tensors.push_back(read_tensor(item));
  for (const Entry& item : entry.at("kernels").items(kMaxItems)) program.kernels.push_back(read_kernel(item, files));
  for (const Entry& item : entry.at("launches").items(kMaxItems)) {
    program.launches.push_back(read_launch(item, program));
    if (document.ok()) check_launch(item, program.launches.back(), program);
  }
  int64_t last = static_cast<int64_t>(program.tensors.size()) - 1;
  program.inputs = entry.at("inputs").integers(0, last, kMaxItems);
  program.outputs = entry.at("outputs").integers(0, last, kMaxItems);
  for (const auto& [key, value] : entry.at("hyperparameters").entries(kMaxItems))
    program.hyperparameters[key] = value.integer(0, last);
  TE_CHECK(document.status());  // from here on every index is one that exists
  check_names(entry, program);
  check_ports(entry, program);
  read_arena(entry.at("arena"), program);
  TE_CHECK(document.status());
  return program;
}

}  // namespace torchedge
