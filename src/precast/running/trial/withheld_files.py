"""Withheld writes of a trial: they go to a temporary folder, and later reads of the same trial see them.

The folder has the tree of the file system. A directory in which the program changes something becomes a directory of
links to the real entries there, so Python's own functions list, rename and remove these, and no real file changes.

Invariants:

- a path whose directory was changed is looked up in the folder, every other path in the file system;
- temporary files, devices, and files that are opened by number are left alone;
- nothing here imports torch. Code that opens files itself, in C or C++ or in another program, is not seen.
"""

from __future__ import annotations

import builtins
import contextlib
import fcntl
import functools
import importlib.util
import io
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path, PosixPath
from typing import Any, Final, Literal

__all__ = ["WithheldFiles"]

_SYSTEM: Final = ("/dev/", "/proc/", "/sys/")
_FLAGS: Final = {"w": os.O_TRUNC, "x": os.O_EXCL, "a": os.O_APPEND, "+": os.O_RDWR}
_WRITE_FLAGS: Final = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_APPEND

Use = Literal["read", "look", "target", "change", "create", "replace", "remove", "empty"]
"""A function's use of a path: "look": read the entry itself, not the target of a link; "target": write it into a link;
"change": change a part of the file; "create": add an entry; "replace": write a file anew; "empty": remove a folder."""
Uses = tuple[Use | None, ...]
"""The uses of a function's first arguments; None for one that is no path."""
_FUNCTIONS: Final[dict[Uses, str]] = {
    ("read",): "access chdir listdir scandir stat",
    ("look",): "lstat readlink",
    ("change",): "chmod chown setxattr truncate utime",
    ("create",): "mkdir",
    ("remove",): "remove unlink",
    ("empty",): "rmdir",
    ("remove", "replace"): "rename replace",
    ("change", "create"): "link",
    ("target", "create"): "symlink",
}
"""Functions of `os` by their uses of paths."""


