"""Models of transformers from a configuration file, with new weights: no download, no code of the file's.

A configuration can name code to import (`auto_map`), kernels and backbones to download, and sizes that take
hours to build. The first are removed, the second need a network that is switched off, the third are refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch

from torchedge.errors import InputError, ProfileError, check_path, clipped, did_you_mean, needed
from torchedge.storage.documents import Document, read_json
from torchedge.tracing.vision import prepare_torchvision

MOST_PARTS = 1 << 16
"""Layers, heads, experts or labels that a configuration may ask for, and modules that it may build."""

_KERNELS = ("attn_implementation", "experts_implementation")
_CODE = frozenset(
    ("auto_map", "custom_pipelines", "trust_remote_code", "_name_or_path", "_commit_hash", *_KERNELS)
)
"""Entries that make transformers import or download code; models have their own defaults without them."""
_COUNTS = ("num_", "n_layer", "n_head", "layers", "depth", "blocks", "stages", "labels", "experts")
"""Parts of the names of entries that count things which are built one by one."""
_DTYPES = ("float32", "float16", "bfloat16", "float64", "auto")
_TASKS = (
    "MODEL_FOR_PRETRAINING_MAPPING_NAMES",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "MODEL_MAPPING_NAMES",
)
"""Where the architecture is looked up, in this order, if a configuration names none."""


def split_config(text: str) -> tuple[Path, str]:
    """Return path and architecture of ``hf:PATH`` or ``hf:PATH:ARCHITECTURE``; "" is the file's own."""
    rest = text.removeprefix("hf:")
    if not rest:
        raise InputError("hf: names no file; expected hf:CONFIG.json, a configuration file of transformers")
    path, _, name = rest.rpartition(":")
    if path and name.isidentifier() and not check_path("the model", rest).exists():
        return Path(path), name
    return Path(rest), ""


def has_weights(path: Path) -> bool:
    """Whether a path is a folder in which weights of a model lie beside its configuration."""
    return path.is_dir() and any(path.glob("*.safetensors"))


def build_from_config(path: Path, architecture: str = "", *, weights: bool = False) -> torch.nn.Module:
    """Return the model of a configuration file with new weights, on the default device of torch.

    path: a config.json of transformers, or a folder with one. architecture: a class of transformers, by
    default the first of the file's `architectures`, else that of the model type's pretraining. weights: with
    those of the folder, where it has them (`has_weights`).

    Raises:
        InputError: the file is none, or what it describes is unknown, too large or cannot be built.
        MissingExtraError: transformers is not installed.
    """
    file = path / "config.json" if check_path("the model", path).is_dir() else path
    if not file.exists():
        raise InputError(
            f"hf:{path}: there is no file {file}, and nothing is downloaded; expected a config.json of "
            f"transformers: AutoConfig.from_pretrained({str(path)!r}).save_pretrained(FOLDER) writes one"
        )
    try:
        document = read_json(file)
    except ProfileError as error:
        raise InputError(f"{error}; expected a config.json of transformers") from error
    prepare_torchvision()
    with needed("transformers", purpose=f"building the model of {file}"):
        from transformers import CONFIG_MAPPING, logging
    kind = document.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        hint = did_you_mean(kind, CONFIG_MAPPING, "write it by config.save_pretrained")
        raise InputError(
            f"{file}: model_type is {kind!r}; expected one that the installed transformers has: {hint}"
        )
    if "quantization_config" in document:
        raise InputError(
            f"{file} describes quantized weights, which are not predicted; remove quantization_config to "
            "predict the model in its own data type"
        )
    wanted = architecture or _architecture_of(document, kind)
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with _bounded(), _offline():
            config = CONFIG_MAPPING[kind].from_dict(_cleaned(document, str(file)))
            made = _class_of(wanted, config, file)
            if not (weights and has_weights(path)):
                return cast(torch.nn.Module, made._from_config(config))
            model, loaded = made.from_pretrained(
                path, config=config, use_safetensors=True, local_files_only=True, output_loading_info=True
            )
    except (InputError, MemoryError):
        raise
    except Exception as error:
        raise InputError(
            f"{file}: {wanted} cannot be built without a network: {clipped(str(error), 300)}; "
            "correct the file"
        ) from error
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
    if missing := sorted(loaded["missing_keys"]):
        raise InputError(
            f"{path}: its weights lack {len(missing)} tensors of {wanted}, such as {missing[0]}; expected "
            "all: fetch the missing files, or name their architecture: hf:FOLDER:ARCHITECTURE"
        )
    return cast(torch.nn.Module, model)


def _architecture_of(document: Document, kind: str) -> str:
    names = document.get("architectures")
    if isinstance(names, list) and names and isinstance(names[0], str):
        return names[0]
    from transformers.models.auto import modeling_auto

    for table in _TASKS:
        name = getattr(modeling_auto, table).get(kind)
        if name is not None:
            return str(name if isinstance(name, str) else name[0])
    raise InputError(f"model type {kind} has no default architecture; name one: hf:CONFIG.json:ARCHITECTURE")


def _class_of(name: str, config: Any, file: Path) -> Any:
    """Return a model class of transformers that takes a configuration; raises InputError for others."""
    import transformers

    expected = type(config).__name__.removesuffix("Config")
    kind = getattr(transformers, name, None) if name in dir(transformers) else None
    if not isinstance(kind, type) or not issubclass(kind, transformers.PreTrainedModel):
        near = [n for n in dir(transformers) if n.startswith(expected)]
        hint = did_you_mean(name, near, f"name one of {expected}'s: hf:CONFIG.json:ARCHITECTURE", most=3)
        raise InputError(f"{file}: architecture {name[:80]!r} is no model of transformers; {hint}")
    if not isinstance(config, getattr(kind, "config_class", None) or ()):
        raise InputError(
            f"{file}: architecture {name} takes no {type(config).__name__}; expected one of {expected}'s"
        )
    return kind


def _cleaned(item: Any, place: str) -> Any:
    """Return a document without code; raises InputError for counts that are too large to build."""
    if isinstance(item, list):
        return [_cleaned(entry, place) for entry in item]
    if not isinstance(item, dict):
        return item
    cleaned = {}
    for name, value in item.items():
        if name in _CODE or name.removeprefix("_").startswith(_KERNELS):
            continue
        if isinstance(value, (int, float)) and value > MOST_PARTS and any(part in name for part in _COUNTS):
            raise InputError(f"{place}: {name} is {value}; expected at most {MOST_PARTS}")
        if name in ("dtype", "torch_dtype") and value is not None and value not in _DTYPES:
            raise InputError(f"{place}: {name} is {value!r}; expected one of {', '.join(_DTYPES)}")
        cleaned[name] = False if name == "use_pretrained_backbone" else _cleaned(value, f"{place}: {name}")
    return cleaned


@contextmanager
def _bounded() -> Iterator[None]:
    """Raise InputError where a model is built of more than `MOST_PARTS` modules."""
    count = 0

    def count_one(module: object, name: str, submodule: object) -> None:
        nonlocal count
        count += 1
        if count > MOST_PARTS:
            raise InputError(
                f"the model has more than {MOST_PARTS} modules; expected a smaller configuration"
            )

    with torch.nn.modules.module.register_module_module_registration_hook(count_one):
        yield


@contextmanager
def _offline() -> Iterator[None]:
    """Keep huggingface_hub from the network: backbones by name would be fetched."""
    from huggingface_hub import constants

    before, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before
