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
from pathlib import Path
from typing import Any, Final, Literal

__all__ = ["WithheldFiles"]

_SYSTEM: Final = ("/dev/", "/proc/", "/sys/")
_WRITE_FLAGS: Final = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

Use = Literal["read", "look", "target", "change", "create", "replace", "remove", "empty"]
"""A function's use of a path: "look": read the entry itself, not the target of a link; "target": write it into a link;
"change": change a part of the file; "create": add an entry; "replace": write a file anew; "empty": remove a folder."""
_USES: Final[dict[str, tuple[Use, ...]]] = {
    **dict.fromkeys(("access", "chdir", "listdir", "scandir", "stat"), ("read",)),
    **dict.fromkeys(("lstat", "readlink"), ("look",)),
    **dict.fromkeys(("chmod", "chown", "setxattr", "truncate", "utime"), ("change",)),
    **dict.fromkeys(("remove", "unlink"), ("remove",)),
    **dict.fromkeys(("rename", "replace"), ("remove", "replace")),
    "rmdir": ("empty",),
    "mkdir": ("create",),
    "link": ("change", "create"),
    "symlink": ("target", "create"),
}
"""Maps functions of `os` to the uses of their first arguments."""


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
        pairs = [(getattr(os, name), uses) for name, uses in _USES.items() if hasattr(os, name)]
        redirected: list[tuple[Any, Any]] = [
            (io.open, self._opening(io.open)),
            (os.open, self._opening_by_flags(os.open)),
            *((each, self._redirected(each, uses)) for each, uses in pairs),
            (shutil.rmtree, self._redirected(shutil.rmtree, ("empty",))),
        ]
        for plain, function in redirected:
            for module in [builtins, *sys.modules.values()]:  # others may have taken it by name
                names = getattr(module, "__dict__", {})  # an entry may be None
                for name in [name for name, value in names.items() if value is plain]:
                    setattr(module, name, function)
        if importlib.util.find_spec("safetensors") is not None:
            # Before its modules take these functions, which open files in Rust.
            library: Any = importlib.import_module("safetensors")
            library.safe_open = self._redirected(library.safe_open, ("read",))
            save = library.serialize_file
            library.serialize_file = lambda tensors, filename, *args, **kwargs: save(
                tensors, self.place("replace", filename), *args, **kwargs
            )

    def shown(self, text: str) -> str:
        """Return a message with the program's paths."""
        return text.replace(self._tree, "")

    # --- paths ---

    def place(self, use: Use, path: Any) -> Any:
        """Return the path to use in place of the program's; the folder is prepared for a change."""
        if getattr(self._thread, "is_busy", False) or not isinstance(
            path, str | bytes | os.PathLike
        ):
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
            exist = os.path.exists(place), os.path.exists(folder)
            return not os.path.samefile(place, folder) if all(exist) else any(exist)

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

    # --- the functions that the program calls ---

    def _redirected(self, plain: Callable[..., Any], uses: tuple[Use, ...]) -> Callable[..., Any]:
        """Return a function that is called with other paths as its first arguments."""
        names = ("path",) if len(uses) == 1 else ("src", "dst")
        lists = plain.__name__ in {"listdir", "scandir"}

        @functools.wraps(plain)
        def call(*args: Any, **kwargs: Any) -> Any:
            if any(kwargs.get(name) is not None for name in ("dir_fd", "src_dir_fd", "dst_dir_fd")):
                return plain(*args, **kwargs)
            args += tuple(kwargs.pop(name) for name in names[len(args) :] if name in kwargs)
            paths = args[: len(uses)] or ((".",) if lists else ())
            looks = kwargs.get("follow_symlinks") is False and uses == ("read",)
            actual = [
                self.place("look" if looks else use, path)
                for use, path in zip(uses, paths, strict=False)
            ]
            result = plain(*actual, *args[len(uses) :], **kwargs)
            if plain.__name__ == "scandir" and actual[0] is not paths[0]:
                return _Entries(os.fsdecode(paths[0]), result)
            return result

        return call

    def _opening(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(plain)
        def opening(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            letters = str(mode)
            use: Use = "change" if "a" in letters or "+" in letters else "read"
            use = "replace" if "w" in letters else "create" if "x" in letters else use
            return plain(self.place(use, file), mode, *args, **kwargs)

        return opening

    def _opening_by_flags(self, plain: Callable[..., int]) -> Callable[..., int]:
        @functools.wraps(plain)
        def opening(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
            if dir_fd is not None:
                return plain(path, flags, mode, dir_fd=dir_fd)
            use: Use = "change" if flags & _WRITE_FLAGS else "read"
            use = "create" if flags & os.O_EXCL else "replace" if flags & os.O_TRUNC else use
            return plain(self.place(use, path), flags, mode)

        return opening


class _Entry:
    """An entry of a folder of links, with the path that the program knows, as `os.DirEntry`."""

    def __init__(self, folder: str, name: str) -> None:
        self.name, self.path = name, os.path.join(folder, name)

    def __fspath__(self) -> str:
        return self.path

    def is_symlink(self) -> bool:
        return os.path.islink(self.path)

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        return os.path.isdir(self.path) and (follow_symlinks or not self.is_symlink())

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        return os.path.isfile(self.path) and (follow_symlinks or not self.is_symlink())

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        return os.stat(self.path, follow_symlinks=follow_symlinks)

    def inode(self) -> int:
        return self.stat(follow_symlinks=False).st_ino


class _Entries(contextlib.AbstractContextManager["_Entries"], Iterator[_Entry]):
    """The entries of a folder of links, as `os.scandir` returns them."""

    def __init__(self, folder: str, entries: Any) -> None:
        with entries:
            self._entries = iter([_Entry(folder, entry.name) for entry in entries])

    def __next__(self) -> _Entry:
        return next(self._entries)

    def __exit__(self, *_: object) -> None:
        """Do nothing: the folder is closed."""

    close = __exit__