class WithheldFiles:
    """Redirects files that the program writes to a folder, which the processes of one trial share.

    Files in the folder `apart` are not redirected.
    """

    def __init__(self, folder: Path, apart: Path) -> None:
        folder = folder.resolve()
        self._tree, self._real = str(folder / "tree"), str(folder / "real")
        self._lock = str(folder / "lock")
        temporary = (os.path.realpath(each) + os.sep for each in (tempfile.gettempdir(), apart))
        self._apart = (*_SYSTEM, *temporary)
        self._thread = threading.local()
        self._resolved = functools.cache(os.path.realpath)
        self.paths: dict[str, None] = {}
        """The paths that the program wrote, in their order."""
        with self._locked():
            if not os.path.lexists(self._tree):  # no other process was first
                os.symlink(os.sep, self._real)
                os.symlink(self._real, self._tree)
        self._fill(self._tree, "")

    def start(self) -> None:
        """Start to redirect."""
        table: dict[Any, tuple[Any, tuple[str, ...]]] = {
            io.open: (_uses_of_opening, ("file", "mode")),
            os.open: (_uses_of_opening, ("path", "flags")),
            shutil.rmtree: (("empty",), ("path",)),
        }
        for uses, functions in _FUNCTIONS.items():
            names = ("path",) if len(uses) == 1 else ("src", "dst")
            table |= {
                getattr(os, each): (uses, names) for each in functions.split() if hasattr(os, each)
            }
        redirected = {id(plain): self.redirected(plain, *more) for plain, more in table.items()}
        for module in [builtins, *sys.modules.values()]:  # others may have taken it by name
            for name, value in [*getattr(module, "__dict__", {}).items()]:  # it may be None
                if id(value) in redirected:
                    setattr(module, name, redirected[id(value)])
        if importlib.util.find_spec("safetensors") is not None:
            # Before its modules take these functions, which open files in Rust.
            library: Any = importlib.import_module("safetensors")
            library.safe_open = self.redirected(library.safe_open, ("read",), ("filename",))
            save, names = library.serialize_file, ("tensor_dict", "filename")
            library.serialize_file = self.redirected(save, (None, "replace"), names)

    def shown(self, text: str) -> str:
        """Return a message with the program's paths."""
        return text.replace(self._tree, "")

    def redirected(
        self, plain: Any, uses: Uses | Callable[..., Uses], names: tuple[str, ...] = ("path",)
    ) -> Callable[..., Any]:
        """Return a function that is called with other paths as its first arguments, which have these names.

        `uses` may depend on the second argument.
        """
        lists = plain.__name__ in {"listdir", "scandir"}

        @functools.wraps(plain)
        def call(*args: Any, **kwargs: Any) -> Any:
            if any(kwargs.get(name) is not None for name in ("dir_fd", "src_dir_fd", "dst_dir_fd")):
                return plain(*args, **kwargs)
            args += tuple(kwargs.pop(name) for name in names[len(args) :] if name in kwargs)
            args = args or ((".",) if lists else ())
            own = uses(*args[1:2]) if callable(uses) else uses
            own = ("look",) if own == ("read",) and kwargs.get("follow_symlinks") is False else own
            paths = [self._place(use, path) for use, path in zip(own, args, strict=False)]
            result = plain(*paths, *args[len(paths) :], **kwargs)
            if plain.__name__ != "scandir" or paths[0] is args[0]:
                return result
            with result:
                entries = [each.name for each in result]
            return _Entries(_Entry(os.fsdecode(args[0])).joinpath, entries)

        return call

    # --- paths ---

    def _place(self, use: Use | None, path: Any) -> Any:
        """Return the path to use in place of the program's; the folder is prepared for a change."""
        is_path = isinstance(path, str | bytes | os.PathLike)
        if use is None or not is_path or getattr(self._thread, "is_busy", False):
            return path
        self._thread.is_busy = True  # so that the functions that are called here are Python's own
        try:
            name = os.path.abspath(os.fsdecode(path)).removeprefix(self._tree) or os.sep
            name = os.path.join(self._resolved(os.path.dirname(name)), os.path.basename(name))
            is_apart = f"{name}{os.sep}".startswith(self._apart)
            return path if is_apart else self._prepared(use, name, path)
        finally:
            self._thread.is_busy = False

    def _prepared(self, use: Use, name: str, path: Any) -> Any:
        place = self._tree + name
        if use in {"read", "look", "target"}:
            is_relative_target = use == "target" and not os.path.isabs(path)
            if is_relative_target or not self._is_changed(os.path.dirname(name)):
                return path
            return (self._source(place) or place) if use == "look" else place
        self._fill(os.path.dirname(place), os.path.basename(place))
        source = self._source(place)
        if use == "empty" or (use == "change" and source and os.path.isdir(source)):
            self._fill(place, "")
        elif use in {"change", "replace"} and source and os.path.isfile(source):
            os.unlink(place)
            if use == "change":
                shutil.copy2(source, place)
        if use in {"remove", "empty"}:
            self.paths.pop(name, None)
        elif use != "create" or not os.path.lexists(place):  # an entry that exists is an error
            self.paths[name] = None
        return place

    def _is_changed(self, folder: str) -> bool:
        """Return True unless the path of a folder leads to the real one in the tree."""
        place = self._tree + folder
        with contextlib.suppress(OSError):
            return not os.path.samefile(place, folder)
        with self._locked():  # while no other process replaces a link
            return os.path.exists(place) or os.path.exists(folder)

    def _source(self, place: str) -> str | None:
        """Return the real file or folder to which a place in the tree is a link; None for a file of the program."""
        with contextlib.suppress(OSError):
            target = os.readlink(place)
            return target if target.startswith(self._real) else None
        return None

    def _fill(self, place: str, needed: str) -> None:
        """Replace a link to a folder by a folder of links to its entries, and likewise the folders above.

        `needed` is the entry that must be there, in a folder that cannot be listed.
        """
        if place != self._tree:
            self._fill(os.path.dirname(place), os.path.basename(place))
        if self._source(place) is None:
            return
        with self._locked():
            source = self._source(place)
            if source is None or not os.path.isdir(source):
                return
            try:
                entries = os.listdir(source)
            except PermissionError:
                entries = [needed] if os.path.lexists(os.path.join(source, needed)) else []
            new = f"{self._lock}.new"
            os.mkdir(new)
            for entry in entries:
                os.symlink(os.path.join(source, entry), os.path.join(new, entry))
            os.unlink(place)
            os.rename(new, place)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Return a context in which no other process of the trial replaces links."""
        with open(self._lock, "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def _uses_of_opening(mode: str | int = "r") -> Uses:
    """Return the use of a path that is opened with a mode, as that of `open`, or with the flags of `os.open`."""
    flags = mode if isinstance(mode, int) else sum(_FLAGS.get(letter, 0) for letter in str(mode))
    if flags & (os.O_EXCL | os.O_TRUNC):
        return ("create" if flags & os.O_EXCL else "replace",)
    return ("change" if flags & _WRITE_FLAGS else "read",)


class _Entry(PosixPath):
    """An entry of a folder of links, with the path that the program knows, as `os.DirEntry`."""

    path = property(str)

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        return os.path.isdir(self) and (follow_symlinks or not self.is_symlink())

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        return os.path.isfile(self) and (follow_symlinks or not self.is_symlink())

    def inode(self) -> int:
        return self.stat(follow_symlinks=False).st_ino


class _Entries(map):  # type: ignore[type-arg]
    """The entries of a folder of links, as `os.scandir` returns them."""

    def __enter__(self) -> _Entries:
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing: the folder is closed."""

    close = __exit__
