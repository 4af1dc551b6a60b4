"""The recorder of a run: receives operations, calls of modules and steps of optimizers, and writes their rows.

Invariants:

- no value of the program changes: tensors are only read, with all modes off, and errors of the recorder are counted;
- results are measured when the operation ends, so a later write in place does not change their rows;
- the rows of a step reach the file at its end, or when many wait;
- a tensor that no recorded operation computed has a row of its own when it is first read.
"""

from __future__ import annotations

import contextlib
import functools
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from precast import _torch
from precast._internal.display import dtype_name, plural
from precast._internal.pytree import tensors_in
from precast.comparison.call_arguments import (
    UNINITIALIZED,
    argument_text,
    is_asynchronous,
    is_random,
    results_of,
)
from precast.comparison.recording_file import RecordingWriter, Row, RowInput
from precast.comparison.sketches import measure
from precast.comparison.tensor_origins import TensorOrigins, is_measurable
from precast.diagnostics.failures import Failures
from precast.diagnostics.tracing import reasons
from precast.diagnostics.tracing.call_sites import ModuleNames, frame_above, read_stack
from precast.diagnostics.tracing.graph_places import GraphPlaces
from precast.diagnostics.tracing.listening import OperationListener, casting_devices
from precast.diagnostics.tracing.tally import CallPlace
from precast.engine.operation import Operation
from precast.engine.operator_kinds import Cast, dtype_of, kind_of
from precast.errors import ComparisonError
from precast.policy.module_names import named_buffers, named_parameters
from precast.policy.policy import Policy
from precast.policy.shortest_text import whole_file

__all__ = ["Level", "Logits", "RunRecorder", "Selection"]

_MOST_ROWS: Final = 20_000
"""The most rows of one step."""
_MOST_WAITING: Final = 1024
"""The most rows that wait for the end of a step."""
_MOST_RESULTS: Final = 4
"""The most results of one operation that are measured, other than tensors in lists that it writes."""
_OF_BATCH: Final = frozenset({"operation", "output", "tensor", "input", "logits"})
"""The kinds of rows whose tensors may be split into parts of the batch."""
_MOST_TOKENS: Final = 16_384
"""The most positions of logits whose token and probability are recorded."""

Level = Literal["operations", "modules"]
Logits = str | Callable[[Any], Tensor]


@dataclass(frozen=True)
class Selection:
    """The part of a run that is recorded; `record` describes the fields."""

    level: Level = "operations"
    every: int = 1
    steps: tuple[int, int] | None = None
    modules: str = ""
    split: int = 1
    logits: Logits | None = None

    def __post_init__(self) -> None:
        if self.level not in get_args(Level):
            expected = " or ".join(map(repr, get_args(Level)))
            raise ComparisonError(f"record(level=...): expected {expected}, got {self.level!r}")
        for name, number in (("every", self.every), ("split", self.split)):
            if number < 1:
                raise ComparisonError(f"record({name}=...): expected at least 1, got {number}")
        if self.steps is not None and not 0 <= self.steps[0] < self.steps[1]:
            raise ComparisonError(
                f"record(steps=...): expected (A, B) with 0 <= A < B, got {self.steps}"
            )

    def takes_step(self, step: int) -> bool:
        """Return True if a step is recorded."""
        first, end = self.steps or (0, step + 1)
        return first <= step < end and (step - first) % self.every == 0

    def takes_module(self, path: str) -> bool:
        """Return True if the operations of a module are recorded: its own path or one around it matches."""
        if not self.modules:
            return True
        pattern = ".*".join(map(re.escape, self.modules.split("*")))
        return re.fullmatch(rf"(?:{pattern})(?:\..*)?", path) is not None


