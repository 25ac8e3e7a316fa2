"""Files: where torchedge's data lies, and how it is read (bounded, validated) and written (atomically).

Imports neither torch nor any solver; numpy loads with `torchedge.storage.tensors` only.
"""

from torchedge.storage.documents import Document, file_sha256, read_json, read_toml, write_json, write_toml
from torchedge.storage.folders import (
    REBUILD,
    cache_folder,
    data_folder,
    profile_file,
    resolve_inside,
    user_folder,
)

__all__ = [
    "REBUILD",
    "Document",
    "cache_folder",
    "data_folder",
    "file_sha256",
    "profile_file",
    "read_json",
    "read_toml",
    "resolve_inside",
    "user_folder",
    "write_json",
    "write_toml",
]
