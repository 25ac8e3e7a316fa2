// The streaming plan of a bundle: reads of the weights file, copies to the device, and what waits for what.
#include "program.h"

#include <algorithm>
#include <set>

namespace torchedge {
namespace {

constexpr size_t kMaxReads = size_t{1} << 16;
constexpr int64_t kPage = 4096, kMaxStaging = int64_t{1} << 32;

Read read_read(const Entry& entry, int64_t tensors, int64_t launches) {
  entry.only({"offset", "nbytes", "at", "after", "copies"});
  Read read{entry.at("offset").integer(0, kMaxSize), entry.at("nbytes").integer(1, kMaxStaging), entry.at("at").integer(0, kMaxStaging),
            entry.at("after").integer(0, kMaxReads), {}};
  for (const Entry& item : entry.at("copies").items(kMaxReads, 1)) {
    item.only({"tensor", "after", "at", "nbytes", "place"});
    read.copies.push_back({item.at("tensor").integer(0, tensors - 1), item.at("after").integer(0, launches),
                           item.at("at").integer(0, kMaxStaging), item.at("nbytes").integer(1, kMaxStaging),
                           item.at("place").integers(0, kMaxSize, 4, 1)});
  }
  return read;
}

/// Follows the reads and copies of a list: each tensor comes whole, from its own bytes of the file, and nothing is
/// read over bytes of staging memory that a copy may still need.
class Follower {
 public:
  Follower(const Program& program, const FileHeader& header, int64_t nbytes, int64_t room)
      : program_(program), header_(header), nbytes_(nbytes), room_(room) {}

  void take(const Entry& entry, const Read& read) {
    if (read.offset + read.nbytes > nbytes_) return entry.refuse("reads beyond the end of the weights file");
    if (read.at + read.nbytes > room_) return entry.refuse("reads beyond the end of staging memory");
    if (read.offset % kPage || read.at % kPage) return entry.refuse("begins within a page; expected multiples of 4096");
    if (read.after > copies_) return entry.refuse("waits for a copy that comes later");
    for (size_t k = taken_.size(); k-- > 0 && taken_[k].last > read.after;)
      if (taken_[k].begin < read.at + read.nbytes && read.at < taken_[k].end) return entry.refuse("overwrites bytes before they are copied");
    for (const Copy& copy : read.copies) {
      check_copy(entry, read, copy);
      if (!entry.ok()) return;
    }
    taken_.push_back({read.at, read.at + read.nbytes, copies_});
  }

  /// The tensors, with the numbers of their first and last copy.
  std::map<int64_t, std::pair<int64_t, int64_t>> end(const Entry& entry) const {
    for (auto [index, numbers] : numbers_)
      if (done_.at(index) != program_.tensors[index].form.packed_bytes())
        entry.refuse("loads a part of " + program_.tensors[index].name + "; expected all of it");
    return numbers_;
  }

 private:
  struct Taken {
    int64_t begin, end, last;
  };

  void check_copy(const Entry& entry, const Read& read, const Copy& copy) {
    const Tensor& tensor = program_.tensors[copy.tensor];
    auto file = header_.entries.find(tensor.name);
    if (!is_resident(tensor.role) || tensor.role == Role::state || file == header_.entries.end())
      return entry.refuse("loads " + tensor.name + ", which is no weight of the file");
    const Layout& layout = tensor.form.layout;
    int64_t first = copy.place[0];
    if (layout.image()) {
      int64_t texel = 4 * size_of(tensor.form.dtype);
      if (copy.place.size() != 4) return entry.refuse("has no [x, y, width, height] for the image " + tensor.name);
      int64_t x = copy.place[0], y = copy.place[1], width = copy.place[2], height = copy.place[3];
      bool rows = height == 1 || (x == 0 && width == layout.width);  // one behind the other in the file
      if (width < 1 || height < 1 || x > layout.width - width || y > layout.height - height || !rows || width * height * texel != copy.nbytes)
        return entry.refuse("copies to a place that the image " + tensor.name + " does not have");
      first = (y * layout.width + x) * texel;
    } else if (copy.place.size() != 1) {
      return entry.refuse("has no [byte] for the buffer " + tensor.name);
    }
    if (copy.at < read.at || copy.at + copy.nbytes > read.at + read.nbytes) return entry.refuse("copies bytes that it does not read");
    if (done_[copy.tensor] != first || first + copy.nbytes > tensor.form.packed_bytes() ||
        read.offset + copy.at - read.at != file->second.begin + first)
      return entry.refuse("copies other bytes of " + tensor.name + " than those that come next");
    done_[copy.tensor] = first + copy.nbytes;
    ++copies_;
    auto& numbers = numbers_.emplace(copy.tensor, std::pair(copies_, copies_)).first->second;
    numbers.second = copies_;
  }