class RunRecorder(OperationListener):
    """Records one run in one thread."""

    def __init__(self, writer: RecordingWriter, selection: Selection) -> None:
        self.failures = Failures()
        self.step = 0
        self._writer = writer
        self._selection = selection
        self._names = ModuleNames([])
        self._origins = TensorOrigins()
        self._nodes = GraphPlaces()
        self._weights: dict[int, tuple[Tensor, str, str]] = {}
        """Maps the id of a storage's first tensor to it, its kind and its name."""
        self._rules: list[tuple[Operation, Policy, str | None]] = []
        self._rows: list[Row] = []
        self._measurements: list[Tensor] = []
        self._positions: dict[int, tuple[int, int]] = {}
        """Maps the number of a row that waits to the position of its measurement, and the number of its parts."""
        self._tokens: dict[int, tuple[Tensor, Tensor]] = {}
        """Maps the number of a row of logits that waits to the likeliest tokens and the logarithms of probabilities."""
        self._program_inputs: list[Tensor] = []
        self._setting: dict[str, str] | None = None
        """The region around the model, until it is written; empty after that."""
        self._next = self._of_step = 0
        """The numbers of rows so far, and in this step."""
        self._dropped = self._unmeasured = 0
        self._busy = False
        self._thread = threading.get_ident()
        self._calls: list[tuple[str, list[RowInput]]] = []
        """The names of the modules that run, the outermost first, with the results of the modules inside."""
        self._is_on = selection.takes_step(0)
        self._mode_of_module = ""
        self._trains = self._step_is_over = self._was_called = False

    def call(self, method: Callable[..., None], *args: Any) -> None:
        """Call a method in the recorded thread only; its exceptions are counted."""
        if threading.get_ident() == self._thread:
            self.failures.call_unseen(method.__name__, method, *args)

    def learn(self, model: nn.Module) -> None:
        """Take the names of modules, parameters and buffers from a model."""
        self._names = ModuleNames([model])
        for kind, named in (("buffer", named_buffers), ("weight", named_parameters)):
            for name, tensor in named(model):
                if is_measurable(tensor):
                    self._weights[id(tensor.untyped_storage())] = tensor, kind, name

    # --- operations (`OperationListener`) ---

    @property
    def depth(self) -> int:
        """The number of rules that are being applied."""
        return len(self._rules)

    def casting_here(self) -> list[str]:
        """Return the device types on which autocast casts the current operation."""
        return casting_devices(self._rules[-1] if self._rules else None)

    def begin(self, op: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:  # noqa: ARG002
        """Remember the rule of an operation, for the rows of the operations that it calls."""
        policy = reasons.policy_here(op.device_type)
        self._rules.append((op, policy, reasons.decide(policy, op.name, op.device_type).rule))

    def end(self, _result: Any) -> None:
        """Forget the rule."""
        self._rules.pop()

    def fail(self, _error: BaseException) -> None:
        """Forget the rule."""
        self._rules.pop()

    def saw(self, func: Any, call: Any, out: Any, _seconds: float, _inside: Sequence[Cast]) -> None:
        """Record the results of an operation."""
        if self._busy or not self._is_on:
            return
        kind = kind_of(func)
        if kind.base in UNINITIALIZED:
            for tensor in filter(is_measurable, tensors_in(out)):
                self._origins.put(tensor)
            return
        has_node = self._nodes.has_new
        if kind.is_view and not has_node:
            return
        place = self._place()
        if has_node and place.phase != "backward":
            self._nodes.add(kind.name, place)
        if not kind.is_view and place.phase != "optimizer":
            self._record_results(func, call, out, place)

    def _record_results(self, func: Any, call: Any, out: Any, place: CallPlace) -> None:
        (args, kwargs), name = call, kind_of(func).name
        arguments = argument_text(func, args, kwargs)
        results = []
        for tensor in filter(self._can, results_of(func, args, kwargs, out)):
            if _is_workspace(tensor, arguments, args):
                self._origins.put(tensor)
            else:
                results.append(tensor)
        if not results:
            return
        inputs = self._inputs([*args, *kwargs.values()], place)
        if is_asynchronous(name):
            for tensor in results:
                self._origins.pass_on(tensor, inputs)
            return
        rule = ""
        if self._rules and self._rules[0][2] is not None:
            rule = f"{self._rules[0][0].name.removeprefix('aten::')}: {self._rules[0][2]}"
        traits = " ".join(filter(None, ("random" if is_random(func) else "", self._mode_of_module)))
        is_list = isinstance(out, list) or not isinstance(out, Tensor | tuple)
        for position, tensor in enumerate(results if is_list else results[:_MOST_RESULTS]):
            self._add(
                "operation", place, name, inputs, tensor,
                result=position, arguments=arguments, rule=rule, traits=traits,
            )  # fmt: skip

    def _place(self) -> CallPlace:
        frame = frame_above(1)
        source, owner, phase = read_stack(frame)
        module = None if owner is None else self._names.of(owner, frame)
        self._mode_of_module = "" if owner is None else _mode(owner)
        node = _torch.current_node()
        if node is None:
            return CallPlace(module, source, phase)
        creator = None if module is not None else self._nodes.creator(node)
        if creator is not None:
            _, forward = creator
            module, source = forward.module, forward.source or source
        return CallPlace(module, source, "backward")

    # --- calls of modules, from hooks ---

    @property
    def is_in_module(self) -> bool:
        """True while a module of the model runs."""
        return bool(self._calls)

    def module_starts(self, name: str, module: nn.Module, arguments: Any) -> None:
        """Handle the start of a module. The arguments of an outermost one are inputs of the program."""
        is_outermost = not self._calls and _torch.is_real()
        if is_outermost and next(module.parameters(), None) is not None:
            is_next = self._was_called and not self._trains and not torch.is_grad_enabled()
            if is_next or (self._step_is_over and torch.is_grad_enabled()):
                self.new_step()
            self._was_called = True
        if is_outermost and self._is_on:
            self._inputs(arguments, CallPlace(name, None, "other"))
            self._add_weights()
            tensors = tensors_in(arguments)
            self._program_inputs = tensors if self._selection.logits is not None else []
            if self._setting is None:
                self._setting = _region_setting(tensors)
        self._calls.append((name, []))

    def module_ends(self, name: str, module: nn.Module, arguments: Any, output: Any) -> None:
        """Record the results of a module; `output` is None if it raised an error."""
        inner: list[RowInput] = []
        while self._calls:  # those inside may have ended by an error
            last, inner = self._calls.pop()
            if last == name:
                break
        if not self._is_on or self._busy or not _torch.is_real():
            return
        place = CallPlace(name, None, "backward" if _torch.in_backward() else "forward")
        kind, outer = type(module).__name__, self._calls[-1][1] if self._calls else []
        for position, tensor in enumerate(tensors_in(output)[:_MOST_RESULTS]):
            if not self._can(tensor):
                continue
            inputs = self._known([tensor])
            if not inputs:  # computed by operations that are not recorded
                own = _torch.own_tensors(module) if inner else [*module.parameters()]
                inputs = (*self._inputs([arguments, own], place), *inner)
            number = self._add(
                "output", place, kind, inputs, tensor, result=position, traits=_mode(module)
            )
            outer.append(RowInput((number,)))
            if self._selection.level == "modules" and tensor.grad_fn is not None:
                self._follow(name, kind, position, tensor)
        if output is not None and self._selection.logits is not None:
            self._add_logits(name, output, place)
        if not self._calls:
            self._program_inputs = []

    def _add_logits(self, name: str, output: Any, place: CallPlace) -> None:
        """Record the square roots of probabilities, the likeliest tokens, and logarithms of probabilities.

        The logarithms are those of the next tokens in the program's input, or of the likeliest ones if there is none.
        """
        source = self._selection.logits
        if callable(source) and not self._calls:
            logits = source(output)
        elif source == name:
            logits = tensors_in(output)[0]
        else:
            return
        with self._reading():
            logs = logits.detach().float().log_softmax(-1)
            likeliest = logs.argmax(-1)
            integers = (each for each in self._program_inputs if each.dtype is torch.int64)
            tokens = next((each for each in integers if each.shape == likeliest.shape), likeliest)
            if tokens is not likeliest and tokens.dim():
                tokens = torch.cat(
                    [tokens.narrow(-1, 1, tokens.shape[-1] - 1), likeliest[..., -1:]], -1
                )
            chosen = logs.gather(-1, tokens.unsqueeze(-1))
            roots = (logs / 2).exp_()
        number, place = self._next, CallPlace(None, None, place.phase)
        self._add("logits", place, "logits", self._known([logits]), roots)
        if self._next > number:  # else it was left out
            both = likeliest.flatten()[:_MOST_TOKENS], chosen.flatten()[:_MOST_TOKENS]
            self._tokens[number] = both

    def _follow(self, name: str, kind: str, position: int, tensor: Tensor) -> None:
        """Record the gradient of a module's result when backward reaches it."""
        place = CallPlace(name, None, "backward")

        def reached(gradient: Tensor | None) -> None:
            if gradient is not None and self._is_on and self._can(gradient):
                read = self._known([gradient])
                add = functools.partial(self._add, "output", place, kind, read, gradient)
                self.failures.call_unseen(name, functools.partial(add, result=position))

        _torch.hook_gradient(tensor, reached)

    # --- the steps of a program ---

    def backward_starts(self, roots: Any, _gradients: Any) -> None:
        """Record the losses of a backward pass."""
        self._trains = True
        if self._step_is_over:
            self.new_step()
        if not self._is_on:
            return
        place = CallPlace(None, None, "other")
        for position, root in enumerate(tensors_in(roots)):
            if root.numel() == 1 and self._can(root):
                self._add("loss", place, "loss", self._known([root]), root, result=position)

    def optimizer_starts(self, optimizer: Optimizer) -> None:
        """Record the gradients that an optimizer is about to read."""
        for _, gradient, name, _ in self._parameters(optimizer):
            if self._can(gradient):
                place = CallPlace(_owner(name), None, "backward")
                self._add("gradient", place, name, self._known([gradient]), gradient)

    def optimizer_ends(self, optimizer: Optimizer) -> None:
        """Record the parameters that an optimizer has written."""
        for parameter, gradient, name, settings in self._parameters(optimizer):
            if self._can(parameter):
                place, inputs = CallPlace(_owner(name), None, "optimizer"), [gradient, parameter]
                self._add("update", place, name, self._known(inputs), parameter, arguments=settings)
        self._trains = self._step_is_over = True

    def _parameters(self, optimizer: Optimizer) -> Iterator[tuple[Tensor, Tensor, str, str]]:
        """Yield the parameters that have gradients, with these, their names and the settings of the optimizer."""
        for index, group in enumerate(optimizer.param_groups if self._is_on else ()):
            plain = {k: v for k, v in group.items() if isinstance(v, int | float | tuple | bool)}
            settings = [f"optimizer={type(optimizer).__name__}"]
            settings += [f"{name}={value!r}" for name, value in sorted(plain.items())]
            for position, parameter in enumerate(group["params"]):
                if parameter.grad is not None:
                    _, _, name = self._weight(parameter) or (
                        0, 0, f"group {index}, parameter {position}",
                    )  # fmt: skip
                    yield parameter, parameter.grad, name, "; ".join(settings)

    def new_step(self) -> None:
        """End the step, and begin the next one."""
        self._step_is_over = False
        self.flush()
        self._nodes.new_step()
        self.step += 1
        self._of_step = 0
        was_on, self._is_on = self._is_on, self._selection.takes_step(self.step)
        if self._is_on and not was_on:
            self._origins.clear()

    def flush(self) -> None:
        """Write the rows that wait."""
        if not self._rows:
            return
        with self._reading():
            matrix = torch.stack([each.cpu() for each in self._measurements])
        more: dict[str, Any] = {"step": self.step, "notes": self._notes()}
        if self._setting:
            more["setting"], self._setting = self._setting, {}
        if self._tokens:
            more["tokens"] = {
                number: [ids.tolist(), [round(each, 6) for each in logs.tolist()]]
                for number, (ids, logs) in self._tokens.items()
            }
        rows, self._rows, self._measurements = self._rows, [], []
        self._positions.clear()
        self._tokens.clear()
        self._writer.write(rows, matrix, **more)

    def _notes(self) -> list[str]:
        notes = self.failures.notes("tensor", "could not be recorded")
        if self._dropped:
            notes.append(
                f"{plural(self._dropped, 'row')} of step {self.step} left out: a step has at most {_MOST_ROWS:,}. "
                "Name fewer modules, or record level='modules'"
            )
        if self._unmeasured:
            tensors = plural(self._unmeasured, "tensor")
            notes.append(f"{tensors} of subclasses or without dense memory not recorded")
        self._dropped = self._unmeasured = 0
        return notes

    # --- rows ---

    def _can(self, tensor: Tensor) -> bool:
        """Return True if a tensor can be measured."""
        can = is_measurable(tensor) and not (tensor.is_cuda and _torch.is_capturing())
        self._unmeasured += not can
        return can

    def _known(self, tensors: list[Tensor]) -> tuple[RowInput, ...]:
        return tuple(filter(None, map(self._origins.of, tensors)))

    def _weight(self, tensor: Tensor) -> tuple[Tensor, str, str] | None:
        """Return the whole tensor, kind and name of a parameter or buffer, also for a view of one."""
        entry = self._weights.get(id(tensor.untyped_storage())) if is_measurable(tensor) else None
        if entry is None or entry[0].untyped_storage() is not tensor.untyped_storage():
            return None
        return entry

    def _add_weights(self) -> None:
        """Add the rows of weights that have none, so that a compiled part, too, can be told from other weights.

        A recording of modules has no operations that write weights: it gets new rows of those that were written.
        """
        is_blind = self._selection.level == "modules"
        for tensor, kind, name in self._weights.values():
            if (self._origins.latest if is_blind else self._origins.of)(tensor) is None:
                self._add(kind, CallPlace(_owner(name), None, "other"), name, (), tensor)

    def _inputs(self, values: Any, place: CallPlace) -> tuple[RowInput, ...]:
        """Return the tensors that are read. Those without a row get one."""
        inputs: list[RowInput] = []
        for tensor in filter(is_measurable, tensors_in(values)):
            if self._origins.of(tensor) is None:
                self._add_unknown(tensor, place)
            inputs += self._known([tensor])
        return tuple(each for each in inputs if each.rows)

    def _add_unknown(self, tensor: Tensor, place: CallPlace) -> None:
        """Add the row of a tensor that no recorded operation computed: a weight, or an input."""
        weight = self._weight(tensor)
        if weight is not None:
            whole, kind, name = weight
            place = CallPlace(_owner(name), place.source, place.phase)
            self._add(kind, place, name, (), whole)
            return
        is_computed = tensor.grad_fn is not None or bool(self._calls)
        kind = "tensor" if is_computed or place.phase == "backward" else "input"
        self._add(kind, place, kind, (), tensor)

    def _add(
        self,
        kind: str,
        place: CallPlace,
        name: str,
        inputs: tuple[RowInput, ...],
        tensor: Tensor,
        *,
        result: int = 0,
        arguments: str = "",
        rule: str = "",
        traits: str = "",
    ) -> int:
        """Add a row, and return its number. Past the limits the rows of the inputs are passed on instead."""
        is_state = kind not in {"operation", "output", "tensor"}
        takes = is_state or self._selection.takes_module(place.module or "")
        if self._of_step >= _MOST_ROWS or not takes:
            self._dropped += takes
            self._origins.pass_on(tensor, inputs)
            return inputs[0].rows[-1] if inputs else max(0, self._next - 1)
        number, latest = self._next, self._origins.latest(tensor)
        position, parts = self._positions.get(-1 if latest is None else latest, (-1, 0))
        is_view_of_row = kind in {"output", "gradient", "loss"} and position >= 0
        if not is_view_of_row:
            position, split = len(self._measurements), self._selection.split
            size = tensor.shape[0] if kind in _OF_BATCH and tensor.dim() else 0
            parts = split if size and split > 1 and size % split == 0 else 0
            with self._reading():
                for each in (tensor, *(tensor.chunk(parts) if parts else ())):
                    self._measurements.append(measure(each))
        self._rows.append(
            Row(
                kind, place.phase, place.module or "", name, place.source or "",
                dtype_of(tensor), tuple(tensor.shape), arguments, rule, traits, result, inputs, position, parts,
            )
        )  # fmt: skip
        self._positions[number] = position, parts
        self._next += 1
        self._of_step += 1
        if not is_view_of_row:
            self._origins.put(tensor, number, is_leaf=kind in {"input", "tensor"})
        if len(self._rows) >= _MOST_WAITING:
            self.flush()
        return number

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        """Hide the operations inside from the program and from this recorder."""
        self._busy = True
        try:
            with _torch.without_modes():
                yield
        finally:
            self._busy = False


def _is_workspace(result: Tensor, arguments: str, args: Sequence[Any]) -> bool:
    """Return True for bytes that a kernel keeps for its backward, parts of which have no values."""
    if result.dtype is not torch.uint8 or "uint8" in arguments:
        return False
    return all(each.dtype is not torch.uint8 for each in tensors_in(args))


def _region_setting(inputs: list[Tensor]) -> dict[str, str]:
    """Return policy, dtype and device type of the region around a model; empty outside of regions."""
    device = inputs[0].device.type if inputs else "cpu"
    if not torch.is_autocast_enabled(device):
        return {}
    dtype = dtype_name(torch.get_autocast_dtype(device))
    return {"policy": whole_file(reasons.policy_here(device)), "dtype": dtype, "device": device}


def _mode(module: nn.Module) -> str:
    return "train" if module.training else "eval"


def _owner(name: str) -> str:
    """Return the module of a parameter's name."""
    return name.rpartition(".")[0]
