#include "files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#if defined(TORCHEDGE_LIBCRYPTO)
#include <openssl/evp.h>
#else
#include <mbedtls/md.h>
#endif

namespace torchedge {

// SHA-256 -----------------------------------------------------------------------------------------------------

#if defined(TORCHEDGE_LIBCRYPTO)
struct Sha256::State {
  EVP_MD_CTX* context = EVP_MD_CTX_new();
  State() { EVP_DigestInit_ex(context, EVP_sha256(), nullptr); }
  ~State() { EVP_MD_CTX_free(context); }
  void update(const void* data, size_t size) { EVP_DigestUpdate(context, data, size); }
  void finish(unsigned char* digest) { EVP_DigestFinal_ex(context, digest, nullptr); }
};
#else
struct Sha256::State {
  mbedtls_md_context_t context;
  State() {
    mbedtls_md_init(&context);
    mbedtls_md_setup(&context, mbedtls_md_info_from_type(MBEDTLS_MD_SHA256), 0);
    mbedtls_md_starts(&context);
  }
  ~State() { mbedtls_md_free(&context); }
  void update(const void* data, size_t size) { mbedtls_md_update(&context, static_cast<const unsigned char*>(data), size); }
  void finish(unsigned char* digest) { mbedtls_md_finish(&context, digest); }
};
#endif

Sha256::Sha256() : state_(std::make_shared<State>()) {}
void Sha256::update(const void* data, size_t size) { state_->update(data, size); }

std::string Sha256::bytes() {
  unsigned char digest[32];
  state_->finish(digest);
  return {reinterpret_cast<char*>(digest), sizeof digest};
}

std::string Sha256::hex() {
  std::string text;
  for (unsigned char byte : bytes()) {
    text += "0123456789abcdef"[byte >> 4];
    text += "0123456789abcdef"[byte & 15];
  }
  return text;
}

std::string sha256_of(std::string_view text) {
  Sha256 state;
  state.update(text);
  return state.hex();
}

std::string bytes_of(uint64_t number) {
  std::string bytes;
  for (int k = 0; k < 8; ++k) bytes += static_cast<char>(number >> (8 * k) & 255);
  return bytes;
}

// reading -----------------------------------------------------------------------------------------------------

namespace {

// Non-blocking: opening a pipe that nobody writes would otherwise wait for ever.
constexpr int kReading = O_RDONLY | O_NONBLOCK | O_CLOEXEC;

Error unreadable(const std::string& name, int reason, const std::string& expected = "file") {
  if (reason == ELOOP) return Error{name + ": is a link, which could lead out of its folder; expected a " + expected + ": copy it"};
  return Error{name + ": cannot be read (" + std::strerror(reason) + "); expected a " + expected + ": check the path"};
}

}  // namespace

File::File(File&& other) noexcept { *this = std::move(other); }

File& File::operator=(File&& other) noexcept {
  std::swap(descriptor_, other.descriptor_);
  std::swap(size_, other.size_);
  std::swap(name_, other.name_);
  return *this;
}

File::~File() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

Result<File> File::at(int folder, const std::string& name, std::string shown, int flags) {
  File file(::openat(folder, name.c_str(), kReading | flags), std::move(shown));
  struct stat status;
  if (file.descriptor_ < 0 || ::fstat(file.descriptor_, &status) != 0) {
    const bool linked = errno == ENOTDIR && flags & O_NOFOLLOW;  // Linux says so of a link where a folder has to be
    return unreadable(file.name_, linked ? ELOOP : errno, flags & O_DIRECTORY ? "folder" : "file");
  }
  if (!(flags & O_DIRECTORY) && !S_ISREG(status.st_mode)) return Error{file.name_ + ": is not a regular file; expected one: check the path"};
  file.size_ = status.st_size;
  return file;
}

Result<File> File::open(const std::string& path) { return at(AT_FDCWD, path, path, 0); }

Result<File> File::folder(const std::string& path) { return at(AT_FDCWD, path, path, O_DIRECTORY); }

Result<File> File::below(const std::string& name) const {
  const size_t slash = name.find('/');
  if (slash == std::string::npos) return at(descriptor_, name, name_ + "/" + name, O_NOFOLLOW);
  const std::string inner = name.substr(0, slash);
  TE_TRY(folder, at(descriptor_, inner, name_ + "/" + inner, O_DIRECTORY | O_NOFOLLOW));
  return folder.below(name.substr(slash + 1));
}

Status File::read(int64_t offset, void* data, size_t size) const {
  char* target = static_cast<char*>(data);
  while (size > 0) {
    ssize_t count = ::pread(descriptor_, target, size, offset);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return unreadable(name_, errno);
    if (count == 0) return Error{name_ + ": ends before byte " + std::to_string(offset + size) + "; copy it again"};
    target += count;
    offset += count;
    size -= count;
  }
  return {};
}

double File::uncached_ms() const {
  constexpr size_t kRequest = size_t{4} << 20, kPage = 4096;
  const std::string self = "/proc/self/fd/" + std::to_string(descriptor_);
  int descriptor = ::open(self.c_str(), O_RDONLY | O_DIRECT | O_CLOEXEC);
  if (descriptor < 0) descriptor = ::open(self.c_str(), O_RDONLY | O_CLOEXEC);  // a file system without direct reads
  if (descriptor < 0) return 0;
  ::fsync(descriptor);  // pages that were not written yet stay in the cache
  ::posix_fadvise(descriptor, 0, 0, POSIX_FADV_DONTNEED);
  std::unique_ptr<void, void (*)(void*)> pages(std::aligned_alloc(kPage, kRequest), std::free);
  auto begun = std::chrono::steady_clock::now();
  int64_t at = 0;
  for (ssize_t count = 1; pages != nullptr && count > 0 && at < size_; at += count) count = std::max<ssize_t>(::pread(descriptor, pages.get(), kRequest, at), 0);
  ::close(descriptor);
  return at < size_ ? 0 : std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begun).count();
}

