"""The runner's library for Java, which an Android app loads: the same bits, and its errors as exceptions."""

import os
import re
import shutil
import subprocess
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest

import torchedge

ROOT = Path(__file__).resolve().parents[2]
BUNDLE = ROOT / "export" / "runner" / "jni" / "org" / "torchedge" / "Bundle.java"
STUBS = """
android.app Activity extends android.content.Context { protected void onCreate(android.os.Bundle saved) {}
  protected void onDestroy() {} public void setContentView(android.view.View view) {}
  public void runOnUiThread(Runnable action) {} }
android.content Context { public java.io.File getCacheDir() { return null; }
  public java.io.File getFilesDir() { return null; }
  public java.io.File getExternalFilesDir(String type) { return null; }
  public android.content.res.AssetManager getAssets() { return null; } }
android.content.res AssetManager {
  public String[] list(String path) throws java.io.IOException { return null; }
  public java.io.InputStream open(String name) throws java.io.IOException { return null; } }
android.os Bundle {}
android.view View { public View(android.content.Context context) {} }
android.widget TextView extends android.view.View {
  public TextView(android.content.Context context) { super(context); }
  public void append(CharSequence text) {} }
org.json JSONException extends Exception {}
org.json JSONObject { public JSONObject(String text) throws JSONException {}
  public String getString(String name) throws JSONException { return null; }
  public int getInt(String name) throws JSONException { return 0; }
  public double getDouble(String name) throws JSONException { return 0; }
  public JSONObject getJSONObject(String name) throws JSONException { return null; }
  public JSONArray getJSONArray(String name) throws JSONException { return null; } }
org.json JSONArray { public int length() { return 0; }
  public JSONObject getJSONObject(int place) throws JSONException { return null; } }
"""
"""Android's and org.json's classes as far as the example uses them: package, then the class."""
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
        System.out.println(error.getMessage() + " | " + bundle.describe().contains("\\"steps\\": 1"));
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


@pytest.fixture
def tools():
    """Paths of javac and java."""
    home = os.environ.get("JAVA_HOME")
    paths = [shutil.which(name, path=home and f"{home}/bin") for name in ("javac", "java")]
    if None in paths:
        pytest.skip("no JDK: set JAVA_HOME")
    return paths


@pytest.mark.slow
def test_the_android_example_compiles_and_names_the_driver_and_its_activity(tools, tmp_path):
    app = ROOT / "examples" / "android" / "app"
    for package, name, stub in re.findall(r"^([\w.]+) (\w+)(.*(?:\n  .*)*)", STUBS, re.MULTILINE):
        text = f"package {package}; public class {name}{stub}"
        (tmp_path / f"{package}.{name}").mkdir()
        (tmp_path / f"{package}.{name}" / f"{name}.java").write_text(text, encoding="utf-8")
    example = app / "src" / "main" / "java" / "org" / "torchedge" / "example"
    sources = [BUNDLE, *tmp_path.glob("*/*.java"), *example.glob("*.java")]
    strict = [
        "-encoding",
        "UTF-8",
        "--release",
        "11",
        "-Xlint:all,-options,-serial",
        "-Werror",
        "-d",
        tmp_path,
    ]
    subprocess.run([tools[0], *strict, *sources], check=True)
    manifest = ET.parse(app / "src" / "main" / "AndroidManifest.xml").getroot()
    key = "{http://schemas.android.com/apk/res/android}"
    library, activity = (manifest.find(f"application/{tag}") for tag in ("uses-native-library", "activity"))
    assert library is not None and activity is not None
    assert (library.get(f"{key}name"), library.get(f"{key}required")) == ("libOpenCL.so", "false")
    name = activity.get(f"{key}name").removeprefix(".")
    assert (tmp_path / "org" / "torchedge" / "example" / f"{name}.class").is_file()


@pytest.mark.slow
def test_java_gets_the_executor_s_bits(build, native, inference, batch, tools, tmp_path):
    library = build("-D", "TORCHEDGE_JNI=ON").parent
    bundle = torchedge.load_bundle(inference)
    (tmp_path / "Main.java").write_text(MAIN, encoding="utf-8")
    (tmp_path / "input").write_bytes(batch[0].numpy().tobytes())
    sources = [BUNDLE, tmp_path / "Main.java"]
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
