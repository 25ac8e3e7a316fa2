// Tensors: dtypes, layouts on the device, and safetensors files.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "files.h"
#include "json.h"
#include "result.h"

namespace torchedge {

enum class DType { float32, float16, float64, int64, int32, int16, int8, uint8, boolean, uint32 };

const char* name_of(DType dtype);
/// Its name in safetensors files.
const char* code_of(DType dtype);
int64_t size_of(DType dtype);
DType read_dtype(const Entry& entry);

using Shape = std::vector<int64_t>;
constexpr int64_t kMaxSize = int64_t{1} << 40;
constexpr size_t kMaxRank = 16;
constexpr int64_t kMaxExtent = int64_t{1} << 20;

/// The product, or kMaxSize + 1 where it is larger than kMaxSize.
int64_t product(const int64_t* begin, const int64_t* end);
inline int64_t product(const Shape& shape) { return product(shape.data(), shape.data() + shape.size()); }

enum class Storage { buffer, image, image_buffer };

/// Where the elements of a tensor lie on the device: docs/bundle-format.md, "program.json".
struct Layout {
  std::vector<int64_t> order;
  Storage storage = Storage::buffer;
  int64_t split = 0, fold = 1, row_texels = 0;
  int pattern = 0;  // a place in kPatterns

  // What follows from a shape.
  int64_t steps = 1, lines = 1, width = 1, height = 1;

  bool image() const { return storage != Storage::buffer; }
  /// Check it against a shape and compute what follows; errors go to the entry.
  void settle(const Entry& entry, const Shape& shape);
  /// Column and row of a texel.
  std::pair<int64_t, int64_t> place(int64_t step, int64_t line) const;
};
Layout read_layout(const Entry& entry, const Shape& shape);

/// What a tensor is, apart from its role in a program.
struct Form {
  Shape shape;
  DType dtype = DType::float32;
  Layout layout;

  int64_t elements() const { return product(shape); }
  /// Bytes of an array as callers have it: dense, in the order of the dimensions.
  int64_t array_bytes() const { return elements() * size_of(dtype); }
  /// Bytes of what is copied to the device.
  int64_t packed_bytes() const;
  /// Bytes on the device: an empty buffer takes an element, rows of an image_buffer are apart.
  int64_t device_bytes() const;
  /// Its shape in files: in memory's order, or (height, width, 4).
  Shape packed_shape() const;
  /// Whether the packed form is the array itself.
  bool plain() const;
  void pack(const void* array, void* packed) const;
  void unpack(const void* packed, void* array) const;
  std::string text() const;
};

/// One tensor of a safetensors file: its bytes are begin to end of the file.
struct FileEntry {
  DType dtype;
  Shape shape;
  int64_t begin, end;
};

struct FileHeader {
  std::map<std::string, std::string> metadata;
  std::map<std::string, FileEntry> entries;
  int64_t begin = 0;  // of the first tensor
};

/// Read the header of a safetensors file; tensors have to fill the file without gaps or overlaps.
Result<FileHeader> read_file_header(const File& file);

/// A tensor to write, and where its bytes come from: `read` fills as many as its shape and dtype have.
struct FileTensor {
  std::string name;
  DType dtype;
  Shape shape;
  std::function<Status(void*)> read;
};
/// Write a safetensors file atomically, wide dtypes first and then by name: the bytes that Python's writer gives.
Status write_tensors(const std::string& path, std::vector<FileTensor> tensors,
                     const std::map<std::string, std::string>& metadata);

}  // namespace torchedge
