#include "executor.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <set>

namespace torchedge {
namespace {

double now_ms() {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

/// An array of one number in every element, which its dtype holds exactly.
std::string filled(const Form& form, double value) {
  std::string array(form.array_bytes(), '\0');
  for (int64_t k = 0; k < form.elements(); ++k) put_element(form.dtype, array.data(), k, value);
  return array;
}

/// Whether `filled` gives the number that Python would: whole dtypes hold whole numbers in range.
bool fills_exactly(DType dtype, double value) {
  if (is_float(dtype)) return dtype != DType::float16 || value == 0;
  const bool positive = dtype == DType::uint8 || dtype == DType::uint32 || dtype == DType::boolean;
  return value == std::floor(value) && value > (positive ? -1 : -128) && value < (dtype == DType::boolean ? 2 : positive ? 256 : 128);
}

Status check_booleans(const Tensor& tensor, const void* data, int64_t nbytes) {
  const auto* bytes = static_cast<const unsigned char*>(data);
  if (tensor.form.dtype != DType::boolean || std::all_of(bytes, bytes + nbytes, [](unsigned char byte) { return byte < 2; })) return {};
  return Error{tensor.name + " holds a byte that is no boolean; expected 0 or 1: correct or copy the data again"};
}

/// Whether a caller's memory has the size of an array.
Status check_size(const std::string& name, const Array& array, int64_t nbytes) {
  if (nbytes == array.array_bytes()) return {};
  return Error{name + " comes with " + std::to_string(nbytes) + " bytes; expected " + array.text() + ", " + std::to_string(array.array_bytes()) + " bytes"};
}

/// Names of things with commas between them.
template <class Things>
std::string names_of(const Things& things) {
  std::string names;
  for (const auto& thing : things) names += (names.empty() ? "" : ", ") + thing.name;
  return names;
}

}  // namespace

Error Executor::failed(const std::string& doing, cl_int code) const {
  const char* advice = code == -4 || code == -5 || code == -6 || code == -61 ? "; the device has too little memory: use a smaller batch" : "";
  return Error{doing + " failed on " + device_.title() + ": " + error_name(code) + advice};
}

// opening -----------------------------------------------------------------------------------------------------

Status Executor::open(const torchedge_options& options) {
  TE_TRY(library, open_opencl(given(options.library)));
  cl_ = library;
  TE_TRY(device, choose_device(cl_, given(options.device)));
  device_ = device;
  for (Program& program : bundle_.programs) {
    const std::vector<int64_t>& pieces = program.arena.pieces;
    bool large = std::any_of(pieces.begin(), pieces.end(), [&](int64_t bytes) { return static_cast<cl_ulong>(bytes) > device_.allocation; });
    if (large && !program.loads) split_arena(program, static_cast<int64_t>(device_.allocation), static_cast<int64_t>(device_.base_alignment));
  }
  TE_CHECK(check_limits(options.memory_limit));
  time_launches_ = options.time_launches;
  TE_CHECK(open_queue(options.hints));
  std::vector<Kernel> kernels;
  std::set<std::string> names;
  for (const Program& program : bundle_.programs)
    for (const Kernel& kernel : program.kernels)
      if (names.insert(kernel.name).second) kernels.push_back(kernel);
  double start = now_ms();
  TE_CHECK(build_kernels(cl_, device_, context_, kernels, options, built_));
  figures_.programs = static_cast<int64_t>(built_.programs.size());
  figures_.programs_from_cache = built_.from_cache;
  figures_.build_ms = now_ms() - start;
  figures_.built_peak_bytes = peak_resident_bytes();
  placed_.reserve(bundle_.programs.size());
  TE_CHECK(allocate(common_arena(bundle_.programs)));
  for (size_t k = 0; k < bundle_.programs.size(); ++k) {
    placed_.emplace_back();
    placed_.back().program = &bundle_.programs[k];
    placed_.back().method = &bundle_.method_of(k);
    TE_CHECK(place(placed_.back()));
    if (options.hints & TORCHEDGE_RECORD) TE_CHECK(record(placed_.back()));
  }
  start = now_ms();
  TE_CHECK(load_weights());
  for (const auto& [name, value] : bundle_.hyperparameters) TE_CHECK(set(name, value));
  figures_.load_ms = now_ms() - start;
  for (cl_kernel kernel : placed_[0].calls)
    if (figures_.warp == 0) cl_.GetKernelWorkGroupInfo(kernel, device_.handle, kWarp, sizeof figures_.warp, &figures_.warp, nullptr);
  if (time_launches_ > 0) figures_.disk_ms = bundle_.weights.uncached_ms();
  return {};
}

/// A context and a queue, with hints that the device takes; one whose driver refuses them goes without.
Status Executor::open_queue(uint32_t hints) {
  const bool fast = hints & TORCHEDGE_FAST, hinted = fast || hints & TORCHEDGE_SPARING;
  cl_int code = 0;
  const cl_property plain[] = {0x1084, reinterpret_cast<cl_property>(device_.platform), 0};
  std::vector<cl_property> properties(plain, plain + 2);
  for (auto [extension, key] : {std::pair("cl_qcom_perf_hint", 0x40C2), std::pair("cl_qcom_priority_hint", 0x40C9)})
    if (hinted && device_.has(extension)) properties.insert(properties.end(), {key, key + (fast ? 1 : 3)});
  properties.push_back(0);
  if (properties.size() > 3) context_ = cl_.CreateContext(properties.data(), 1, &device_.handle, nullptr, nullptr, &code);
  if (context_ == nullptr) TE_CHECK(make(context_, "creating a context", cl_.CreateContext, plain, 1, &device_.handle, nullptr, nullptr));
  const cl_ulong flags = time_launches_ > 0 ? kProfiling : 0, priority[] = {0x1096, fast ? cl_ulong{1} : cl_ulong{4}, 0x1093, flags, 0};
  if (hinted && device_.has("cl_khr_priority_hints") && cl_.CreateCommandQueueWithProperties != nullptr)
    queue_ = cl_.CreateCommandQueueWithProperties(context_, device_.handle, priority, &code);
  return queue_ != nullptr ? Status() : make(queue_, "creating a queue", cl_.CreateCommandQueue, context_, device_.handle, flags);
}

/// Record the launches of a step once, where the device records and nothing has to be done between them.
Status Executor::record(Placed& placed) {
  bool able = device_.has("cl_qcom_recordable_queues") && cl_.NewRecordingQCOM && cl_.EndRecordingQCOM && cl_.EnqueueRecordingQCOM && cl_.ReleaseRecordingQCOM;
  if (!able || placed.program->loads || !placed.flags.empty()) return {};
  if (recorded_ == nullptr) TE_CHECK(make(recorded_, "recording a step", cl_.CreateCommandQueue, context_, device_.handle, kRecordable));
  TE_CHECK(make(placed.recording, "recording a step", cl_.NewRecordingQCOM, recorded_));
  for (size_t position = 0; position < placed.calls.size(); ++position) TE_CHECK(launch(placed, position, recorded_, false));
  cl_int code = cl_.EndRecordingQCOM(placed.recording);
  return code == 0 ? Status() : Status(failed("recording a step", code));
}

Executor::~Executor() {
  if (queue_ != nullptr) cl_.Finish(queue_);
  for (Placed& placed : placed_)
    if (placed.recording != nullptr) cl_.ReleaseRecordingQCOM(placed.recording);
  if (recorded_ != nullptr) cl_.ReleaseCommandQueue(recorded_);
  for (Placed& placed : placed_)
    for (cl_kernel kernel : placed.calls) cl_.ReleaseKernel(kernel);
  // The last one first: images before the buffers under them. In another order NVIDIA's driver 580 crashes.
  for (size_t k = allocated_.size(); k-- > 0;) cl_.ReleaseMemObject(allocated_[k]);
  for (cl_program program : built_.programs) cl_.ReleaseProgram(program);
  if (queue_ != nullptr) cl_.ReleaseCommandQueue(queue_);
  if (context_ != nullptr) cl_.ReleaseContext(context_);
}

/// What the bundle asks of the device, before anything is built or allocated.
Status Executor::check_limits(uint64_t memory_limit) const {
  auto fits = [&](const std::string& what, cl_ulong asked, cl_ulong most) -> Status {
    if (asked <= most) return {};
    return Error{what + " takes " + std::to_string(asked) + "; " + device_.title() + " takes at most " + std::to_string(most) + "; export the model for this device"};
  };
  auto image_fits = [&](const std::string& whose, cl_ulong width, cl_ulong height) -> Status {
    TE_CHECK(fits(whose + ": the width of its image", width, device_.image_width));
    return fits(whose + ": the height of its image", height, device_.image_height);
  };
  for (const Program& program : bundle_.programs) {
    for (size_t k = 0; k < program.tensors.size(); ++k) {
      const Tensor& tensor = program.tensors[k];
      std::string name = std::string(name_of(tensor.role)) + " " + tensor.name;
      const Layout& layout = tensor.form.layout;
      if (layout.image()) TE_CHECK(image_fits(name, layout.width, layout.height));
      if (tensor.form.dtype == DType::float64 && !device_.has("cl_khr_fp64"))
        return Error{name + " is float64, with which " + device_.title() + " does not compute; export the model in float32"};
      if (program.stays(k)) TE_CHECK(fits(name + ": one allocation", tensor.form.device_bytes(), device_.allocation));
    }
    for (const Slot& slot : program.arena.slots) TE_CHECK(image_fits("the arena", slot.width, slot.height));
    for (int64_t bytes : program.arena.allocations()) TE_CHECK(fits("the arena: one allocation", bytes, device_.allocation));
    for (const Kernel& kernel : program.kernels) {
      TE_CHECK(fits("kernel " + kernel.name + ": local memory in bytes", kernel.local_bytes, device_.local_bytes));
      if (kernel.source.find("cl_khr_fp16") != std::string::npos && !device_.has("cl_khr_fp16"))
        return Error{"kernel " + kernel.name + " computes with half, with which " + device_.title() + " does not; export it in float32"};
    }
    for (const Launch& launch : program.launches) {
      const std::string name = "kernel " + program.kernels[launch.kernel].name;
      size_t items = 1;
      for (size_t d = 0; d < launch.local.size(); ++d) {
        TE_CHECK(fits(name + ": a work-group's side", launch.local[d], device_.work_item_sizes[d]));
        TE_CHECK(fits(name + ": a work-group", items *= launch.local[d], device_.work_group));
      }
    }
  }
  const cl_ulong total = memory_of(bundle_.programs).at("total_bytes");
  const cl_ulong most = memory_limit > 0 ? memory_limit : device_.memory;
  if (total > most)
    return Error{bundle_.model + " takes " + std::to_string(total) + " bytes" + (bundle_.streams ? ", streaming weights by its plan; " : " with all weights on the device; ") +
                 (memory_limit > 0 ? "the limit is " : device_.title() + " has ") + std::to_string(most) +
                 ": use a limit of at least " + std::to_string(total) + (memory_limit > 0 ? "" : ", or a smaller batch")};
  return {};
}

// memory ------------------------------------------------------------------------------------------------------

Status Executor::buffer(cl_mem& memory, int64_t nbytes) {
  TE_CHECK(make(memory, "allocating " + std::to_string(nbytes) + " bytes", cl_.CreateBuffer, context_, kReadWrite, std::max<int64_t>(nbytes, 1), nullptr));
  allocated_.push_back(memory);
  figures_.allocated_bytes += nbytes;
  return {};
}

Status Executor::image(cl_mem& memory, const Form& form, int64_t width, int64_t height, cl_mem over) {
  ClImageFormat format{kRgba, form.dtype == DType::float16 ? kHalfFloat : kFloat};
  ClImageDescriptor described{};
  described.type = kImage2d;
  described.width = width;
  described.height = height;
  described.buffer = over;
  if (over != nullptr) described.row_pitch = form.layout.row_texels * 4 * size_of(form.dtype);
  const std::string doing = "allocating an image of " + std::to_string(width) + " x " + std::to_string(height) + " texels of " + name_of(form.dtype);
  TE_CHECK(make(memory, doing, cl_.CreateImage, context_, kReadWrite, &format, &described, nullptr));
  allocated_.push_back(memory);
  if (over == nullptr) figures_.allocated_bytes += width * height * 4 * size_of(form.dtype);
  return {};
}

Status Executor::own_memory(cl_mem& memory, const Form& form) {
  return form.layout.image() ? image(memory, form, form.layout.width, form.layout.height) : buffer(memory, form.device_bytes());
}

/// Memory of every tensor that is not in the arena, then of the arena, then the launches.
Status Executor::place(Placed& placed) {
  const Program& program = *placed.program;
  placed.memory.resize(program.tensors.size());
  for (size_t k = 0; k < program.tensors.size(); ++k) {
    const Tensor& tensor = program.tensors[k];
    if (!program.stays(k)) continue;
    cl_mem& memory = is_resident(tensor.role) ? shared_[tensor.name] : placed.memory[k];
    if (memory == nullptr) {
      TE_CHECK(own_memory(memory, tensor.form));
      if (tensor.role == Role::input) unset_.insert(memory);
      if (is_kept(tensor.role)) kept_.push_back({&tensor, memory});
    }
    placed.memory[k] = memory;
  }
  TE_CHECK(place_arena(placed));
  return bind(placed);
}

Status Executor::allocate(const Arena& arena) {
  arena_ = {};
  for (int64_t nbytes : arena.pieces) TE_CHECK(buffer(arena_.pieces.emplace_back(), nbytes));
  for (const Slot& slot : arena.slots)
    TE_CHECK(image(arena_.slots.emplace(slot, nullptr)->second, Form{{{}, slot.dtype}, {}}, slot.width, slot.height));
  return {};
}

/// Parts of the arena; memory of its own for what the device does not take there.
Status Executor::place_arena(Placed& placed) {
  const Program& program = *placed.program;
  const Arena& arena = program.arena;
  std::vector<cl_mem> slots;
  std::map<Slot, decltype(arena_.slots.begin())> next;
  for (const Slot& slot : arena.slots) {
    auto place = next.emplace(slot, arena_.slots.lower_bound(slot)).first;
    slots.push_back(place->second++->second);
  }
  std::map<std::array<int64_t, 3>, cl_mem> parts;
  for (auto [index, offset] : arena.offsets) {
    const Form& form = program.tensors[index].form;
    auto [piece, within] = arena.place(offset);
    int64_t nbytes = form.device_bytes();
    bool pitched = !form.layout.image() || (device_.image_from_buffer() && device_.pitch_alignment > 0 &&
                                            form.layout.row_texels % device_.pitch_alignment == 0);
    cl_mem& memory = placed.memory[index];
    if (within % static_cast<int64_t>(device_.base_alignment) != 0 || !pitched) {
      TE_CHECK(own_memory(memory, form));
    } else {
      cl_mem& part = parts[{static_cast<int64_t>(piece), within, nbytes}];
      if (part == nullptr) {
        const size_t region[2] = {static_cast<size_t>(within), static_cast<size_t>(nbytes)};
        TE_CHECK(make(part, "making a part of the arena", cl_.CreateSubBuffer, arena_.pieces[piece], kReadWrite, kRegion, region));
        allocated_.push_back(part);
      }
      memory = part;
      if (form.layout.image()) TE_CHECK(image(memory, form, form.layout.width, form.layout.height, part));
    }
  }
  for (auto [index, slot] : arena.slot_of) placed.memory[index] = slots[slot];
  return {};
}

/// Set the arguments of every launch once, and find where flags are complete.
Status Executor::bind(Placed& placed) {
  const Program& program = *placed.program;
  for (size_t k = 0; k < program.tensors.size(); ++k)
    if (program.tensors[k].flag()) placed.flags.push_back(k);
  int64_t first_update = -1;
  for (size_t position = 0; position < program.launches.size(); ++position) {
    const Launch& launch = program.launches[position];
    const Kernel& described = program.kernels[launch.kernel];
    cl_int code = 0;
    cl_kernel kernel = nullptr;
    TE_CHECK(make(kernel, "kernel " + described.name + ": creating it", cl_.CreateKernel, built_.by_kernel.at(described.name), described.name.c_str()));
    placed.calls.push_back(kernel);
    cl_uint count = 0, place = 0;
    size_t expected = launch.tensors.size() + launch.sizes.size();
    if (cl_.GetKernelInfo(kernel, kNumArgs, sizeof count, &count, nullptr) != 0 || count != expected)
      return Error{"kernel " + described.name + ": its text has " + std::to_string(count) + " arguments; program.json lists " +
                   std::to_string(expected) + ": export the model again"};
    for (int64_t index : launch.tensors)
      code |= cl_.SetKernelArg(kernel, place++, sizeof(cl_mem), &placed.memory[index]);
    for (int64_t size : launch.sizes) {
      cl_int number = static_cast<cl_int>(size);
      code |= cl_.SetKernelArg(kernel, place++, sizeof number, &number);
    }
    if (code != 0) return failed("kernel " + described.name + ": setting its arguments", code);
    for (size_t k = 0; k < launch.tensors.size(); ++k) {
      if (described.access[k] == Access::read) continue;
      const Tensor& tensor = program.tensors[launch.tensors[k]];
      if (tensor.flag()) placed.last_flag = position;
      bool trained = tensor.role == Role::parameter || (tensor.role == Role::state && is_float(tensor.form.dtype));
      if (trained && first_update < 0) first_update = position;
    }
  }
  placed.updates_before_flags = first_update >= 0 && first_update <= placed.last_flag;
  return {};
}

/// Copy bytes of a tensor at a place to the device or from there, and wait for it, or return its event.
Status Executor::transfer(const Tensor& tensor, cl_mem memory, const std::vector<int64_t>& place, int64_t nbytes, const void* source, void* target, cl_event* ended) {
  const cl_uint wait = ended == nullptr ? kTrue : kFalse;
  cl_int code = 0;
  if (tensor.form.layout.image()) {
    const size_t origin[3] = {static_cast<size_t>(place[0]), static_cast<size_t>(place[1]), 0};
    const size_t region[3] = {static_cast<size_t>(place[2]), static_cast<size_t>(place[3]), 1};
    code = source != nullptr ? cl_.EnqueueWriteImage(queue_, memory, wait, origin, region, 0, 0, source, 0, nullptr, ended)
                             : cl_.EnqueueReadImage(queue_, memory, wait, origin, region, 0, 0, target, 0, nullptr, ended);
  } else if (nbytes > 0) {
    code = source != nullptr ? cl_.EnqueueWriteBuffer(queue_, memory, wait, place[0], nbytes, source, 0, nullptr, ended)
                             : cl_.EnqueueReadBuffer(queue_, memory, wait, place[0], nbytes, target, 0, nullptr, ended);
  }
  return code == 0 ? Status() : Status(failed((source != nullptr ? "writing " : "reading ") + tensor.name, code));
}

Status Executor::transfer(const Tensor& tensor, cl_mem memory, const void* source, void* target) {
  const Layout& layout = tensor.form.layout;
  return transfer(tensor, memory, {0, 0, layout.width, layout.height}, tensor.form.packed_bytes(), source, target, nullptr);
}

Status Executor::write(const Tensor& tensor, cl_mem memory, const void* array) {
  if (!tensor.form.plain()) {
    staging_.resize(std::max<size_t>(staging_.size(), tensor.form.packed_bytes()));
    tensor.form.pack(array, staging_.data());
    array = staging_.data();
  }
  TE_CHECK(transfer(tensor, memory, array, nullptr));
  unset_.erase(memory);
  return {};
}

Status Executor::read(const Tensor& tensor, cl_mem memory, void* array) {
  if (tensor.form.plain()) return transfer(tensor, memory, nullptr, array);
  staging_.resize(std::max<size_t>(staging_.size(), tensor.form.packed_bytes()));
  TE_CHECK(transfer(tensor, memory, nullptr, staging_.data()));
  tensor.form.unpack(staging_.data(), array);
  return {};
}

Status Executor::fill(const Tensor& tensor, cl_mem memory) {
  if (!fills_exactly(tensor.form.dtype, tensor.fill))
    return Error{"state " + tensor.name + " begins at a number that its dtype does not hold exactly; export the model again"};
  return write(tensor, memory, filled(tensor.form, tensor.fill).data());
}

/// Enqueue a copy from staging memory, and wait for it, or return its event.
Status Executor::copy(const Placed& placed, const Copy& copy, cl_event* ended) {
  const Tensor& tensor = placed.program->tensors[copy.tensor];
  const char* source = ring_.data() + copy.at;
  TE_CHECK(check_booleans(tensor, source, copy.nbytes));
  return transfer(tensor, placed.memory[copy.tensor], copy.place, copy.nbytes, source, nullptr, ended);
}

/// Enqueue the copies of a run up to this number. The device computes while the next bytes are read.
Status Executor::advance(const Placed& placed, int64_t copies) {
  const std::vector<Read>& reads = placed.program->loads->run;
  while (static_cast<int64_t>(copied_.size()) < copies) {
    const Read& read = reads[read_];
    if (of_read_ == 0) {
      cl_.Flush(queue_);
      cl_int code = read.after > 0 ? cl_.WaitForEvents(1, &copied_[read.after - 1]) : 0;  // those before have ended, too: the queue is in order
      if (code != 0) return failed("loading weights", code);
      figures_.streamed_bytes += read.nbytes;
      TE_CHECK(bundle_.weights.read(read.offset, ring_.data() + read.at, read.nbytes));
    }
    cl_event ended = nullptr;
    TE_CHECK(copy(placed, read.copies[of_read_], &ended));
    copied_.push_back(ended);
    if (++of_read_ == read.copies.size()) ++read_, of_read_ = 0;
  }
  return {};
}

void Executor::end_copies() {
  for (cl_event event : copied_) cl_.ReleaseEvent(event);
  copied_.clear();
  read_ = of_read_ = 0;
}

/// Load what plans keep on the device, and check what they stream: indices by their ranges, all bytes by the digest.
Status Executor::preload() {
  TE_CHECK(bundle_.check_weights());
  ring_.resize(bundle_.programs[0].loads->staging_bytes);
  figures_.allocated_bytes += static_cast<int64_t>(ring_.size());
  std::string packed;
  std::set<cl_mem> loaded;  // by the programs before
  for (const Placed& placed : placed_) {
    for (size_t k = 0; k < placed.memory.size(); ++k) {
      const Tensor& tensor = placed.program->tensors[k];
      auto entry = bundle_.header.entries.find(tensor.name);
      if (!is_resident(tensor.role) || entry == bundle_.header.entries.end() || (tensor.role != Role::state && !tensor.indices)) continue;
      if (loaded.count(placed.memory[k])) continue;
      packed.resize(tensor.form.packed_bytes());
      TE_CHECK(bundle_.weights.read(entry->second.begin, packed.data(), packed.size()));
      TE_CHECK(check_packed(tensor, packed.data()));
      if (tensor.role == Role::state) TE_CHECK(transfer(tensor, placed.memory[k], packed.data(), nullptr));
    }
    for (const Read& read : placed.program->loads->preload) {
      if (std::all_of(read.copies.begin(), read.copies.end(), [&](const Copy& item) { return loaded.count(placed.memory[item.tensor]); })) continue;
      TE_CHECK(bundle_.weights.read(read.offset, ring_.data() + read.at, read.nbytes));
      for (const Copy& item : read.copies) TE_CHECK(copy(placed, item, nullptr));
    }
    loaded.insert(placed.memory.begin(), placed.memory.end());
  }
  return {};
}

/// Check what a weights file gives a tensor.
Status Executor::check_packed(const Tensor& tensor, const void* packed) const {
  TE_CHECK(check_booleans(tensor, packed, tensor.form.packed_bytes()));
  if (!tensor.indices) return {};
  std::string array(tensor.form.array_bytes(), '\0');
  tensor.form.unpack(packed, array.data());
  return check_values(tensor, array.data());
}

Status Executor::load_weights() {
  for (const Placed& placed : placed_)
    for (size_t k = 0; k < placed.memory.size(); ++k) {
      const Tensor& tensor = placed.program->tensors[k];
      if (tensor.role == Role::state && !bundle_.header.entries.count(tensor.name)) TE_CHECK(fill(tensor, placed.memory[k]));
    }
  if (bundle_.streams) return preload();
  std::map<std::string, std::vector<Kept>> targets;
  for (const Placed& placed : placed_)
    for (size_t k = 0; k < placed.memory.size(); ++k)
      if (is_resident(placed.program->tensors[k].role))
        targets[placed.program->tensors[k].name].push_back({&placed.program->tensors[k], placed.memory[k]});
  return bundle_.read_weights([&](const std::string& name, const void* data) -> Status {
    cl_mem last = nullptr;
    for (auto& [tensor, memory] : targets[name]) {
      TE_CHECK(check_packed(*tensor, data));
      if (memory != last) TE_CHECK(transfer(*tensor, memory, data, nullptr));
      last = memory;
    }
    return {};
  });
}

// steps -------------------------------------------------------------------------------------------------------

Status Executor::check_values(const Tensor& tensor, const void* array) const {
  TE_CHECK(check_booleans(tensor, array, tensor.form.array_bytes()));
  if (!tensor.indices || is_float(tensor.form.dtype)) return {};
  for (int64_t k = 0; k < tensor.form.elements(); ++k) {
    int64_t value = element_of<int64_t>(tensor.form.dtype, array, k);
    if (tensor.indices->holds(value)) continue;
    const IndexRange& range = *tensor.indices;
    return Error{tensor.name + " holds " + std::to_string(value) + " at element " + std::to_string(k) + "; expected classes or indices from " +
                 std::to_string(range.low) + " to " + std::to_string(range.high - 1) +
                 (range.ignored ? ", or " + std::to_string(*range.ignored) + " (ignored)" : "") + ": correct the data"};
  }
  return {};
}

Result<size_t> Executor::find(const std::string& method) const {
  for (size_t k = 0; k < bundle_.methods.size(); ++k)
    if (method.empty() || bundle_.methods[k].name == method) return k;
  return Error{"there is no method " + method + "; expected one of " + names_of(bundle_.methods)};
}

Status Executor::set_input(const std::string& method, const std::string& name, const void* data, int64_t nbytes) {
  TE_TRY(number, find(method));
  const std::vector<Port>& inputs = bundle_.methods[number].inputs;
  for (size_t port = 0; port < inputs.size(); ++port) {
    if (inputs[port].name != name) continue;
    TE_CHECK(check_size(name, inputs[port], nbytes));
    for (const Placed& placed : placed_)
      if (placed.method == &bundle_.methods[number]) TE_CHECK(feed(placed, port, data));
    return {};
  }
  return Error{"there is no input " + name + "; expected one of " + names_of(inputs)};
}

/// Check and write an input of a program.
Status Executor::feed(const Placed& placed, size_t port, const void* array) {
  const int64_t index = placed.program->fed()[port];
  TE_CHECK(check_values(placed.program->tensors[index], array));
  return write(placed.program->tensors[index], placed.memory[index], array);
}

Status Executor::set(const std::string& name, double value) {
  if (!bundle_.hyperparameters.count(name)) {
    std::string names;
    for (const auto& [own, number] : bundle_.hyperparameters) names += (names.empty() ? "" : ", ") + own;
    return Error{"there is no hyperparameter " + name + "; expected " + (names.empty() ? "none" : "one of " + names)};
  }
  for (const Placed& placed : placed_) {
    auto item = placed.program->hyperparameters.find(name);
    if (item == placed.program->hyperparameters.end()) continue;
    const Tensor& tensor = placed.program->tensors[item->second];
    float single = static_cast<float>(value);
    const void* number = tensor.form.dtype == DType::float64 ? static_cast<const void*>(&value) : &single;
    TE_CHECK(write(tensor, placed.memory[item->second], number));
  }
  bundle_.hyperparameters[name] = value;
  return {};
}

/// Enqueue a launch. timed: run it several times in a row, three times or for 30 ms and no more often than asked.
Status Executor::launch(const Placed& placed, size_t position, cl_queue queue, bool timed) {
  const Launch& launch = placed.program->launches[position];
  const size_t* local = launch.local.empty() ? nullptr : launch.local.data();
  auto start = [&](cl_event* ended) {
    return cl_.EnqueueNDRangeKernel(queue, placed.calls[position], launch.global.size(), nullptr, launch.global.data(), local, 0, nullptr, ended);
  };
  cl_int code = timed ? 0 : start(nullptr);
  if (timed) figures_.launch_ns.resize(placed.calls.size(), UINT64_MAX);
  cl_ulong spent = 0;
  for (int run = 0; timed && code == 0 && run < time_launches_ && (run < 3 || spent < 30'000'000); ++run) {
    cl_event ended = nullptr;
    cl_ulong from = 0, to = 0;
    code = start(&ended);
    if (code == 0) code = cl_.WaitForEvents(1, &ended);
    if (code == 0) code = cl_.GetEventProfilingInfo(ended, kStart, sizeof from, &from, nullptr);
    if (code == 0) code = cl_.GetEventProfilingInfo(ended, kEnd, sizeof to, &to, nullptr);
    if (ended != nullptr) cl_.ReleaseEvent(ended);
    const cl_ulong ns = to > from ? to - from : 1;
    if (code == 0) figures_.launch_ns[position] = std::min(figures_.launch_ns[position], ns), spent += ns;
  }
  if (code == 0) return {};
  const std::string& name = placed.program->kernels[launch.kernel].name;
  return failed("launch " + std::to_string(position) + ", kernel " + name + (launch.scope.empty() ? "" : " of " + launch.scope) + ",", code);
}

/// Enqueue all launches of a step, and the copies that each waits for.
Status Executor::enqueue(const Placed& placed, const std::function<Status(int64_t)>& observe) {
  if (placed.recording != nullptr && !observe && time_launches_ == 0) {
    cl_int code = cl_.EnqueueRecordingQCOM(queue_, placed.recording, 0, nullptr, 0, nullptr, 0, nullptr, 0, nullptr, 0, nullptr, nullptr);
    return code == 0 ? Status() : Status(failed("a recorded step", code));
  }
  for (size_t position = 0; position < placed.calls.size(); ++position) {
    if (placed.program->loads) TE_CHECK(advance(placed, placed.program->loads->waits[position]));
    TE_CHECK(launch(placed, position, queue_, time_launches_ > 0 && &placed == &placed_[0] && !observe));
    if (observe) {
      TE_CHECK(observe(position));
      continue;
    }
    // The launches that update weights come later, and do not run where a flag is set.
    if (static_cast<int64_t>(position) == placed.last_flag) {
      Status status = check_flags(placed);
      batches_ += !status.ok() && placed.updates_before_flags;
      TE_CHECK(std::move(status));
    }
  }
  return {};
}

Status Executor::step(const std::string& method) {
  TE_TRY(number, find(method));
  columns_.clear();
  bool completes = (batches_ + 1) % bundle_.accumulation == 0;
  return run(placed_[completes ? number : placed_.size() - 1]);
}

Status Executor::run(const Placed& placed) {
  for (int64_t index : placed.program->inputs)
    if (unset_.count(placed.memory[index]))
      return Error{"nothing was written to input " + placed.program->tensors[index].name + "; set all inputs before a step"};
  double start = now_ms();
  last_ = nullptr;
  figures_.streamed_bytes = 0;
  Status status = enqueue(placed);
  cl_int code = cl_.Finish(queue_);  // also of a step that failed: what it enqueued must not run into the next one
  end_copies();
  TE_CHECK(std::move(status));
  if (code != 0) return failed("running a step", code);
  last_ = &placed;
  ++batches_;
  figures_.step_ms = now_ms() - start;
  if (figures_.steps < kRecentSteps) figures_.recent_ms.push_back(figures_.step_ms);
  else figures_.recent_ms[figures_.steps % kRecentSteps] = figures_.step_ms;
  ++figures_.steps;
  figures_.total_step_ms += figures_.step_ms;
  return {};
}

Status Executor::check_flags(const Placed& placed) {
  for (int64_t index : placed.flags) {
    const Tensor& tensor = placed.program->tensors[index];
    std::string flag(std::max<int64_t>(tensor.form.array_bytes(), 1), '\0');
    TE_CHECK(read(tensor, placed.memory[index], flag.data()));
    if (flag.find_first_not_of('\0') == std::string::npos) continue;
    std::string state = placed.updates_before_flags ? "; load the weights again: this step has updated some of them" : "; this step has updated nothing";
    if (tensor.divisor) return Error{"whole numbers are divided by zero at " + tensor.name + ": correct the data or the model" + state};
    return Error{tensor.name + ", computed by the model, holds an index out of range: correct the data or the model" + state};
  }
  return {};
}

Status Executor::read(const std::string& name, void* data, int64_t nbytes) {
  auto get = [&](const Tensor& tensor, cl_mem memory) -> Status {
    TE_CHECK(check_size(name, tensor.form, nbytes));
    return read(tensor, memory, data);
  };
  for (const Method& method : bundle_.methods)
    for (size_t port = 0; port < method.outputs.size(); ++port) {
      if (method.outputs[port].name != name || (last_ != nullptr && last_->method != &method)) continue;
      if (last_ == nullptr) return Error{"there are no outputs; run a step first"};
      int64_t index = last_->program->outputs[port];
      return get(last_->program->tensors[index], last_->memory[index]);
    }
  for (auto [tensor, memory] : kept_)
    if (tensor->name == name) return get(*tensor, memory);
  return Error{"there is no output, parameter, buffer or state " + name + "; torchedge_describe lists them"};
}

// saved state -------------------------------------------------------------------------------------------------

Status Executor::save(const std::string& path) {
  std::vector<FileTensor> tensors;
  for (const Kept& each : kept_)
    tensors.push_back({{each.tensor->form}, each.tensor->name, [this, each](void* data) { return read(*each.tensor, each.memory, data); }});
  std::map<std::string, std::string> metadata = {{"schema", "torchedge-state-1"}, {"batches", std::to_string(batches_)}};
  for (const auto& [name, value] : bundle_.hyperparameters) metadata["hyperparameter." + name] = number_text(value);
  return write_tensors(path, std::move(tensors), metadata);
}

Status Executor::load(const std::string& path) {
  TE_TRY(file, File::open(path));
  TE_TRY(header, read_file_header(file));
  std::vector<const Tensor*> tensors, streamed;
  size_t states = 0, held = 0;
  for (const Kept& each : kept_) {
    tensors.push_back(each.tensor);
    if (each.tensor->role == Role::state) ++states, held += header.entries.count(each.tensor->name);
  }
  for (const Program& program : bundle_.programs)
    for (size_t k = 0; k < program.tensors.size(); ++k)
      if (is_kept(program.tensors[k].role) && program.in_arena(k) && header.entries.count(program.tensors[k].name)) streamed.push_back(&program.tensors[k]);
  tensors.insert(tensors.end(), streamed.begin(), streamed.end());
  TE_CHECK(check_entries(path, header, tensors, false, "; expected a state of this model"));  // before anything is written
  if (held != 0 && held != states) return Error{path + ": holds " + std::to_string(held) + " of " + std::to_string(states) + " states; expected all, or none to begin anew"};
  int64_t batches = 0;
  std::map<std::string, double> numbers;
  for (const auto& [key, text] : header.metadata) {
    if (key != "batches" && key.rfind("hyperparameter.", 0) != 0) continue;
    TE_TRY(document, Document::parse(path + " (metadata)", "{\"value\":" + text + "}"));
    Entry value = document.root().at("value");
    if (key == "batches") batches = value.integer(0, INT64_MAX / 2);
    else numbers[key.substr(15)] = value.number();
    TE_CHECK(document.status());
    if (key != "batches" && !bundle_.hyperparameters.count(key.substr(15)))
      return Error{path + ": sets " + key.substr(15, 80) + ", which is no hyperparameter of this model"};
  }
  std::string data, packed, own;
  for (const Tensor* tensor : streamed) {
    data.resize(tensor->form.array_bytes());
    own.resize(data.size());
    packed.resize(tensor->form.packed_bytes());
    TE_CHECK(file.read(header.entries.at(tensor->name).begin, data.data(), data.size()));
    TE_CHECK(bundle_.weights.read(bundle_.header.entries.at(tensor->name).begin, packed.data(), packed.size()));
    tensor->form.unpack(packed.data(), own.data());
    if (data != own) return Error{path + ": holds " + tensor->name + " with other numbers than the bundle's file, from which it is read; expected the same"};
  }
  columns_.clear();
  for (const Kept& each : kept_) {
    const Tensor& tensor = *each.tensor;
    auto entry = header.entries.find(tensor.name);
    if (entry == header.entries.end()) {
      TE_CHECK(fill(tensor, each.memory));
      continue;
    }
    data.resize(std::max<size_t>(data.size(), tensor.form.array_bytes()));
    TE_CHECK(file.read(entry->second.begin, data.data(), tensor.form.array_bytes()));
    TE_CHECK(check_values(tensor, data.data()));
    TE_CHECK(write(tensor, each.memory, data.data()));
  }
  for (const auto& [name, value] : numbers) TE_CHECK(set(name, value));
  batches_ = batches;
  return {};
}

}  // namespace torchedge
