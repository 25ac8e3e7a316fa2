// A bundle's programs as plain data, each number in range: docs/bundle-format.md.
#pragma once

#include <map>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "tensors.h"

namespace torchedge {

enum class Role { input, parameter, buffer, state, constant, output, intermediate };
const char* name_of(Role role);
/// Whether a step may change tensors of this role, which stay from step to step.
inline bool is_kept(Role role) { return role == Role::parameter || role == Role::buffer || role == Role::state; }
/// Whether tensors of this role stay from step to step: programs of one bundle share them by name.
inline bool is_resident(Role role) { return is_kept(role) || role == Role::constant; }

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
  bool operator<(const Slot& other) const { return std::tie(width, height, dtype) < std::tie(other.width, other.height, other.dtype); }
};

struct Arena {
  int64_t nbytes = 0, live_bytes = 0;
  std::map<int64_t, int64_t> offsets, slot_of;
  std::vector<Slot> slots;
  std::vector<int64_t> pieces;  // bytes of each buffer; none where the arena is empty

  /// Bytes of each allocation: the pieces, then the images of the slots.
  std::vector<int64_t> allocations() const;

  /// The piece in which a byte lies, and its place there.
  std::pair<size_t, int64_t> place(int64_t offset) const;
};

/// Bytes of staging memory that go to a tensor. after: launches of the run that end before.
struct Copy {
  int64_t tensor, after, at, nbytes;
  std::vector<int64_t> place;  // [byte] of a buffer; [x, y, width, height] in texels of an image
};

/// Bytes of the weights file that go to staging memory. after: copies of the run that end before.
struct Read {
  int64_t offset, nbytes, at, after;
  std::vector<Copy> copies;
};

/// How weights come to the device: `preload` before the first run, `run` in each; waits: the copies that end before
/// each launch.
struct Loads {
  int64_t staging_bytes = 0;
  std::vector<Read> preload, run;
  std::vector<int64_t> waits;
  std::map<int64_t, std::pair<int64_t, int64_t>> streamed;  // a tensor's first and last copy of a run, from 1 on
};

inline const std::vector<const char*> kClasses = {"cpu", "gpu", "mobile"};

struct Program {
  std::vector<Tensor> tensors;
  std::vector<Kernel> kernels;
  std::vector<Launch> launches;
  std::vector<int64_t> inputs, outputs;
  std::map<std::string, int64_t> hyperparameters;
  Arena arena;
  std::optional<Loads> loads;  // of a program that streams its weights
  int target = 0;  // the device class, a place in kClasses

  bool in_arena(int64_t index) const { return arena.offsets.count(index) || arena.slot_of.count(index); }
  /// Whether it has memory of its own, from step to step.
  bool stays(int64_t index) const { return tensors[index].role != Role::intermediate && !in_arena(index) && !absent.count(index); }
  std::set<int64_t> absent;  // weights that a streaming run does not use

  /// Inputs that are no hyperparameters, in order.
  std::vector<int64_t> fed() const;
};

/// An arena that serves each of several programs, of which one runs at a time.
Arena common_arena(const std::vector<Program>& programs);

/// Place what lies in an arena's buffers anew, in buffers of at most so many bytes where the tensors allow it.
void split_arena(Program& program, int64_t most, int64_t alignment);

/// Read a program; `files`: texts by name, those of its kernels among them.
Result<Program> read_program(const std::string& name, const std::string& text, const std::map<std::string, std::string>& files);

/// Check that a file holds each tensor, packed or as an array, and nothing else; states may be absent.
Status check_entries(const std::string& path, const FileHeader& header, const std::vector<const Tensor*>& tensors, bool packed, const std::string& advice);

/// Give a program the parts of weights, the loads and the arena of its streaming plan, checked: `header` and `nbytes` are
/// the weights file's.
Status read_plan(const std::string& name, const std::string& text, const FileHeader& header, int64_t nbytes, Program& program);

/// Give a program the arena of a document, in which streamed weights have places, too.
void read_arena(const Entry& entry, Program& program);

}  // namespace torchedge
