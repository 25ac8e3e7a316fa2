// Tensors: dtypes, layouts on the device, and safetensors files.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <map>
#include <string>
#include <tuple>
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
inline bool is_float(DType dtype) { return dtype <= DType::float64; }
/// Read a dtype; coded: by its name in safetensors files.
DType read_dtype(const Entry& entry, bool coded = false);

/// A number of float16: its bits.
struct Half {
  uint16_t bits = 0;
  /// Half of a number from 0 to 65504 that it holds exactly, and is 0 or at least 2^-14.
  static Half of(double value);
  operator double() const;
};

/// Call a function with a number of a dtype's type; of booleans with a byte.
template <class Function>
auto with_type(DType dtype, Function function) {
  switch (dtype) {
    case DType::float32: return function(float{});
    case DType::float16: return function(Half{});
    case DType::float64: return function(double{});
    case DType::int64: return function(int64_t{});
    case DType::int32: return function(int32_t{});
    case DType::int16: return function(int16_t{});
    case DType::int8: return function(int8_t{});
    case DType::uint32: return function(uint32_t{});
    default: return function(uint8_t{});
  }
}

/// Element k of an array as a number of this type.
template <class Number>
Number element_of(DType dtype, const void* array, int64_t k) {
  return with_type(dtype, [&](auto element) {
    std::memcpy(&element, static_cast<const char*>(array) + k * sizeof element, sizeof element);
    return static_cast<Number>(element);
  });
}

/// Make element k of an array a number, which its dtype holds exactly.
template <class Number>
void put_element(DType dtype, void* array, int64_t k, Number number) {
  with_type(dtype, [&](auto element) {
    if constexpr (std::is_same_v<decltype(element), Half>) element = Half::of(static_cast<double>(number));
    else element = static_cast<decltype(element)>(number);
    std::memcpy(static_cast<char*>(array) + k * sizeof element, &element, sizeof element);
  });
}

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

  bool operator==(const Layout& other) const {
    return std::tie(order, storage, split, fold, pattern, row_texels) ==
           std::tie(other.order, other.storage, other.split, other.fold, other.pattern, other.row_texels);
  }
  bool image() const { return storage != Storage::buffer; }
  /// Column and row of a texel.
  std::pair<int64_t, int64_t> place(int64_t step, int64_t line) const;
};
/// Read a layout, check it against a shape and compute what follows.
Layout read_layout(const Entry& entry, const Shape& shape);

/// An array as callers have it: dense, in the order of the dimensions.
struct Array {
  Shape shape;
  DType dtype = DType::float32;

  bool operator==(const Array& other) const { return shape == other.shape && dtype == other.dtype; }
  int64_t elements() const { return product(shape); }
  int64_t array_bytes() const { return elements() * size_of(dtype); }
  std::string text() const;
};

/// What a tensor is, apart from its role in a program.
struct Form : Array {
  Layout layout;

  bool operator==(const Form& other) const { return Array::operator==(other) && layout == other.layout; }
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
};

/// One tensor of a safetensors file: its bytes are begin to end of the file.
struct FileEntry : Array {
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
struct FileTensor : Array {
  std::string name;
  std::function<Status(void*)> read;
};
/// Write a safetensors file atomically, wide dtypes first and then by name: the bytes that Python's writer gives.
Status write_tensors(const std::string& path, std::vector<FileTensor> tensors,
                     const std::map<std::string, std::string>& metadata);

}  // namespace torchedge
