#include "json.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <nlohmann/json.hpp>

namespace torchedge {
namespace {

constexpr size_t kMaxDepth = 32;
constexpr size_t kMaxValues = size_t{1} << 22;

/// Builds the document while it is parsed, so that depth, size and doubled keys end the parse at once. The
/// parser calls it without recursion; a document nested a million deep costs nothing.
class Builder : public nlohmann::json_sax<Json> {
 public:
  Json root;
  std::string error;

  bool null() override { return add(nullptr); }
  bool boolean(bool value) override { return add(value); }
  bool number_integer(number_integer_t value) override { return add(value); }
  bool number_unsigned(number_unsigned_t value) override { return add(value); }
  bool number_float(number_float_t value, const string_t&) override { return add(value); }  // the parser takes finite ones alone
  bool string(string_t& value) override { return add(std::move(value)); }
  bool binary(binary_t&) override { return stop("holds binary data"); }
  bool start_object(size_t) override { return open(Json::object()); }
  bool start_array(size_t) override { return open(Json::array()); }
  bool end_object() override { return open_.pop_back(), true; }
  bool end_array() override { return open_.pop_back(), true; }
  bool key(string_t& name) override {
    if (open_.back()->contains(name)) return stop("holds the key '" + name.substr(0, 80) + "' twice");
    key_ = std::move(name);
    return true;
  }
  bool parse_error(size_t position, const std::string&, const nlohmann::detail::exception&) override {
    return stop("is not valid JSON at byte " + std::to_string(position));
  }

 private:
  bool add(Json value) { return place(std::move(value)) != nullptr; }
  Json* place(Json value) {
    if (++count_ > kMaxValues) return stop("holds more than 4,194,304 values"), nullptr;
    if (open_.empty()) return &(root = std::move(value));
    Json& parent = *open_.back();
    if (parent.is_array()) return parent.push_back(std::move(value)), &parent.back();
    return &(parent[key_] = std::move(value));
  }
  bool open(Json value) {
    if (open_.size() == kMaxDepth) return stop("is nested more than 32 deep");
    Json* own = place(std::move(value));
    if (own == nullptr) return false;
    open_.push_back(own);
    return true;
  }
  bool stop(std::string why) {
    if (error.empty()) error = std::move(why);
    return false;
  }

