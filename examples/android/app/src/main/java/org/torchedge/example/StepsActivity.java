package org.torchedge.example;

import android.app.Activity;
import android.widget.TextView;
import java.io.File;
import java.io.IOException;
import java.io.InputStream;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.file.Files;
import java.nio.file.StandardCopyOption;
import org.json.JSONArray;
import org.json.JSONException;
import org.json.JSONObject;
import org.torchedge.Bundle;

/**
 * Runs 20 steps of a bundle and shows the time of each. The bundle is the folder "bundle" in the app's external files
 * folder (adb push), else in the app's assets.
 */
public final class StepsActivity extends Activity {
  private static final int STEPS = 20;
  private static final String FOLDER = "bundle";
  private static final String MANIFEST = "manifest.json";

  private TextView view;
  private volatile boolean stopped;

  @Override
  protected void onCreate(android.os.Bundle saved) {
    super.onCreate(saved);
    view = new TextView(this);
    setContentView(view);
    new Thread(this::work).start(); // the first start compiles kernels: never on the thread that draws
  }

  @Override
  protected void onDestroy() {
    stopped = true;
    super.onDestroy();
  }

  private void work() {
    try {
      run(folder());
    } catch (IOException | JSONException | IllegalStateException | UnsatisfiedLinkError error) {
      show("error: " + error.getMessage());
    }
  }

  private void run(File folder) throws JSONException {
    show("opening " + folder);
    File cache = new File(getCacheDir(), "kernels");
    try (Bundle bundle = new Bundle(folder.getPath(), null, cache.getPath(), null, 0)) {
      JSONObject description = new JSONObject(bundle.describe());
      show(description.getString("model") + " on " + description.getString("device"));
      JSONArray inputs = description.getJSONArray("inputs");
      for (int k = 0; k < inputs.length(); k++) {
        JSONObject input = inputs.getJSONObject(k);
        bundle.setInput(input.getString("name"), example(input));
      }
      boolean trains = description.getString("mode").equals("train");
      JSONObject output = description.getJSONArray("outputs").getJSONObject(0);
      for (int step = 0; step < STEPS && !stopped; step++) {
        bundle.step();
        String line = "step " + step + ": " + new JSONObject(bundle.describe()).getJSONObject("figures").getDouble("step_ms") + " ms";
        if (trains && output.getString("dtype").equals("float32")) {
          ByteBuffer loss = buffer(output);
          bundle.getOutput(output.getString("name"), loss);
          line += ", loss " + loss.getFloat(0);
        }
        show(line);
      }
    }
  }

  /** An array that every model takes: zeros for whole numbers (indices, classes), a ramp from 0 to 1 for floats. */
  private static ByteBuffer example(JSONObject port) throws JSONException {
    ByteBuffer array = buffer(port);
    if (port.getString("dtype").equals("float32")) {
      int count = array.limit() / Float.BYTES;
      for (int k = 0; k < count; k++) array.putFloat(k * Float.BYTES, (float) k / count);
    }
    return array;
  }

  private static ByteBuffer buffer(JSONObject port) throws JSONException {
    return ByteBuffer.allocateDirect(port.getInt("bytes")).order(ByteOrder.nativeOrder());
  }

  private File folder() throws IOException {
    File pushed = new File(getExternalFilesDir(null), FOLDER);
    if (new File(pushed, MANIFEST).isFile()) return pushed;
    File copied = new File(getFilesDir(), FOLDER);
    copy(FOLDER, copied);
    if (new File(copied, MANIFEST).isFile()) return copied;
    throw new IOException("there is no bundle; push one to " + pushed + " or put it into assets/" + FOLDER);
  }

  /** Copy a file or folder of the assets, which the runner cannot open where they lie, in the package. */
  private void copy(String asset, File target) throws IOException {
    String[] names = getAssets().list(asset);
    if (names == null || names.length == 0) {
      if (asset.equals(FOLDER)) return;
      try (InputStream data = getAssets().open(asset)) {
        Files.copy(data, target.toPath(), StandardCopyOption.REPLACE_EXISTING);
      }
      return;
    }
    Files.createDirectories(target.toPath());
    for (String name : names) copy(asset + "/" + name, new File(target, name));
  }

  private void show(String line) {
    runOnUiThread(() -> view.append(line + "\n"));
  }
}
