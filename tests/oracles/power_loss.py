"""What a disk may hold after a loss of power: bytes and names are safe once they were synchronised.

The bytes of a file are those of its last fsync, or later ones, or zeros in their place. The names in a folder
are those at its last fsync, or after any number of the later changes, in their order.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHANGES = ("replace", "rename", "mkdir", "unlink", "rmdir", "truncate", "ftruncate")


class Disk:
    """Records the changes below a folder while `recording`; `crashes` then yields what may be left.

    `acknowledged` is set by the scenario: what it was told is done.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.acknowledged: Any = None
        self._files: dict[tuple[int, int], bytes] = {}  # synchronised content by file
        self._births: dict[int, int] = {}
        self._root = root.stat().st_ino
        # Of each moment, by folder: its files as in `_files`, and its folders, all by their numbers.
        self._names: list[dict[int, dict[str, tuple[int, int] | int]]] = []
        self._contents: list[dict[tuple[int, int], bytes]] = []
        self._safe: dict[int, int] = {}  # the moment of the last fsync, by folder
        self._moments: list[tuple[Any, dict[int, int], dict[tuple[int, int], bytes]]] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record every change of names and every fsync."""
        originals = {name: getattr(os, name) for name in (*CHANGES, "fsync")}
        self._look()
        self._sync_all()
        for name in CHANGES:
            setattr(os, name, self._around(originals[name]))
        os.fsync = self._fsync(originals["fsync"])
        try:
            yield
            self._look()
        finally:
            for name, function in originals.items():
                setattr(os, name, function)

    def crashes(self, folder: Path) -> Iterator[tuple[Path, Any]]:
        """Yield (a folder as it may be after a loss of power, what was acknowledged then)."""
        seen = set()
        for now, (acknowledged, safe, files) in enumerate(self._moments):
            for upto in range(min(safe.values(), default=0), now + 1):
                for how in ("lost", "zeros", "written"):
                    tree = self._tree(now, upto, safe, files, how)
                    key = (repr(acknowledged), tuple(sorted(tree.items(), key=lambda item: item[0])))
                    if key not in seen:
                        seen.add(key)
                        shutil.rmtree(folder, ignore_errors=True)
                        _write(folder, tree)
                        yield folder, acknowledged

    def _tree(
        self, now: int, upto: int, safe: dict[int, int], files: dict[Any, bytes], how: str
    ) -> dict[str, bytes | None]:
        tree: dict[str, bytes | None] = {}
        waiting = [("", self._root)]
        while waiting:
            folder, inode = waiting.pop()
            at = max(upto, safe.get(inode, 0))
            for name, entry in self._names[at].get(inode, {}).items():
                path = os.path.join(folder, name)
                if isinstance(entry, int):
                    tree[path] = None
                    waiting.append((path, entry))
                    continue
                late = self._contents[now].get(entry, self._contents[at].get(entry, b""))
                lost = files.get(entry, b"")
                zeros = lost[: len(late)].ljust(len(late), b"\0")
                tree[path] = {"lost": lost, "zeros": zeros, "written": late}[how]
        return tree

    def _look(self) -> None:
        """Note all names and contents."""
        names: dict[int, dict[str, tuple[int, int] | int]] = {}
        contents: dict[tuple[int, int], bytes] = {}
        present = set()
        for path in (self.root, *sorted(self.root.rglob("*"))):
            inode = path.stat().st_ino
            present.add(inode)
            entry: tuple[int, int] | int = inode
            if path.is_dir():
                names[inode] = {}
            else:
                entry = (inode, self._births.setdefault(inode, len(self._names)))
                contents[entry] = path.read_bytes()
            if path != self.root:
                names[path.parent.stat().st_ino][path.name] = entry
        self._births = {inode: birth for inode, birth in self._births.items() if inode in present}
        self._safe = {inode: moment for inode, moment in self._safe.items() if inode in present}
        self._names.append(names)
        self._contents.append(contents)
        self._moments.append((self.acknowledged, dict(self._safe), dict(self._files)))

    def _sync_all(self) -> None:
        self._files = dict(self._contents[-1])
        self._safe = dict.fromkeys(self._names[-1], len(self._names) - 1)
        self._moments[-1] = (self.acknowledged, dict(self._safe), dict(self._files))

    def _around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self._look()
            result = function(*args, **kwargs)
            self._look()
            return result

        return call

    def _fsync(self, function: Callable[[int], None]) -> Callable[[int], None]:
        def call(descriptor: int) -> None:
            self._look()
            function(descriptor)
            status = os.fstat(descriptor)
            for path in (self.root, *self.root.rglob("*")):
                if path.stat().st_ino == status.st_ino:
                    if path.is_dir():
                        self._safe[status.st_ino] = len(self._names) - 1
                    else:
                        self._files[(status.st_ino, self._births[status.st_ino])] = path.read_bytes()
            self._look()

        return call


def _write(folder: Path, tree: dict[str, bytes | None]) -> None:
    folder.mkdir(parents=True)
    for name, content in sorted(tree.items(), key=lambda item: item[0].count("/")):
        if content is None:
            (folder / name).mkdir()
        else:
            (folder / name).write_bytes(content)