  std::vector<Json*> open_;
  std::string key_;
  size_t count_ = 0;
};

bool printable(std::string_view text) {
  return std::none_of(text.begin(), text.end(), [](unsigned char c) { return c < 0x20 || c == 0x7f; });
}

}  // namespace

/// The shortest digits that give it back, with an exponent from 1e16 and below 1e-4.
std::string number_text(double value) {
  const double size = std::abs(value);
  const bool plain = size == 0 || (size >= 1e-4 && size < 1e16);
  char buffer[32];
  auto end = std::to_chars(buffer, buffer + sizeof buffer, value, plain ? std::chars_format::fixed : std::chars_format::scientific).ptr;
  std::string text(buffer, end);
  return plain && text.find('.') == std::string::npos ? text + ".0" : text;
}

Entry Document::root() { return {this, json_.get(), ""}; }

std::string Document::canonical_without(const std::string& key) const {
  Json entries = *json_;
  entries.erase(key);
  return canonical(entries);
}

Result<Document> Document::parse(const std::string& name, std::string_view text) {
  Builder builder;
  bool parsed = Json::sax_parse(text.begin(), text.end(), &builder);
  if (!parsed || !builder.error.empty())
    return Error{name + ": " + (builder.error.empty() ? "is not valid JSON" : builder.error) +
                 "; copy or export the bundle again"};
  if (!builder.root.is_object()) return Error{name + ": holds no JSON object; expected one: check the file"};
  return Document(name, std::make_shared<const Json>(std::move(builder.root)));
}

std::string canonical(const Json& value) {
  std::string text;
  if (value.is_object()) {
    for (const auto& [key, item] : value.items())  // a std::map: sorted by bytes, which for UTF-8 is by characters
      text += (text.empty() ? "" : ",") + Json(key).dump(-1, ' ', true) + ":" + canonical(item);
    return "{" + text + "}";
  }
  if (value.is_array()) {
    for (const auto& item : value) text += (text.empty() ? "" : ",") + canonical(item);
    return "[" + text + "]";
  }
  return value.is_number_float() ? number_text(value.get<double>()) : value.dump(-1, ' ', true);
}

/// Whether a value that is there fits; one that does not is refused.
bool Entry::is(bool fits, const char* otherwise) const {
  if (readable() && !fits) refuse(otherwise);
  return readable() && fits;
}

Entry Entry::find(const char* key) const {
  Entry entry{document_, nullptr, where_.empty() ? key : where_ + "." + key};
  if (!is(value_ && value_->is_object(), "is no object; expected one")) return entry;
  auto place = value_->find(key);
  if (place != value_->end() && !place->is_null()) entry.value_ = &*place;
  return entry;
}

Entry Entry::at(const char* key) const {
  Entry entry = find(key);
  if (entry.value_ == nullptr) refuse(std::string("has no '") + key + "'; expected it");
  return entry;
}

void Entry::only(std::initializer_list<const char*> keys) const {
  if (!readable() || !value_->is_object()) return;
  for (const auto& item : value_->items())
    if (std::none_of(keys.begin(), keys.end(), [&](const char* key) { return item.key() == key; }))
      return refuse("has the unknown key '" + (printable(item.key()) ? item.key().substr(0, 80) : "?") +
                    "'; it may be of a later version: export the bundle again");
}

int64_t Entry::integer(int64_t low, int64_t high, int64_t absent) const {
  if (!readable()) return absent;
  bool fits = value_->is_number_integer() && (!value_->is_number_unsigned() || value_->get<uint64_t>() <= INT64_MAX);
  int64_t number = fits ? value_->get<int64_t>() : 0;
  if (fits && low <= number && number <= high) return number;
  refuse("is " + (value_->is_number() ? value_->dump() : std::string("no number")) + "; expected a whole number from " +
         std::to_string(low) + " to " + std::to_string(high));
  return 0;
}

double Entry::number() const {
  return is(value_ && value_->is_number(), "is no number; expected one") ? value_->get<double>() : 0;
}

bool Entry::boolean() const {
  return is(value_ && value_->is_boolean(), "is neither true nor false") && value_->get<bool>();
}

void Entry::plain() const {
  if (readable() && !value_->is_number() && !value_->is_boolean()) text(4000, 0);
}

std::string Entry::text(size_t most, size_t least) const {
  if (!readable()) return "";
  const auto* text = value_->get_ptr<const std::string*>();
  if (text && least <= text->size() && text->size() <= most && printable(*text)) return *text;
  return refuse("is no printable text of " + std::to_string(least) + " to " + std::to_string(most) + " bytes"), "";
}

std::string Entry::sha256() const {
  std::string digits = text(64, 64);
  if (document_->ok() && digits.find_first_not_of("0123456789abcdef") != std::string::npos)
    refuse("is not of 64 hexadecimal digits in lower case");
  return digits;
}

int Entry::word(const std::vector<const char*>& words) const {
  std::string given = text(100), known;
  int place = 0;
  for (const char* word : words) {
    if (given == word) return place;
    known += (known.empty() ? "" : ", ") + std::string(word);
    ++place;
  }
  if (value_ != nullptr) refuse("is '" + given + "'; expected one of " + known);
  return 0;
}

std::vector<int64_t> Entry::integers(int64_t low, int64_t high, size_t most, size_t least) const {
  std::vector<int64_t> numbers;
  for (const Entry& item : items(most, least)) numbers.push_back(item.integer(low, high));
  return numbers;
}

std::vector<Entry> Entry::items(size_t most, size_t least) const {
  std::vector<Entry> list;
  if (!readable()) return list;
  if (!value_->is_array() || value_->size() < least || value_->size() > most)
    return refuse("is no list of " + std::to_string(least) + " to " + std::to_string(most) + " entries"), list;
  for (size_t k = 0; k < value_->size(); ++k)
    list.push_back(Entry(document_, &(*value_)[k], where_ + "[" + std::to_string(k) + "]"));
  return list;
}

std::vector<std::pair<std::string, Entry>> Entry::entries(size_t most) const {
  std::vector<std::pair<std::string, Entry>> list;
  if (!readable()) return list;
  if (!value_->is_object() || value_->size() > most) return refuse("is no object of up to " + std::to_string(most) + " entries"), list;
  for (const auto& item : value_->items()) {
    bool named = !item.key().empty() && item.key().size() <= 4000 && printable(item.key());
    if (!is(named, "has a key that is no printable text")) return list;
    list.emplace_back(item.key(), Entry(document_, &item.value(), where_ + "." + item.key()));
  }
  return list;
}

}  // namespace torchedge
