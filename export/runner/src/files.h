// Files: read within a folder and never beyond it, hashed, and written so that a kill leaves the old or the new one.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "result.h"

namespace torchedge {

/// SHA-256 by the library that CMake found (libcrypto or mbedTLS).
class Sha256 {
 public:
  Sha256();
  Sha256(const Sha256&) = delete;
  Sha256& operator=(const Sha256&) = delete;
  void update(const void* data, size_t size);
  void update(std::string_view text) { update(text.data(), text.size()); }
  std::string bytes();
  std::string hex();

 private:
  struct State;
  std::shared_ptr<State> state_;
};

std::string sha256_of(std::string_view text);

/// A text of a C caller; NULL is the empty one.
inline std::string given(const char* text) { return text == nullptr ? "" : text; }

/// Eight bytes, the lowest first.
std::string bytes_of(uint64_t number);

/// A file or folder that is open, closed at the end.
class File {
 public:
  File() = default;
  File(int descriptor, std::string name) : descriptor_(descriptor), name_(std::move(name)) {}
  File(File&& other) noexcept;
  File& operator=(File&& other) noexcept;
  ~File();

  /// Open a regular file; a pipe or a device, which could block, is refused.
  static Result<File> open(const std::string& path);
  /// Open `name`, or `folder/name`, below this folder. Links are refused: they could lead out of it.
  Result<File> below(const std::string& name) const;
  static Result<File> folder(const std::string& path);

  const std::string& name() const { return name_; }
  int64_t size() const { return size_; }
  /// Read exactly so many bytes at an offset.
  Status read(int64_t offset, void* data, size_t size) const;
  /// The time that reading all of it takes past the page cache, in ms; 0 where it cannot be opened so.
  double uncached_ms() const;
  /// Read all of it; more than `most` bytes are refused before.
  Result<std::string> read_all(int64_t most) const;

 private:
  /// Open a name below a folder's descriptor; flags: O_DIRECTORY and O_NOFOLLOW, or none of them.
  static Result<File> at(int folder, const std::string& name, std::string shown, int flags);

  int descriptor_ = -1;
  int64_t size_ = 0;
  std::string name_;
};

/// The largest resident set of this process since it began, in bytes; 0 where the system does not report it.
int64_t peak_resident_bytes();

/// Receives the bytes of a file in order.
using Sink = std::function<Status(const void* data, size_t size)>;

/// Write a file beside its place, flush it to the disk, and rename it: a reader sees the old file or the new one.
Status write_atomically(const std::string& path, const std::function<Status(const Sink&)>& content);

}  // namespace torchedge
