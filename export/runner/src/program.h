// A bundle's programs as plain data, each number in range: docs/bundle-format.md.
#pragma once

#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "tensors.h"

namespace torchedge {

enum class Role { input, parameter, buffer, state, constant, output, intermediate };
const char* name_of(Role role);
/// Whether programs of one bundle share tensors of this role by name.
inline bool is_shared(Role role) { return role == Role::parameter || role == Role::buffer || role == Role::state; }
/// Whether tensors of this role stay from step to step.
inline bool is_resident(Role role) { return is_shared(role) || role == Role::constant; }

enum class Access { read, write, update };

/// Whole numbers that a tensor may hold: from low on and below high, or ignored.
struct IndexRange {
  int64_t low, high;
  std::optional<int64_t> ignored;
  bool holds(int64_t value) const { return (low <= value && value < high) || value == ignored; }
};

struct Tensor {
  std::string name;
  Form form;
  Role role;
  double fill = 0;
  std::optional<IndexRange> indices;
  bool divisor = false;

  /// Whether a step that sets it is an error.
  bool flag() const { return role == Role::output && (indices || divisor); }
};

struct Kernel {
  std::string name, source;
  std::vector<Access> access;
  std::set<std::pair<int64_t, int64_t>> in_place;  // an argument read and one written that may be the same memory
  int64_t sizes = 0, local_bytes = 0;
};

struct Launch {
  size_t kernel;
  std::vector<int64_t> tensors, sizes;
  std::vector<size_t> global, local;  // local: empty where the driver chooses
  std::string scope;
};

struct Slot {
  int64_t width, height;
  DType dtype;
};

struct Arena {
  int64_t nbytes = 0, live_bytes = 0;
  std::map<int64_t, int64_t> offsets, slot_of;
  std::vector<Slot> slots;
  std::vector<int64_t> pieces;  // bytes of each buffer; none where the arena is empty

  /// The piece in which a byte lies, and its place there.
  std::pair<size_t, int64_t> place(int64_t offset) const;
};

constexpr std::initializer_list<const char*> kClasses = {"cpu", "gpu", "mobile"};

struct Program {
  std::vector<Tensor> tensors;
  std::vector<Kernel> kernels;
  std::vector<Launch> launches;
  std::vector<int64_t> inputs, outputs;
  std::map<std::string, int64_t> hyperparameters;
  Arena arena;
  int target = 0;  // the device class, a place in kClasses

  /// Inputs that are no hyperparameters, in order.
  std::vector<int64_t> fed() const;
};

/// Read a program; `sources`: the kernels' texts by name.
Result<Program> read_program(const std::string& name, const std::string& text,
                             const std::map<std::string, std::string>& sources);

}  // namespace torchedge
