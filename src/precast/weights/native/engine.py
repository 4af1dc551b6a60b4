"""The state of the native engine in this process: the loaded library, and whether new regions use it."""

from __future__ import annotations

from collections.abc import Callable

from precast.weights.native.api import NativeApi

__all__ = ["NativeEngine", "native_engine"]


class NativeEngine:
    """The library of compiled kernels, once it is loaded.

    Attributes:
        api: the library's functions; None until it is loaded.
        is_used: True if regions that are entered now use it.
        leave: `api.leave`; without a library, a function that leaves no region.
    """

    __slots__ = ("api", "is_used", "leave")

    def __init__(self) -> None:
        self.api: NativeApi | None = None
        self.is_used = False
        self.leave: Callable[[object], int] = lambda _: 0

    def load(self, api: NativeApi) -> None:
        """Use the library, until the process ends."""
        self.api, self.leave = api, api.leave


native_engine = NativeEngine()
