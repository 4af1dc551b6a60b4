"""Files that a program writes in a trial: they go to a temporary folder, and later reads of the same trial see them.

Invariants:

- what Python opens for writing, renames or removes is changed in the folder, whose tree is that of the file system;
- a path that was written is read from the folder, and one that was removed does not exist; all others are those of the
  file system. Folders are listed with both;
- temporary files, devices and files that are opened by number are left alone;
- nothing here imports torch. Code that opens files itself, in C or C++ or in another program, is not seen.
"""

from __future__ import annotations

import builtins
import errno
import functools
import importlib.util
import io
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

__all__ = ["WithheldFiles"]

_WRITE_FLAGS: Final = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_SYSTEM: Final = ("/dev/", "/proc/", "/sys/")
_ONE_PATH: Final = ("stat", "lstat", "access", "readlink", "chdir", "listdir")
"""Functions of `os` that read the path of their first argument."""
_CHANGES: Final = ("chmod", "chown", "utime", "truncate", "setxattr")
"""Functions of `os` that change the file of their first argument."""


class WithheldFiles:
    """Redirects what the program writes, from `start` until the process ends.

    Args:
        folder: an empty folder.
    """

    def __init__(self, folder: str) -> None:
        self._root = os.path.realpath(folder)
        self._temporary = os.path.realpath(tempfile.gettempdir()) + os.sep
        self._removed: set[str] = set()
        self._thread = threading.local()
        self.paths: dict[str, None] = {}
        """The paths that the program wrote, in their order."""
        self._stat, self._mkdir, self._open = os.stat, os.mkdir, os.open

    def start(self) -> None:
        """Start to redirect."""
        opens = self._opening(io.open)
        builtins.open = io.open = opens
        for name in _ONE_PATH:
            setattr(os, name, self._reading(getattr(os, name)))
        for name in _CHANGES:
            if hasattr(os, name):
                setattr(os, name, self._changing(getattr(os, name)))
        os.open = self._opening_by_flags(os.open)
        os.scandir = self._scanning(os.scandir)
        os.mkdir = self._making(os.mkdir)
        os.rmdir, os.unlink = self._removing(os.rmdir), self._removing(os.unlink)
        os.remove = os.unlink
        os.rename, os.replace = self._moving(os.rename), self._moving(os.replace)
        os.symlink, os.link = self._linking(os.symlink), self._linking(os.link)
        shutil.rmtree = self._removing_tree(shutil.rmtree)  # type: ignore[assignment]
        if importlib.util.find_spec("safetensors") is not None:
            self._redirect_safetensors()

    def _redirect_safetensors(self) -> None:
        """Redirect the two functions of safetensors that open files, before modules take them from here."""
        module: Any = importlib.import_module("safetensors")
        save, load = module.serialize_file, module.safe_open
        module.serialize_file = lambda tensors, filename, *args, **kwargs: save(
            tensors, self.for_writing(filename), *args, **kwargs
        )
        module.safe_open = lambda filename, *args, **kwargs: load(
            self.for_reading(filename), *args, **kwargs
        )

    # --- paths ---

    def _path(self, path: Any) -> str | None:
        """Return the program's absolute path; None for what is left alone."""
        if isinstance(path, int) or path is None or getattr(self._thread, "is_busy", False):
            return None
        try:
            name = os.fsdecode(path)
        except TypeError:
            return None
        with self._plain_files():
            return self._whole(os.path.abspath(name))

    @contextmanager
    def _plain_files(self) -> Iterator[None]:
        """Return a context in which this thread's functions are Python's own."""
        self._thread.is_busy = True
        try:
            yield
        finally:
            self._thread.is_busy = False

    def _whole(self, whole: str) -> str | None:
        if whole == self._root or whole.startswith(self._root + os.sep):  # below a folder of ours
            whole = whole[len(self._root) :] or os.sep
        if whole.startswith((*_SYSTEM, self._temporary)) or whole + os.sep == self._temporary:
            return None
        parent = os.path.dirname(whole)
        real = os.path.realpath(parent)
        return os.path.join(real, os.path.basename(whole)) if real != parent else whole

    def _ours(self, path: str) -> str:
        """Return the place of a path in the folder."""
        return self._root + os.path.splitdrive(path)[1]

    def _is_ours(self, path: str) -> bool:
        try:
            self._stat(self._ours(path), follow_symlinks=False)
        except OSError:
            return False
        return True

    def _is_removed(self, path: str) -> bool:
        return any(f"{path}{os.sep}".startswith(f"{each}{os.sep}") for each in self._removed)

    def _is_real(self, path: str) -> bool:
        if self._is_removed(path):
            return False
        try:
            self._stat(path, follow_symlinks=False)
        except OSError:
            return False
        return True

    def for_reading(self, path: Any) -> Any:
        """Return the path to read from in place of the program's."""
        name = self._path(path)
        if name is None:
            return path
        return self._ours(name) if self._is_ours(name) or self._is_removed(name) else path

    def for_writing(self, path: Any) -> Any:
        """Return the path to write to in place of the program's; its folder must exist for the program."""
        name = self._path(path)
        if name is None:
            return path
        folder = os.path.dirname(name)
        if not (self._is_ours(folder) or self._is_real(folder)):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fsdecode(path))
        ours = self._ours(name)
        self._make_parents(ours)
        self.paths[name] = None
        return ours

    def _copied(self, path: Any) -> Any:
        """Return the path of a file in the folder, with the content that it has for the program."""
        name = self._path(path)
        is_new = name is not None and not self._is_ours(name) and self._is_real(name)
        ours = self.for_writing(path)
        if is_new and name is not None:
            with self._plain_files():
                if os.path.isdir(name):
                    shutil.copytree(name, ours, symlinks=True)
                else:
                    shutil.copy2(name, ours)
        return ours

    def _make_parents(self, path: str) -> None:
        folder = os.path.dirname(path)
        missing = []
        while folder.startswith(self._root) and not _exists(self._stat, folder):
            missing.append(folder)
            folder = os.path.dirname(folder)
        for each in reversed(missing):
            self._mkdir(each)

    # --- the functions that the program calls ---

    def _opening(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(plain)
        def opening(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            if isinstance(file, int) or not isinstance(mode, str):
                return plain(file, mode, *args, **kwargs)
            if "x" in mode and self._exists(file):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), os.fsdecode(file))
            if "a" in mode or ("r" in mode and "+" in mode):
                return plain(self._copied(file), mode, *args, **kwargs)
            if "w" in mode or "x" in mode:
                return plain(self.for_writing(file), mode, *args, **kwargs)
            return plain(self.for_reading(file), mode, *args, **kwargs)

        return opening

    def _opening_by_flags(self, plain: Callable[..., int]) -> Callable[..., int]:
        @functools.wraps(plain)
        def opening(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
            if dir_fd is not None:
                return plain(path, flags, mode, dir_fd=dir_fd)
            if not flags & _WRITE_FLAGS:
                return plain(self.for_reading(path), flags, mode)
            if flags & os.O_EXCL and self._exists(path):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), os.fsdecode(path))
            if flags & os.O_TRUNC or not self._exists(path):
                return plain(self.for_writing(path), flags, mode)
            return plain(self._copied(path), flags, mode)

        return opening

    def _exists(self, path: Any) -> bool:
        name = self._path(path)
        return os.path.lexists(path) if name is None else self._is_ours(name) or self._is_real(name)

    def _reading(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(plain)
        def reading(path: Any = ".", *args: Any, **kwargs: Any) -> Any:
            if kwargs.get("dir_fd") is not None:
                return plain(path, *args, **kwargs)
            if plain.__name__ == "listdir" and self._has_both(path):
                return [entry.name for entry in self._entries(path)]
            return plain(self.for_reading(path), *args, **kwargs)

        return reading

    def _has_both(self, path: Any) -> bool:
        """Return True for a folder whose entries are partly in the folder of the trial, or removed."""
        name = self._path(path)
        if name is None or not self._is_real(name):
            return False
        return self._is_ours(name) or any(os.path.dirname(each) == name for each in self._removed)

    def _entries(self, path: Any) -> Iterator[Any]:
        name = self._path(path)
        assert name is not None
        shown = set()
        for folder in (self._ours(name), name):
            if _exists(self._stat, folder):
                with _real_scandir(folder) as entries:
                    for entry in entries:
                        is_gone = folder == name and not self._is_real(
                            os.path.join(name, entry.name)
                        )
                        if entry.name not in shown and not is_gone:
                            shown.add(entry.name)
                            yield _Entry(entry, os.path.join(os.fsdecode(path), entry.name))

    def _scanning(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(plain)
        def scanning(path: Any = ".") -> Any:
            if isinstance(path, int) or self._path(path) is None:
                return plain(path)
            place = self.for_reading(path)
            if place is path and not self._has_both(path):
                return plain(path)
            if not _exists(self._stat, place):  # as Python reports it
                return plain(place)
            return _Entries(self._entries(path))

        return scanning

    def _changing(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(plain)
        def changing(path: Any, *args: Any, **kwargs: Any) -> Any:
            return plain(self._copied(path), *args, **kwargs)

        return changing

    def _making(self, plain: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(plain)
        def making(path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
            if dir_fd is not None or self._path(path) is None:
                plain(path, mode, dir_fd=dir_fd)
                return
            if self._exists(path):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), os.fsdecode(path))
            plain(self.for_writing(path), mode)

        return making

    def _removing(self, plain: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(plain)
        def removing(path: Any, *, dir_fd: int | None = None) -> None:
            name = self._path(path)
            if dir_fd is not None or name is None:
                plain(path, dir_fd=dir_fd)
                return
            if not self._exists(path):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fsdecode(path))
            if self._is_ours(name):
                plain(self._ours(name))
            self._removed.add(name)

        return removing

    def _removing_tree(self, plain: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(plain)
        def removing(path: Any, *args: Any, **kwargs: Any) -> None:
            name = self._path(path)
            if name is None:
                plain(path, *args, **kwargs)
                return
            if self._is_ours(name):
                plain(self._ours(name), *args, **kwargs)
            self._removed.add(name)

        return removing

    def _moving(self, plain: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(plain)
        def moving(src: Any, dst: Any, **kwargs: Any) -> None:
            if self._path(src) is None and self._path(dst) is None:
                plain(src, dst, **kwargs)
                return
            source, name = self._copied(src), self._path(src)
            plain(source, self.for_writing(dst), **kwargs)
            if name is not None:
                self._removed.add(name)
                self.paths.pop(name, None)

        return moving

    def _linking(self, plain: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(plain)
        def linking(src: Any, dst: Any, *args: Any, **kwargs: Any) -> None:
            plain(self.for_reading(src), self.for_writing(dst), *args, **kwargs)

        return linking


_real_scandir = os.scandir


def _exists(stat: Callable[..., Any], path: str) -> bool:
    try:
        stat(path)
    except OSError:
        return False
    return True


class _Entry:
    """An entry of a folder, with the path that the program knows."""

    def __init__(self, entry: Any, path: str) -> None:
        self._entry = entry
        self.name, self.path = entry.name, path
        self.is_dir, self.is_file, self.is_symlink = entry.is_dir, entry.is_file, entry.is_symlink
        self.stat, self.inode = entry.stat, entry.inode

    def __fspath__(self) -> str:
        return self.path


class _Entries:
    """The entries of a folder, as `os.scandir` returns them."""

    def __init__(self, entries: Iterator[Any]) -> None:
        self._entries = entries

    def __iter__(self) -> Iterator[Any]:
        return self._entries

    def __next__(self) -> Any:
        return next(self._entries)

    def __enter__(self) -> _Entries:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Do nothing: the entries are read when they are needed."""
