#include "tensors.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <numeric>

namespace torchedge {
namespace {

struct Kind {
  const char *name, *code;
  int64_t size;
};
constexpr Kind kKinds[] = {{"float32", "F32", 4}, {"float16", "F16", 2}, {"float64", "F64", 8}, {"int64", "I64", 8},
                           {"int32", "I32", 4},   {"int16", "I16", 2},   {"int8", "I8", 1},     {"uint8", "U8", 1},
                           {"bool", "BOOL", 1},   {"uint32", "U32", 4}};
constexpr int64_t kLanes = 4;  // channels of a texel
constexpr int kRow = 0, kColumn = 1;
constexpr int64_t kRows[] = {1, 1, 2, 4, 8};  // of a block, by pattern
constexpr int64_t kMaxHeader = int64_t{1} << 22;
constexpr size_t kMaxTensors = size_t{1} << 15;

int64_t ceil_div(int64_t value, int64_t by) { return (value + by - 1) / by; }
int64_t round_up(int64_t value, int64_t by) { return ceil_div(value, by) * by; }

bool in_order(const Layout& layout) { return std::is_sorted(layout.order.begin(), layout.order.end()); }

/// Copy elements between an array and the same in memory's order, `ordered` to `array` or back.
void transpose(const Form& form, const void* from, void* to, bool to_ordered) {
  if (in_order(form.layout)) return void(std::memcpy(to, from, form.array_bytes()));
  const size_t rank = form.shape.size();
  std::vector<int64_t> strides(rank, 1), at(rank, 0);
  for (size_t d = rank; d-- > 1;) strides[d - 1] = strides[d] * form.shape[d];
  with_type(form.dtype, [&](auto element) {
    const auto* source = static_cast<const decltype(element)*>(from);
    auto* target = static_cast<decltype(element)*>(to);
    int64_t count = form.elements(), place = 0;
    for (int64_t k = 0; k < count; ++k) {
      if (to_ordered) {
        target[k] = source[place];
      } else {
        target[place] = source[k];
      }
      for (size_t n = rank; n-- > 0;) {  // the next element in memory's order
        int64_t d = form.layout.order[n];
        place += strides[d];
        if (++at[n] < form.shape[d]) break;
        place -= at[n] * strides[d];
        at[n] = 0;
      }
    }
  });
}

/// Call `copy(bytes of the dense order, bytes of the image, count)` for the elements of each texel.
template <class Copy>
void each_texel(const Form& form, Copy copy) {
  const Layout& layout = form.layout;
  int64_t item = size_of(form.dtype);
  int64_t inner = layout.order.empty() ? 1 : form.shape[layout.order.back()];
  int64_t row = ceil_div(inner, kLanes);  // texels that a row of the innermost dimension takes
  if (form.elements() == 0) return;
  for (int64_t line = 0; line < layout.lines; ++line)
    for (int64_t step = 0; step < layout.steps; ++step) {
      int64_t texel = line * layout.steps + step, begin = texel % row * kLanes;
      auto [x, y] = layout.place(step, line);
      copy((texel / row * inner + begin) * item, (y * layout.width + x) * kLanes * item,
           std::min(kLanes, inner - begin) * item);
    }
}

}  // namespace

const char* name_of(DType dtype) { return kKinds[static_cast<int>(dtype)].name; }
const char* code_of(DType dtype) { return kKinds[static_cast<int>(dtype)].code; }
int64_t size_of(DType dtype) { return kKinds[static_cast<int>(dtype)].size; }

DType read_dtype(const Entry& entry, bool coded) {
  std::vector<const char*> words;
  for (const Kind& kind : kKinds) words.push_back(coded ? kind.code : kind.name);
  return static_cast<DType>(entry.word(words));
}

Half Half::of(double value) {
  int exponent = 0;
  int mantissa = static_cast<int>(std::frexp(value, &exponent) * 2048);
  return {static_cast<uint16_t>(mantissa ? ((exponent + 14) << 10) + mantissa - 1024 : 0)};
}

Half::operator double() const {
  int exponent = bits >> 10 & 31, fraction = bits & 1023;
  double value = exponent == 0 ? std::ldexp(fraction, -24) : exponent == 31 ? (fraction ? NAN : INFINITY) : std::ldexp(fraction + 1024, exponent - 25);
  return bits >> 15 ? -value : value;
}

int64_t product(const int64_t* begin, const int64_t* end) {
  int64_t result = 1;
  for (auto size = begin; size != end; ++size)
    if (*size == 0) return 0;
  for (; begin != end; ++begin) {
    if (*begin > kMaxSize / result) return kMaxSize + 1;
    result *= *begin;
  }
  return result;
}

// layouts -----------------------------------------------------------------------------------------------------

Layout read_layout(const Entry& entry, const Shape& shape) {
  Layout layout;
  entry.only({"order", "storage", "split", "pattern", "fold", "row_texels"});
  layout.order = entry.at("order").integers(0, kMaxRank - 1, kMaxRank);
  layout.storage = static_cast<Storage>(entry.find("storage").word({"buffer", "image", "image_buffer"}));
  layout.split = entry.find("split").integer(0, kMaxRank);
  layout.fold = entry.find("fold").integer(1, kMaxExtent, 1);
  layout.row_texels = entry.find("row_texels").integer(0, kMaxExtent);
  layout.pattern = entry.find("pattern").word({"row", "column", "block-2", "block-4", "block-8"});
  std::vector<int64_t> sorted = layout.order, all(shape.size());
  std::iota(all.begin(), all.end(), 0);
  std::sort(sorted.begin(), sorted.end());
  if (sorted != all || layout.split > static_cast<int64_t>(shape.size())) {
    entry.refuse("has an order or a split of other dimensions than the tensor's " + std::to_string(shape.size()));
    layout = Layout();
    layout.order = all;
    return layout;
  }
  if (!layout.image()) {
    if (layout.split != 0 || layout.fold != 1 || layout.row_texels != 0 || layout.pattern != kRow)
      entry.refuse("is a buffer; expected neither split, pattern, fold nor row_texels");
    return layout;
  }
  Shape sizes;
  for (int64_t d : layout.order) sizes.push_back(shape[d]);
  if (sizes.empty()) sizes.push_back(1);
  sizes.back() = ceil_div(sizes.back(), kLanes);
  layout.steps = product(sizes.data() + layout.split, sizes.data() + sizes.size());
  layout.lines = product(sizes.data(), sizes.data() + layout.split);
  int64_t many_steps = std::max<int64_t>(layout.steps, 1), many_lines = std::max<int64_t>(layout.lines, 1);
  if (layout.pattern == kColumn) std::swap(many_steps, many_lines);
  layout.width = ceil_div(ceil_div(many_steps, kRows[layout.pattern]), layout.fold);
  layout.height = std::min(many_lines, kMaxExtent + 1) * kRows[layout.pattern] * layout.fold;
  if (layout.width > kMaxExtent || layout.height > kMaxExtent)
    entry.refuse("is an image of " + std::to_string(layout.width) + " x " + std::to_string(layout.height) +
                 " texels; expected at most " + std::to_string(kMaxExtent) + " each way");
  bool pitched = layout.storage == Storage::image_buffer ? layout.row_texels >= layout.width : layout.row_texels == 0;
  if (!pitched) entry.refuse("has row_texels " + std::to_string(layout.row_texels) + " for an image " + std::to_string(layout.width) + " wide");
  return layout;
}

std::pair<int64_t, int64_t> Layout::place(int64_t step, int64_t line) const {
  int64_t x = step, y = line, rows = kRows[pattern];
  if (pattern == kColumn) {
    std::swap(x, y);
  } else if (rows > 1) {
    x = step / rows;
    y = line * rows + step % rows;
  }
  return fold == 1 ? std::pair(x, y) : std::pair(x % width, y * fold + x / width);
}

int64_t Form::packed_bytes() const {
  return layout.image() ? layout.width * layout.height * kLanes * size_of(dtype) : array_bytes();
}

int64_t Form::device_bytes() const {
  if (!layout.image()) return std::max<int64_t>(elements(), 1) * size_of(dtype);
  return std::max(layout.width, layout.row_texels) * layout.height * kLanes * size_of(dtype);
}

Shape Form::packed_shape() const {
  if (layout.image()) return {layout.height, layout.width, kLanes};
  Shape sizes;
  for (int64_t d : layout.order) sizes.push_back(shape[d]);
  return sizes;
}

bool Form::plain() const { return !layout.image() && in_order(layout); }

void Form::pack(const void* array, void* packed) const {
  if (!layout.image()) return transpose(*this, array, packed, true);
  std::string ordered(array_bytes(), '\0');
  transpose(*this, array, ordered.data(), true);
  std::memset(packed, 0, packed_bytes());
  each_texel(*this, [&](int64_t dense, int64_t image, int64_t count) {
    std::memcpy(static_cast<char*>(packed) + image, ordered.data() + dense, count);
  });
}

void Form::unpack(const void* packed, void* array) const {
  if (!layout.image()) return transpose(*this, packed, array, false);
  std::string ordered(array_bytes(), '\0');
  each_texel(*this, [&](int64_t dense, int64_t image, int64_t count) {
    std::memcpy(ordered.data() + dense, static_cast<const char*>(packed) + image, count);
  });
  transpose(*this, ordered.data(), array, false);
}

std::string Array::text() const {
  std::string sizes;
  for (int64_t size : shape) sizes += (sizes.empty() ? "" : ", ") + std::to_string(size);
  return std::string(name_of(dtype)) + "[" + sizes + "]";
}

// safetensors -------------------------------------------------------------------------------------------------

Result<FileHeader> read_file_header(const File& file) {
  const char* again = "; copy or rebuild the file";
  unsigned char mark[8];
  if (file.size() < 10) return Error{file.name() + ": is no safetensors file" + again};
  TE_CHECK(file.read(0, mark, 8));
  uint64_t length = 0;
  for (int k = 8; k-- > 0;) length = length << 8 | mark[k];
  if (length < 2 || length > static_cast<uint64_t>(std::min(kMaxHeader, file.size() - 8)))
    return Error{file.name() + ": announces a header of " + std::to_string(length) + " bytes" + again};
  std::string text(length, '\0');
  TE_CHECK(file.read(8, text.data(), length));
  TE_TRY(document, Document::parse(file.name() + " (header)", text));
  FileHeader header;
  header.begin = 8 + static_cast<int64_t>(length);
  std::vector<std::pair<int64_t, int64_t>> spans;
  for (const auto& [name, entry] : document.root().entries(kMaxTensors)) {
    if (name == "__metadata__") {
      for (const auto& [key, value] : entry.entries(1000)) header.metadata[key] = value.text(100000, 0);
      continue;
    }
    entry.only({"dtype", "shape", "data_offsets"});
    FileEntry tensor;
    tensor.dtype = read_dtype(entry.at("dtype"), true);
    tensor.shape = entry.at("shape").integers(0, kMaxSize, kMaxRank);
    auto offsets = entry.at("data_offsets").integers(0, int64_t{1} << 50, 2, 2);
    if (!document.ok()) break;
    tensor.begin = header.begin + offsets[0];
    tensor.end = header.begin + offsets[1];
    if (tensor.elements() > kMaxSize || tensor.end - tensor.begin != tensor.array_bytes())
      entry.refuse("takes other bytes than its shape and dtype have");
    spans.emplace_back(tensor.begin, tensor.end);
    header.entries[name] = std::move(tensor);
  }
  TE_CHECK(document.status());
  std::sort(spans.begin(), spans.end());
  int64_t end = header.begin;
  for (auto [begin, stop] : spans) {
    if (begin != end) return Error{file.name() + ": tensors overlap or leave a gap at byte " + std::to_string(begin) + again};
    end = stop;
  }
  if (end != file.size())
    return Error{file.name() + ": tensors take " + std::to_string(end) + " bytes of " + std::to_string(file.size()) + again};
  return header;
}

Status write_tensors(const std::string& path, std::vector<FileTensor> tensors,
                     const std::map<std::string, std::string>& metadata) {
  std::sort(tensors.begin(), tensors.end(), [](const FileTensor& a, const FileTensor& b) {
    return std::pair(-size_of(a.dtype), a.name) < std::pair(-size_of(b.dtype), b.name);
  });
  using Ordered = nlohmann::ordered_json;
  Ordered::object_t entries;
  int64_t end = 0, most = 0;
  if (!metadata.empty()) entries.emplace_back("__metadata__", metadata);
  for (const FileTensor& tensor : tensors) {
    const int64_t begin = end;
    end += tensor.array_bytes();
    entries.emplace_back(tensor.name, Ordered{{"dtype", code_of(tensor.dtype)}, {"shape", tensor.shape}, {"data_offsets", {begin, end}}});
    most = std::max(most, end - begin);
  }
  std::string header = Ordered(std::move(entries)).dump(-1, ' ', false, Ordered::error_handler_t::replace);
  header.resize(round_up(header.size(), 8), ' ');
  if (static_cast<int64_t>(header.size()) > kMaxHeader) return Error{path + ": has too many tensors for one file"};
  return write_atomically(path, [&](const Sink& sink) -> Status {
    const std::string head = bytes_of(header.size()) + header;
    TE_CHECK(sink(head.data(), head.size()));
    std::string data(most, '\0');  // one tensor at a time
    for (const FileTensor& tensor : tensors) {
      TE_CHECK(tensor.read(data.data()));
      TE_CHECK(sink(data.data(), tensor.array_bytes()));
    }
    return {};
  });
}

}  // namespace torchedge
