// JSON documents from files that nobody has checked: bounded, and read entry by entry with a range each.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <limits>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "result.h"

namespace torchedge {

using Json = nlohmann::json;

class Entry;

/// Return JSON in ASCII with sorted keys and without spaces, numbers as Python writes them.
std::string canonical(const Json& value);

/// A number as Python's repr writes it.
std::string number_text(double value);

/// A parsed document, and the first thing that is wrong in it. After that every entry reads as zero, so that code
/// that reads documents needs no branch an entry: it asks once, at the end.
class Document {
 public:
  /// Parse an object of at most 32 levels and 2^22 values, no key twice; `name` stands in errors.
  static Result<Document> parse(const std::string& name, std::string_view text);

  Entry root();
  bool ok() const { return error_.empty(); }
  void refuse(const std::string& where, const std::string& what) {
    if (ok()) error_ = name_ + ": " + where + " " + what;
  }
  Status status() const { return ok() ? Status() : Status(Error{error_}); }
  /// The canonical text without one of the entries.
  std::string canonical_without(const std::string& key) const;

 private:
  Document(std::string name, std::shared_ptr<const Json> json) : name_(std::move(name)), json_(std::move(json)) {}

  std::string name_, error_;
  std::shared_ptr<const Json> json_;
};

/// One value of a document, and where it stands.
class Entry {
 public:
  /// Whether it is there and, of those that may be absent, not null.
  bool present() const { return value_ != nullptr; }
  const std::string& where() const { return where_; }
  /// Whether nothing in the document was refused.
  bool ok() const { return document_->ok(); }
  void refuse(const std::string& what) const { document_->refuse(where_.empty() ? "it" : where_, what); }

  /// An entry of an object, which has to be there; `find`: which may be absent, and then reads as zero.
  Entry at(const char* key) const;
  Entry find(const char* key) const;
  /// Refuse keys of an object other than these.
  void only(std::initializer_list<const char*> keys) const;

  /// A whole number; `absent` where there is none.
  int64_t integer(int64_t low, int64_t high, int64_t absent = 0) const;
  double number() const;
  bool boolean() const;
  /// Refuse anything but a number, a text, true or false.
  void plain() const;
  /// Printable text of `least` to `most` bytes.
  std::string text(size_t most = 4000, size_t least = 1) const;
  /// 64 hexadecimal digits in lower case.
  std::string sha256() const;
  /// The place of a text among words.
  int word(const std::vector<const char*>& words) const;
  std::vector<int64_t> integers(int64_t low, int64_t high, size_t most, size_t least = 0) const;
  std::vector<Entry> items(size_t most, size_t least = 0) const;
  /// Keys and entries of an object.
  std::vector<std::pair<std::string, Entry>> entries(size_t most) const;

 private:
  friend class Document;
  Entry(Document* document, const Json* value, std::string where)
      : document_(document), value_(value), where_(std::move(where)) {}
  bool is(bool fits, const char* otherwise) const;
  bool readable() const { return document_->ok() && value_ != nullptr; }

  Document* document_;
  const Json* value_;
  std::string where_;
};

}  // namespace torchedge