Result<std::string> File::read_all(int64_t most) const {
  if (size_ > most)
    return Error{name_ + ": holds " + std::to_string(size_) + " bytes; expected at most " + std::to_string(most) +
                 ": copy or export it again"};
  std::string data(size_, '\0');
  TE_CHECK(read(0, data.data(), data.size()));
  return data;
}

int64_t peak_resident_bytes() {
  std::FILE* status = std::fopen("/proc/self/status", "re");  // getrusage also counts the process before exec
  if (status == nullptr) return 0;
  long long kib = 0;
  for (char line[256]; kib == 0 && std::fgets(line, sizeof line, status) != nullptr;) std::sscanf(line, "VmHWM: %lld", &kib);
  std::fclose(status);
  return 1024 * kib;
}

// writing -----------------------------------------------------------------------------------------------------

Status write_atomically(const std::string& path, const std::function<Status(const Sink&)>& content) {
  size_t slash = path.rfind('/');
  std::string folder = slash == std::string::npos ? "." : path.substr(0, slash + 1);
  std::string beside = path + ".XXXXXX";  // a name of its own: several processes may write the same file
  int descriptor = ::mkstemp(beside.data());
  auto failed = [&](int reason) {
    return Error{path + ": cannot be written (" + std::strerror(reason) + "); check the folder and its free space"};
  };
  if (descriptor < 0) return failed(errno);
  Status status = content([&](const void* data, size_t size) -> Status {
    const char* source = static_cast<const char*>(data);
    while (size > 0) {
      ssize_t count = ::write(descriptor, source, size);
      if (count < 0 && errno == EINTR) continue;
      if (count <= 0) return failed(count == 0 ? ENOSPC : errno);
      source += count;
      size -= count;
    }
    return {};
  });
  if (status.ok() && ::fsync(descriptor) != 0) status = failed(errno);
  if (::close(descriptor) != 0 && status.ok()) status = failed(errno);
  if (status.ok() && ::rename(beside.c_str(), path.c_str()) != 0) status = failed(errno);
  if (!status.ok()) {
    ::unlink(beside.c_str());
    return status;
  }
  int parent = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);  // the rename, too, has to reach the disk
  if (parent >= 0) {
    ::fsync(parent);
    ::close(parent);
  }
  return {};
}

}  // namespace torchedge
