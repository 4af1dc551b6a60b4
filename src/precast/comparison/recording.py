"""record: a file that holds a run for a comparison, without its tensors.

Invariants:

- the program computes the same values, and ends in the same way: what fails here is counted in the file;
- a recording belongs to the thread that opened it; after it, nothing is left on models, optimizers and PyTorch;
- graphs of `torch.compile` and `torch.export` contain no hooks: of a compiled part, the results of the outermost
  compiled module and the gradients are recorded.
"""

from __future__ import annotations

import contextlib
import functools
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from precast import _torch
from precast._torch.optimizer_hooks import on_optimizer_step
from precast.comparison.recorder import Level, Logits, RunRecorder, Selection
from precast.comparison.recording_file import RecordingWriter
from precast.diagnostics.tracing.listening import listen
from precast.engine.registration import engine
from precast.errors import ComparisonError
from precast.policy.module_names import modules_by_name, name_of_each

__all__ = ["Recording", "record"]


@_torch.never_compiled
def record(
    path: str | os.PathLike[str],
    model: nn.Module | None = None,
    *,
    level: Level = "operations",
    every: int = 1,
    steps: tuple[int, int] | None = None,
    modules: str = "",
    logits: Logits | None = None,
    split: int = 1,
) -> Recording:
    """Record the run inside ``with``, for `precast.compare`. The file holds no tensors.

    Args:
        path: the file to write. With several processes, each writes its own, such as `a.rank0.run` for `a.run`.
        model: the model whose modules are named; without one, the first module with parameters that is called.
        level: "operations" records each operation, "modules" only the results and gradients of modules, at lower cost.
        every: record every N-th step.
        steps: the first step to record, and the step after the last one.
        modules: record only modules whose path matches this pattern, in which `*` stands for any text, and modules
            inside them.
        logits: the path of the module that returns logits, or a function that takes the model's result and returns
            them. Probabilities of tokens are then compared, too.
        split: also measure each of N equal parts of a batch, so that the run can be compared with one that computes
            the parts one by one, or in N processes.

    Returns:
        The recording, a context manager.

    Raises:
        ComparisonError: an argument is not allowed.
        OutputError: the file cannot be written, or exists and is no file of precast.

    Examples:
        >>> import pathlib, tempfile, precast
        >>> folder = tempfile.TemporaryDirectory()
        >>> path = pathlib.Path(folder.name, "a.run")
        >>> model = torch.nn.Linear(4, 2)
        >>> with precast.record(path, model):
        ...     y = model(torch.ones(3, 4))
        >>> precast.compare(path, path).equal
        True
        >>> folder.cleanup()
    """
    if model is not None and not isinstance(model, nn.Module):
        raise ComparisonError(
            f"record(path, model): expected a torch.nn.Module or no model, got {type(model).__name__}"
        )
    if isinstance(logits, str) and model is not None and logits not in modules_by_name(model):
        raise ComparisonError(f"record(logits={logits!r}): the model has no module of that name")
    return Recording(Path(path), model, Selection(level, every, steps, modules, split, logits))


class Recording:
    """A recording of a run; created by `record`.

    Attributes:
        path: the file of this process.
    """

    def __init__(self, path: Path, model: nn.Module | None, selection: Selection) -> None:
        rank, world_size = _rank()
        several = path.with_name(f"{path.stem}.rank{rank}{path.suffix}")
        self.path = several if world_size > 1 else path
        self._model = model
        self._selection = selection
        self._ends = contextlib.ExitStack()
        self._hooked: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    @_torch.never_compiled
    def __enter__(self) -> Recording:
        engine()  # loads the library, which measures tensors faster
        rank, world_size = _rank()
        level, split = self._selection.level, self._selection.split
        writer = RecordingWriter(
            self.path, level=level, rank=rank, world_size=world_size, split=split
        )
        self._recorder = recorder = RunRecorder(writer, self._selection)
        for method in (writer.close, recorder.flush):
            self._ends.callback(recorder.failures.call_unseen, "end of the recording", method)
        if self._model is not None:
            self._learn(self._model)
        self._ends.callback(_torch.on_module_call(self._outermost_call))
        on_backward = functools.partial(recorder.call, recorder.backward_starts)
        self._ends.callback(_torch.on_backward(on_backward))
        before = functools.partial(recorder.call, recorder.optimizer_starts)
        after = functools.partial(recorder.call, recorder.optimizer_ends)
        self._ends.callback(on_optimizer_step(before=before, after=after))
        if level == "operations":
            self._ends.enter_context(listen(recorder))
        return self

    @_torch.never_compiled
    def __exit__(self, *_error: object) -> None:
        self._ends.close()

    def _outermost_call(self, module: nn.Module, run: Callable[[], Any]) -> Any:
        if not self._recorder.is_in_module:
            self._recorder.call(self._call_starts, module)
        return run()

    def _call_starts(self, module: nn.Module) -> None:
        if _torch.is_real() and next(module.parameters(), None) is not None:
            self._learn(module)

    def _learn(self, model: nn.Module) -> None:
        """Take names from the first model, and hook the modules of each model once."""
        if not self._hooked:
            self._recorder.learn(model)
        elif model in self._hooked:
            return
        layers = (each for each in model.modules() if isinstance(each, nn.TransformerEncoderLayer))
        without_hooks = {id(module) for layer in layers for module in layer.modules()}
        for name, module in name_of_each(model):
            if module in self._hooked:
                continue
            self._hooked.add(module)
            hooks = _CallHooks(self._recorder, name)
            if id(module) in without_hooks:  # with hooks, it would leave PyTorch's fast path
                self._ends.callback(_torch.on_call_without_hooks(module, hooks.around))
                continue
            # Not `module.register...`, which raises for a scripted module, although its hooks are called.
            before, after = nn.Module.register_forward_pre_hook, nn.Module.register_forward_hook
            self._ends.callback(before(module, hooks.enter, with_kwargs=True).remove)
            handle = after(module, hooks.leave, with_kwargs=True, always_call=True)
            self._ends.callback(handle.remove)


class _CallHooks:
    """The hooks of one module; in a copy of the model, hooks without a recorder."""

    def __init__(self, recorder: RunRecorder | None = None, name: str = "") -> None:
        self._recorder = recorder
        self._name = name

    def __reduce__(self) -> tuple[Any, ...]:
        return _CallHooks, ()

    @_torch.runs_uncompiled
    def enter(self, module: nn.Module, *arguments: Any) -> None:
        if not torch.compiler.is_dynamo_compiling() and (recorder := self._recorder) is not None:
            recorder.call(recorder.module_starts, self._name, module, arguments)

    @_torch.runs_uncompiled
    def leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if not torch.compiler.is_dynamo_compiling() and (recorder := self._recorder) is not None:
            recorder.call(recorder.module_ends, self._name, module, (args, kwargs), output)

    def around(self, module: nn.Module, run: Callable[[], Any], args: Any, kwargs: Any) -> Any:
        """Run a call between the hooks."""
        self.enter(module, args, kwargs)
        output = None
        try:
            output = run()
            return output
        finally:
            self.leave(module, args, kwargs, output)


def _rank() -> tuple[int, int]:
    """Return the rank of this process and the number of processes."""
    if _torch.is_distributed():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    number, of = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    return (int(number), int(of)) if number.isdecimal() and of.isdecimal() else (0, 1)
