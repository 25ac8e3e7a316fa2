"""What a bundle is, in a few lines of text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchedge.bundles.manifests import PLAN, WEIGHTS, Port

if TYPE_CHECKING:
    from torchedge.bundles.bundle import Bundle

MEBIBYTE = 2**20


def describe(bundle: Bundle) -> str:
    """Return a bundle's model, device, inputs, outputs, memory and files."""
    manifest, program = bundle.manifest, bundle.program
    memory, target = manifest.memory, manifest.target
    step = "training step" if bundle.trains else "inference"
    if manifest.accumulate > 1:
        step += f", weights updated every {manifest.accumulate} batches"
    rows = [
        ("for", f"{target.name} ({target.device_class})"),
        ("inputs", _ports(manifest.inputs)),
        ("outputs", _ports(manifest.outputs)),
        ("kernels", f"{len(program.kernels)} in {len(program.launches)} launches"),
        ("weights", f"{manifest.files[WEIGHTS].nbytes / MEBIBYTE:.1f} MiB"),
        (
            "device memory",
            f"{memory.total_bytes / MEBIBYTE:.1f} MiB: {memory.resident_bytes / MEBIBYTE:.1f} stay, "
            f"{memory.arena_bytes / MEBIBYTE:.1f} in the arena",
        ),
        ("limits", f"{len(target.checked)} held, not known: {', '.join(target.unknown) or 'none'}"),
        ("onnx", ", ".join(f"{key} {_shown(value)}" for key, value in manifest.onnx.items())),
    ]
    if manifest.hyperparameters:
        values = ", ".join(f"{name} = {value:g}" for name, value in manifest.hyperparameters.items())
        rows.insert(3, ("set before a step", values))
    if PLAN in manifest.files:
        rows.append(("streaming plan", PLAN))
    rows += [("note", note) for note in manifest.notes]
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:<{width}}  {text}" for name, text in rows]
    return "\n".join([f"{manifest.model}: {step}", *lines])


def _ports(ports: tuple[Port, ...]) -> str:
    shown = [f"{port.name} {port.dtype}{list(port.shape)}" for port in ports[:4]]
    return ", ".join(shown) + (f" and {len(ports) - 4} more" if len(ports) > 4 else "")


def _shown(value: object) -> str:
    return f"{value:.2g}" if isinstance(value, float) else str(value)
