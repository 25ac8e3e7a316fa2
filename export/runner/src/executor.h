// The executor: a bundle's memory on a device, its launches with their arguments set, one call a step.
#pragma once

#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "builds.h"
#include "bundle.h"
#include "opencl.h"
#include "torchedge.h"

namespace torchedge {

/// The tokens of several texts at one place; kNone before a text begins.
using Column = std::vector<int64_t>;
constexpr int64_t kNone = INT64_MIN;

constexpr int64_t kRecentSteps = 1000;

struct Figures {
  int64_t steps = 0, allocated_bytes = 0, programs = 0, programs_from_cache = 0;
  int64_t streamed_bytes = 0;  // by the last step
  int64_t built_peak_bytes = 0;  // the process's largest resident set when all kernels were built
  double build_ms = 0, load_ms = 0, step_ms = 0, total_step_ms = 0;
  size_t warp = 0;           // work-items in lock-step, of the first launch's kernel
  double disk_ms = 0;        // of a read of the weights file past the page cache
  std::vector<cl_ulong> launch_ns;  // shortest time of each launch of the whole step, by the device's clock
  std::vector<double> recent_ms;  // times of the last kRecentSteps, in no order
};

/// Runs a bundle; weights and optimizer state stay on the device from step to step.
class Executor {
 public:
  explicit Executor(Bundle bundle) : bundle_(std::move(bundle)) {}
  ~Executor();
  /// Build, allocate and load everything, before any other call; a bundle that the device does not take is refused before.
  Status open(const torchedge_options& options);

  const Bundle& bundle() const { return bundle_; }
  const ClDevice& device() const { return device_; }
  const Figures& figures() const { return figures_; }
  /// Hyperparameters as they are now.
  const std::map<std::string, double>& hyperparameters() const { return bundle_.hyperparameters; }

  /// A tensor that stays on the device, and its memory.
  struct Kept {
    const Tensor* tensor;
    cl_mem memory;
  };
  /// Tensors that a saved state has: parameters, buffers and states, by the programs that hold them first.
  const std::vector<Kept>& kept() const { return kept_; }

  /// Write an input of a method (empty: the first one); it stays until it is written again.
  Status set_input(const std::string& method, const std::string& name, const void* data, int64_t nbytes);
  Status set(const std::string& name, double value);
  /// Run one batch of a method (empty: the first one); with accumulation N every N-th updates weights.
  Status step(const std::string& method);
  /// Return the tokens that follow each prompt, by a language model's methods: generation.cpp.
  Result<std::vector<std::vector<int64_t>>> generate(std::vector<std::vector<int64_t>> prompts, size_t most, const torchedge_sampling& sampling);
  /// Read an output of the last step, or a parameter, buffer or state.
  Status read(const std::string& name, void* data, int64_t nbytes);
  /// Compare what each launch of a batch writes with the bundle's check.json; the handle has run that batch then.
  Result<Json> check();
  Status save(const std::string& path);
  Status load(const std::string& path);

 private:
  /// A program on the device: the memory of its tensors and the kernels of its launches.
  struct Placed {
    const Program* program;
    const Method* method;
    std::vector<cl_mem> memory;    // by tensor; none where no launch touches it
    std::vector<cl_kernel> calls;  // by launch
    std::vector<int64_t> flags;
    int64_t last_flag = -1;        // the launch that writes the last of them
    bool updates_before_flags = false;
    cl_recording recording = nullptr;  // of all calls
  };

  /// The allocations of an arena.
  struct ArenaMemory {
    std::vector<cl_mem> pieces;
    std::multimap<Slot, cl_mem> slots;
  };

  Status check_limits(uint64_t memory_limit) const;
  Status place(Placed& placed);
  Status allocate(const Arena& arena);
  Status place_arena(Placed& placed);
  Status bind(Placed& placed);
  Status open_queue(uint32_t hints);
  Status launch(const Placed& placed, size_t position, cl_queue queue, bool timed);
  Status record(Placed& placed);
  Status load_weights();
  Status preload();
  Status copy(const Placed& placed, const Copy& copy, cl_event* ended);
  Status advance(const Placed& placed, int64_t copies);
  void end_copies();
  /// Enqueue a step's launches; `observe` is called after each, where it is given, and flags are not read then.
  Status enqueue(const Placed& placed, const std::function<Status(int64_t position)>& observe = nullptr);
  Status fill(const Tensor& tensor, cl_mem memory);
  Status buffer(cl_mem& memory, int64_t nbytes);
  Status image(cl_mem& memory, const Form& form, int64_t width, int64_t height, cl_mem over = nullptr);
  Status own_memory(cl_mem& memory, const Form& form);
  Status transfer(const Tensor& tensor, cl_mem memory, const std::vector<int64_t>& place, int64_t nbytes, const void* source, void* target, cl_event* ended);
  Status transfer(const Tensor& tensor, cl_mem memory, const void* source, void* target);
  Status write(const Tensor& tensor, cl_mem memory, const void* array);
  Status read(const Tensor& tensor, cl_mem memory, void* array);
  Status check_values(const Tensor& tensor, const void* array) const;
  Status check_packed(const Tensor& tensor, const void* packed) const;
  Status check_flags(const Placed& placed);
  Error failed(const std::string& doing, cl_int code) const;
  /// Create an object by a function of OpenCL, whose last argument is its error.
  template <class Object, class Function, class... Arguments>
  Status make(Object& object, const std::string& doing, Function create, Arguments... arguments) const {
    cl_int code = 0;
    object = create(arguments..., &code);
    return object == nullptr ? Status(failed(doing, code)) : Status();
  }
  /// The place of a method among those of the bundle.
  Result<size_t> find(const std::string& method) const;
  Status run(const Placed& placed);
  Status feed(const Placed& placed, size_t port, const void* array);
  Status run_on(const Placed& placed, const std::vector<const int64_t*>& arrays, void* output);
  size_t shortest(size_t number, size_t end) const;
  Status run_tokens(const std::vector<Column>& columns, size_t begin, size_t chunk, const std::vector<int64_t>& begins, std::vector<float>& logits);

  Bundle bundle_;
  ClLibrary cl_{};
  ClDevice device_{};
  cl_context context_ = nullptr;
  cl_queue queue_ = nullptr, recorded_ = nullptr;  // the second one records
  Built built_;
  std::vector<cl_mem> allocated_;
  ArenaMemory arena_;  // of all programs
  std::map<std::string, cl_mem> shared_;
  std::vector<Kept> kept_;
  std::set<cl_mem> unset_;  // inputs that nothing was written to
  std::vector<Placed> placed_;
  const Placed* last_ = nullptr;
  std::string staging_;
  // Of a run that streams: staging memory, how far it is, and the events of its copies.
  std::vector<char> ring_;
  size_t read_ = 0, of_read_ = 0;
  std::vector<cl_event> copied_;
  int64_t batches_ = 0;
  std::vector<Column> columns_;  // of the tokens whose keys and values the caches hold
  int time_launches_ = 0;
  Figures figures_;
};

}  // namespace torchedge
