// The C API for Java: see org/torchedge/Bundle.java.
#include <jni.h>

#include <cstring>
#include <string>
#include <vector>

#include "torchedge.h"

namespace {

torchedge_bundle* bundle_of(jlong handle) { return reinterpret_cast<torchedge_bundle*>(handle); }

/// A text of Java's, which ends in a zero; none for null.
class Text {
 public:
  Text(JNIEnv* env, jbyteArray array) : is_null_(array == nullptr) {
    if (is_null_) return;
    text_.resize(static_cast<size_t>(env->GetArrayLength(array)));
    env->GetByteArrayRegion(array, 0, static_cast<jsize>(text_.size()), reinterpret_cast<jbyte*>(text_.data()));
  }
  operator const char*() const { return is_null_ ? nullptr : text_.c_str(); }

 private:
  bool is_null_;
  std::string text_;
};

jbyteArray array_of(JNIEnv* env, const char* text) {
  jsize size = static_cast<jsize>(std::strlen(text));
  jbyteArray array = env->NewByteArray(size);
  if (array != nullptr) env->SetByteArrayRegion(array, 0, size, reinterpret_cast<const jbyte*>(text));
  return array;
}

}  // namespace

extern "C" {

JNIEXPORT jlong JNICALL Java_org_torchedge_Bundle_open(JNIEnv* env, jclass, jbyteArray folder, jbyteArray device,
                                                       jbyteArray cache, jbyteArray sha256, jlong memory_limit) {
  Text opened(env, folder), chosen(env, device), kept(env, cache), digest(env, sha256);
  torchedge_options options{};
  options.device = chosen;
  options.cache = kept;
  options.sha256 = digest;
  options.memory_limit = memory_limit > 0 ? static_cast<uint64_t>(memory_limit) : 0;
  torchedge_bundle* bundle = nullptr;
  (void)torchedge_open(opened, &options, &bundle);  // Java asks for the error
  return reinterpret_cast<jlong>(bundle);
}

JNIEXPORT jbyteArray JNICALL Java_org_torchedge_Bundle_error(JNIEnv* env, jclass, jlong handle) {
  return array_of(env, torchedge_error(bundle_of(handle)));
}

JNIEXPORT jbyteArray JNICALL Java_org_torchedge_Bundle_describe(JNIEnv* env, jclass, jlong handle) {
  return array_of(env, torchedge_describe(bundle_of(handle)));
}

JNIEXPORT jint JNICALL Java_org_torchedge_Bundle_setInput(JNIEnv* env, jclass, jlong handle, jbyteArray method, jbyteArray name, jobject array, jlong nbytes) {
  return torchedge_set_input(bundle_of(handle), Text(env, method), Text(env, name), env->GetDirectBufferAddress(array), static_cast<size_t>(nbytes));
}

JNIEXPORT jint JNICALL Java_org_torchedge_Bundle_step(JNIEnv* env, jclass, jlong handle, jbyteArray method) {
  return torchedge_step(bundle_of(handle), Text(env, method));
}

JNIEXPORT jint JNICALL Java_org_torchedge_Bundle_generate(JNIEnv* env, jclass, jlong handle, jlongArray prompt, jlongArray tokens, jdouble temperature,
                                                          jdouble top_p, jlong top_k, jlong seed, jlongArray stop) {
  auto numbers = [&](jlongArray array) {
    std::vector<int64_t> copy(static_cast<size_t>(env->GetArrayLength(array)));
    env->GetLongArrayRegion(array, 0, static_cast<jsize>(copy.size()), reinterpret_cast<jlong*>(copy.data()));
    return copy;
  };
  std::vector<int64_t> fed = numbers(prompt), ends = numbers(stop), made = numbers(tokens);
  torchedge_sampling how{temperature, top_p, static_cast<uint64_t>(top_k), static_cast<uint64_t>(seed), ends.data(), ends.size(), nullptr, nullptr};
  size_t given = fed.size(), count = 0;
  int code = torchedge_generate(bundle_of(handle), fed.data(), &given, 1, made.data(), made.size(), &count, &how);
  env->SetLongArrayRegion(tokens, 0, static_cast<jsize>(count), reinterpret_cast<jlong*>(made.data()));
  return code == 0 ? static_cast<jint>(count) : -1;
}

JNIEXPORT jint JNICALL Java_org_torchedge_Bundle_getOutput(JNIEnv* env, jclass, jlong handle, jbyteArray name, jobject array, jlong nbytes) {
  return torchedge_get_output(bundle_of(handle), Text(env, name), env->GetDirectBufferAddress(array), static_cast<size_t>(nbytes));
}

JNIEXPORT jint JNICALL Java_org_torchedge_Bundle_set(JNIEnv* env, jclass, jlong handle, jbyteArray name, jdouble value) {
  return torchedge_set(bundle_of(handle), Text(env, name), value);
}

JNIEXPORT jint JNICALL Java_org_torchedge_Bundle_save(JNIEnv* env, jclass, jlong handle, jbyteArray path) {
  return torchedge_save(bundle_of(handle), Text(env, path));
}

JNIEXPORT jint JNICALL Java_org_torchedge_Bundle_load(JNIEnv* env, jclass, jlong handle, jbyteArray path) {
  return torchedge_load(bundle_of(handle), Text(env, path));
}

JNIEXPORT jbyteArray JNICALL Java_org_torchedge_Bundle_selfTest(JNIEnv* env, jclass, jlong handle) {
  return array_of(env, torchedge_check(bundle_of(handle)));
}

JNIEXPORT void JNICALL Java_org_torchedge_Bundle_close(JNIEnv*, jclass, jlong handle) { torchedge_close(bundle_of(handle)); }

}  // extern "C"