  const Program& program_;
  const FileHeader& header_;
  int64_t nbytes_, room_, copies_ = 0;
  std::vector<Taken> taken_;
  std::map<int64_t, int64_t> done_;
  std::map<int64_t, std::pair<int64_t, int64_t>> numbers_;
};

/// Loads of a weight after its first one: each part is a tensor of its own, which later launches use in its place.
/// Returns the number of the whole weight of each part.
std::vector<int64_t> read_parts(const Entry& entry, Program& program) {
  std::vector<int64_t> wholes;
  std::multimap<int64_t, int64_t> begins;  // parts by the launch that first uses them
  std::pair<int64_t, int64_t> last = {-1, -1};
  const int64_t tensors = program.tensors.size(), launches = program.launches.size();
  for (const Entry& item : entry.items(kMaxReads)) {
    item.only({"tensor", "first"});
    const std::pair<int64_t, int64_t> part = {item.at("tensor").integer(0, tensors - 1), item.at("first").integer(0, launches - 1)};
    if (part <= last) item.refuse("does not come after the part before it, by tensor and launch");
    if (!item.ok()) return {};
    last = part;
    begins.emplace(part.second, program.tensors.size());
    wholes.push_back(part.first);
    program.tensors.push_back(program.tensors[part.first]);
  }
  std::map<int64_t, int64_t> current;
  auto next = begins.begin();
  for (int64_t position = 0; position < launches; ++position) {
    for (; next != begins.end() && next->first == position; ++next) current[wholes[next->second - tensors]] = next->second;
    for (int64_t& index : program.launches[position].tensors)
      if (auto part = current.find(index); part != current.end()) index = part->second;
  }
  return wholes;
}

}  // namespace

Status read_plan(const std::string& name, const std::string& text, const FileHeader& header, int64_t nbytes, Program& program) {
  TE_TRY(document, Document::parse(name, text));
  Entry entry = document.root(), listed = entry.at("loads");
  entry.only({"schema", "plan", "instance", "staging_bytes", "arena", "loads", "parts"});
  entry.at("schema").word({"torchedge-streaming-plan-2"});
  listed.only({"preload", "run", "waits"});
  Loads loads;
  const int64_t whole = program.tensors.size();
  const std::vector<int64_t> wholes = read_parts(entry.find("parts"), program);
  int64_t tensors = program.tensors.size(), launches = program.launches.size();
  loads.staging_bytes = entry.at("staging_bytes").integer(kPage, kMaxStaging);
  TE_CHECK(document.status());
  std::set<int64_t> preloaded;
  auto follow = [&](const char* key, std::vector<Read>& reads) {
    Follower follower(program, header, nbytes, loads.staging_bytes - kPage);
    for (const Entry& item : listed.at(key).items(kMaxReads)) {
      reads.push_back(read_read(item, tensors, launches));
      if (item.ok()) follower.take(item, reads.back());
      if (!item.ok()) break;
    }
    return follower.end(listed.at(key));
  };
  for (auto [index, numbers] : follow("preload", loads.preload)) preloaded.insert(index);
  loads.streamed = follow("run", loads.run);
  loads.waits = listed.at("waits").integers(0, kMaxReads, launches, launches);
  TE_CHECK(document.status());
  // The runner copies before the first launch that waits: the launches after which a copy comes are enqueued by then.
  int64_t number = 0, launch = 0;
  for (const Read& read : loads.run)
    for (const Copy& copy : read.copies) {
      ++number;
      while (launch < launches && loads.waits[launch] < number) ++launch;
      if (launch == launches) listed.refuse("has copies for which no launch waits");
      else if (copy.after > launch) listed.refuse("has a copy for which a launch before it waits");
    }
  for (int64_t count : loads.waits)
    if (count > number) listed.refuse("has launches that wait for more copies than there are");
  for (int64_t k = 0; k < tensors; ++k) {
    const Tensor& tensor = program.tensors[k];
    if (!is_resident(tensor.role) || tensor.role == Role::state) continue;
    if (preloaded.count(k) && loads.streamed.count(k)) listed.refuse("loads " + tensor.name + " twice");
    if (!preloaded.count(k) && !loads.streamed.count(k)) program.absent.insert(k);
  }
  for (size_t k = 0; k < wholes.size(); ++k)
    if (!loads.streamed.count(wholes[k]) || !loads.streamed.count(whole + k))
      listed.refuse("does not stream " + program.tensors[wholes[k]].name + " and all of its parts");
  for (const Launch& used : program.launches)
    for (int64_t index : used.tensors)
      if (program.absent.count(index)) listed.refuse("does not load " + program.tensors[index].name + ", which is used");
  for (int64_t index : program.outputs)
    if (program.absent.count(index) || loads.streamed.count(index)) listed.refuse("does not keep the output " + program.tensors[index].name);
  TE_CHECK(document.status());
  program.loads = std::move(loads);
  read_arena(entry.at("arena"), program);
  return document.status();
}

}  // namespace torchedge
