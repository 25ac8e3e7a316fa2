package org.torchedge;

import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.util.Arrays;

/**
 * An exported bundle on an OpenCL device: it runs, streams and trains there. The functions are those of torchedge.h,
 * which says what they do; what fails throws IllegalStateException with one line. Threads may share a bundle: its
 * calls run one after the other.
 *
 * <p>Arrays are direct byte buffers in native order, from position 0 to their limit.
 */
public final class Bundle implements AutoCloseable {
  static {
    System.loadLibrary("torchedge_jni");
  }

  private long handle;

  /** Open a folder. device, cache, sha256: null for none; memoryLimit: bytes, 0 for what the device has. */
  public Bundle(String folder, String device, String cache, String sha256, long memoryLimit) {
    handle = open(bytes(folder), bytes(device), bytes(cache), bytes(sha256), memoryLimit);
    String reason = text(error(handle));
    if (reason.isEmpty()) return;
    close();
    throw new IllegalStateException(reason);
  }

  public synchronized String describe() {
    return text(describe(opened()));
  }

  public void setInput(String name, ByteBuffer array) {
    setInput(null, name, array);
  }

  public synchronized void setInput(String method, String name, ByteBuffer array) {
    check(setInput(opened(), bytes(method), bytes(name), direct(array), array.limit()));
  }

  public void step() {
    step(null);
  }

  public synchronized void step(String method) {
    check(step(opened(), bytes(method)));
  }

  /** Return at most `most` tokens that follow a prompt. temperature 0: the most likely ones; topP, topK 0: of all. */
  public synchronized long[] generate(long[] prompt, int most, double temperature, double topP, long topK, long seed, long... stop) {
    long[] tokens = new long[most];
    int count = generate(opened(), prompt, tokens, temperature, topP, topK, seed, stop);
    check(Math.min(count, 0));
    return Arrays.copyOf(tokens, count);
  }

  public synchronized void getOutput(String name, ByteBuffer array) {
    check(getOutput(opened(), bytes(name), direct(array), array.limit()));
  }

  public synchronized void set(String hyperparameter, double value) {
    check(set(opened(), bytes(hyperparameter), value));
  }

  public synchronized void save(String path) {
    check(save(opened(), bytes(path)));
  }

  public synchronized void load(String path) {
    check(load(opened(), bytes(path)));
  }

  public synchronized String check() {
    String report = text(selfTest(opened()));
    check(error(handle).length);
    return report;
  }

  @Override
  public synchronized void close() {
    if (handle != 0) close(handle);
    handle = 0;
  }

  private long opened() {
    if (handle == 0) throw new IllegalStateException("the bundle is closed; open it again");
    return handle;
  }

  private void check(int code) {
    if (code != 0) throw new IllegalStateException(text(error(handle)));
  }

  private static ByteBuffer direct(ByteBuffer array) {
    if (!array.isDirect()) throw new IllegalStateException("the array is no direct buffer; use ByteBuffer.allocateDirect");
    return array;
  }

  // Java's own UTF-8 in strings of JNI is another than that of files: texts cross as bytes, with a zero at the end.

  private static byte[] bytes(String text) {
    return text == null ? null : (text + "\0").getBytes(StandardCharsets.UTF_8);
  }

  private static String text(byte[] bytes) {
    return new String(bytes, StandardCharsets.UTF_8);
  }

  private static native long open(byte[] folder, byte[] device, byte[] cache, byte[] sha256, long memoryLimit);

  private static native byte[] error(long handle);

  private static native byte[] describe(long handle);

  private static native int setInput(long handle, byte[] method, byte[] name, ByteBuffer array, long nbytes);

  private static native int step(long handle, byte[] method);

  private static native int generate(long handle, long[] prompt, long[] tokens, double temperature, double topP, long topK, long seed, long[] stop);

  private static native int getOutput(long handle, byte[] name, ByteBuffer array, long nbytes);

  private static native int set(long handle, byte[] name, double value);

  private static native int save(long handle, byte[] path);

  private static native int load(long handle, byte[] path);

  private static native byte[] selfTest(long handle);

  private static native void close(long handle);
}
