"""The runner's library for Java, which an Android app loads: the same bits, and its errors as exceptions."""

import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

import torchedge

JNI = Path(__file__).resolve().parents[2] / "export" / "runner" / "jni"
MAIN = """
import java.nio.ByteBuffer;
import java.nio.file.Files;
import java.nio.file.Path;
import org.torchedge.Bundle;

public class Main {
  static ByteBuffer read(String path) throws Exception {
    byte[] bytes = Files.readAllBytes(Path.of(path));
    return ByteBuffer.allocateDirect(bytes.length).put(bytes);
  }

  public static void main(String[] args) throws Exception {
    try (Bundle bundle = new Bundle(args[0], args[1], null, null, 0)) {
      bundle.setInput(args[2], read("input"));
      bundle.step();
      ByteBuffer output = ByteBuffer.allocateDirect(Integer.parseInt(args[4]));
      bundle.getOutput(args[3], output);
      byte[] bytes = new byte[output.limit()];
      output.get(bytes);
      Files.write(Path.of("output"), bytes);
      try {
        bundle.setInput("größe", ByteBuffer.allocateDirect(4));
      } catch (IllegalStateException error) {
        System.out.println(error.getMessage() + " | " + bundle.figures().contains("\\"steps\\": 1"));
      }
    }
    try {
      new Bundle("nowhere", null, null, null, 0);
    } catch (IllegalStateException error) {
      System.out.println(error.getMessage());
    }
  }
}
"""


@pytest.mark.slow
def test_java_gets_the_executor_s_bits(build, native, inference, batch, tmp_path):
    home = os.environ.get("JAVA_HOME")
    tools = [shutil.which(name, path=home and f"{home}/bin") for name in ("javac", "java")]
    if None in tools:
        pytest.skip("no JDK: set JAVA_HOME")
    library = build("-D", "TORCHEDGE_JNI=ON").parent
    bundle = torchedge.load_bundle(inference)
    (tmp_path / "Main.java").write_text(MAIN, encoding="utf-8")
    (tmp_path / "input").write_bytes(batch[0].numpy().tobytes())
    sources = [JNI / "org" / "torchedge" / "Bundle.java", tmp_path / "Main.java"]
    subprocess.run([tools[0], "-encoding", "UTF-8", "-d", tmp_path, *sources], check=True)
    output = bundle.outputs[0]
    size = 4 * int(np.prod(output.shape))
    words = [inference, native.device, bundle.inputs[0].name, output.name, size]
    options = ["-Dstdout.encoding=UTF-8", f"-Djava.library.path={library}", "-cp", tmp_path]
    done = subprocess.run(
        [tools[1], *options, "Main", *map(str, words)],
        cwd=tmp_path, env={**os.environ, **native.environment}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "output").read_bytes() == bundle.run(batch[0].numpy())[0].tobytes()
    first, second = done.stdout.splitlines()
    assert first.startswith("there is no input größe; expected one of") and first.endswith("| true")
    assert second.startswith("nowhere: is no folder")
