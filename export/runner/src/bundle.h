// A bundle's folder, read and checked: what is returned is what was hashed.
#pragma once

#include <array>
#include <map>
#include <string>
#include <vector>

#include "program.h"

namespace torchedge {

/// A tensor that a caller feeds or gets.
struct Port : Array {
  std::string name;

  bool operator==(const Port& other) const { return Array::operator==(other) && name == other.name; }
};

/// What a step runs: one of the programs, and its ports.
struct Method {
  std::string name, file;
  std::vector<Port> inputs, outputs;
  std::map<std::string, int64_t> memory;  // bytes that it takes alone, as the manifest says
};

struct BundleFile {
  std::string sha256;
  int64_t nbytes;
};

/// What a launch wrote to a tensor on the exporting machine: check.json.
struct Checked {
  int64_t launch, tensor;
  std::string sha256;
  std::array<double, 6> figures, bounds;
};

struct Check {
  std::string device;
  std::vector<std::vector<Checked>> results;  // by program; empty where the bundle has none
};

struct Bundle {
  std::string path, model, made_for, sha256;
  bool trains = false, streams = false;
  bool several = false;  // methods that the manifest lists; else there is one, called as the mode
  int64_t accumulation = 1;
  std::vector<Method> methods;
  std::map<std::string, double> hyperparameters;
  std::map<std::string, int64_t> memory;  // bytes that a run takes, as the manifest says
  int device_class = 0;
  std::map<std::string, BundleFile> files;
  std::vector<Program> programs;  // by method; then, with accumulation above 1, the step that only adds up gradients
  Check check;
  File weights;
  FileHeader header;

  /// The method of a program.
  const Method& method_of(size_t program) const { return methods[several ? program : 0]; }
  /// The files of the programs.
  std::vector<std::string> program_files() const;
  /// Read the weights from front to back, hashing them, and pass on the bytes of each tensor; a file that changed
  /// since the bundle was made is an error after the last one.
  Status read_weights(const std::function<Status(const std::string& name, const void* data)>& take) const;
  /// Hash the weights file in small pieces: what a plan streams is then read from the same open file.
  Status check_weights() const;
};

/// Bytes of device memory of programs, as a manifest has them; streamed weights lie in the arena.
std::map<std::string, int64_t> memory_of(const std::vector<Program>& programs);

/// Read a bundle's check.json.
Status read_check(const std::string& name, const std::string& text, Bundle& bundle);

/// Read a bundle. sha256: what the manifest's own digest has to be, empty for any.
Result<Bundle> open_bundle(const std::string& folder, const std::string& sha256);

}  // namespace torchedge
