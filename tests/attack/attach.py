"""Attached models: the same bits as PyTorch's under every optimizer, and copies that follow every write."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import precast
from tests.attack.scenarios import Limit, scenario
from tests.attack.tools import DTYPES, equal, net, same_state, trained
from tests.attack.weights import MODES, WRITES
from tests.support.unsampled import write_unsampled


class Lion:
    """An optimizer that is none of PyTorch's, and writes through `.data`."""

    def __init__(self, parameters: Any, lr: float = 0.01) -> None:
        self.parameters = list(parameters)
        self.lr = lr

    def zero_grad(self) -> None:
        for p in self.parameters:
            p.grad = None

    def step(self) -> None:
        for p in self.parameters:
            if p.grad is not None:
                p.data.add_(torch.sign(p.grad.data), alpha=-self.lr)


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "SGD with momentum": lambda ps: torch.optim.SGD(ps, 0.05, momentum=0.9),
    "foreach Adam": lambda ps: torch.optim.Adam(ps, 0.05, foreach=True),
    "fused AdamW": lambda ps: torch.optim.AdamW(ps, 0.05, fused=True),
    "RMSprop": lambda ps: torch.optim.RMSprop(ps, 0.01),
    "Adagrad": lambda ps: torch.optim.Adagrad(ps, 0.05),
    "fused SGD": lambda ps: torch.optim.SGD(ps, 0.05, fused=True),
    "an optimizer that writes .data": Lion,
}


def _trains_alike(make: Callable[[Any], Any], dtype: torch.dtype) -> Callable[[], None]:
    def run() -> None:
        batches = [torch.randn(5, 2, 8) for _ in range(6)]
        mine = net()
        theirs = copy.deepcopy(mine)
        expected = trained(
            theirs, make(theirs.parameters()), lambda: torch.autocast("cpu", dtype), batches
        )
        optimizer = make(mine.parameters())
        precast.attach(mine)
        result = trained(mine, optimizer, lambda: precast.autocast("cpu", dtype), batches)
        equal(result, expected)
        same_state(mine, theirs)

    return run


for _what, _make in OPTIMIZERS.items():
    for _of, _dtype in DTYPES.items():
        scenario(
            "attach",
            f"six steps of {_what} in {_of} on an attached model give the losses and weights of torch.autocast, "
            "bit for bit",
            "plain PyTorch",
            name=f"{_what} in {_of}, attached",
        )(_trains_alike(_make, _dtype))


def _seen_at_once(write: Any, mode: Any) -> Callable[[], None]:
    def run() -> None:
        layer = nn.Linear(2, 2, bias=False)
        precast.attach(layer)
        x = torch.ones(1, 2)
        for value in range(8):
            write(layer, value + 1.0)
            with mode(), precast.autocast("cpu"):
                assert float(layer(x)[0, 0]) / 2 == value + 1.0

    return run


def _seen_when_said(write: Any, mode: Any, refresh: bool) -> Callable[[], None]:
    def run() -> None:
        layer = nn.Linear(2, 2, bias=False)
        attachment = precast.attach(layer)
        x = torch.ones(1, 2)
        for value in range(8):
            if refresh:
                write(layer, value + 1.0)
                attachment.refresh()
            else:
                with attachment.writing():
                    write(layer, value + 1.0)
            with mode(), precast.autocast("cpu"):
                assert float(layer(x)[0, 0]) / 2 == value + 1.0

    return run


for _what, _write in WRITES.items():
    for _in, _mode in MODES.items():
        if "through" in _what or "foreach" in _what:
            _refresh = "NumPy" in _what or "view" in _what
            scenario(
                "attach",
                f"{_what} on an attached model is used in the next region {_in}, if "
                f"{'refresh() follows' if _refresh else 'it is made in writing()'}",
                "by hand",
                name=f"{_what}, said, attached, {_in}",
            )(_seen_when_said(_write, _mode, _refresh))
        else:
            scenario(
                "attach",
                f"{_what} on an attached model is used in the next region {_in}",
                "by hand",
                name=f"{_what}, attached, {_in}",
            )(_seen_at_once(_write, _mode))


@scenario(
    "attach",
    "a write through .data that nobody tells of is used or is an error within 20 regions",
    "by hand",
)
def an_untold_write_is_found() -> None:
    layer = nn.Linear(8, 8, bias=False)
    precast.attach(layer)
    x = torch.ones(1, 8)
    with torch.no_grad(), precast.autocast("cpu"):
        layer(x)
    layer.weight.data.fill_(3.0)
    for _ in range(20):
        try:
            with torch.no_grad(), precast.autocast("cpu"):
                result = float(layer(x)[0, 0])
        except precast.errors.StaleWeightError:
            return
        if result == 24.0:
            return
    raise AssertionError("the old copy is used for ever")


@scenario(
    "attach", "weights that are tied by their storage are both new after a step", "plain PyTorch"
)
def tied_by_storage() -> None:
    result = []
    for attached in (False, True):
        torch.manual_seed(7)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model[1].weight.data = model[0].weight.data
        if attached:
            precast.attach(model)
        optimizer = torch.optim.SGD(model[0].parameters(), 0.5)
        x = torch.ones(2, 4)
        region = precast.autocast if attached else torch.autocast
        result.append(trained(model, optimizer, lambda r=region: r("cpu"), [x] * 5))
    equal(result[1], result[0])


GEOMETRIES: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda w: w.t(),
    "narrowed": lambda w: w[:3],
    "with another stride": lambda w: w.clone().as_strided((6, 6), (1, 6)),
    "flipped": lambda w: w.flip(0),
}


def _geometry(change: Callable[[Tensor], Tensor]) -> Callable[[], None]:
    def run() -> None:
        layer = nn.Linear(6, 6, bias=False)
        other = nn.Linear(6, 6)
        precast.attach(layer)
        precast.attach(other)
        x = torch.randn(2, 6)
        for _ in range(3):
            with torch.no_grad(), precast.autocast("cpu"):
                layer(x)
                other(x)
        layer.weight.data = change(layer.weight.data)
        for _ in range(4):
            with torch.no_grad(), precast.autocast("cpu"):
                result = layer(x)
                other(x)
            equal(result, F.linear(x.bfloat16(), layer.weight.detach().bfloat16()))

    return run


for _what, _change in GEOMETRIES.items():
    scenario(
        "attach",
        f"a weight whose .data is {_what} is used so at once, and no other model's region fails",
        "by hand",
        name=f"data {_what}, attached",
    )(_geometry(_change))


@scenario(
    "attach",
    "parameters that are views of a flat buffer follow what is written to the buffer",
    "by hand",
)
def a_flat_buffer() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    gradient = torch.zeros_like(flat)
    start = 0
    for p in model.parameters():
        p.data = flat[start : start + p.numel()].view_as(p)
        p.grad = gradient[start : start + p.numel()].view_as(p)
        start += p.numel()
    precast.attach(model)
    x = torch.ones(2, 4)
    for _ in range(6):
        with precast.autocast("cpu"):
            out = model(x)
        expected = x.bfloat16()
        for p in model.parameters():
            expected = F.linear(expected, p.detach().bfloat16())
        equal(out.detach(), expected)
        gradient.zero_()
        out.float().sum().backward()
        flat.add_(gradient, alpha=-0.01)


@scenario(
    "attach", "the trainer's clipping through .data never stops an ordinary training", "by hand"
)
def clipping_through_data() -> None:
    model = nn.Linear(6, 6, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    precast.attach(model)
    for _ in range(30):
        optimizer.zero_grad()
        x = torch.randn(3, 6)
        with precast.autocast("cpu"):
            out = model(x)
        equal(out.detach(), F.linear(x.bfloat16(), model.weight.detach().bfloat16()))
        out.float().square().sum().backward()
        optimizer.step()
        model.weight.data.clamp_(-0.2, 0.2)


@scenario(
    "attach", "checkpoints of both kinds give the gradients of torch.autocast", "plain PyTorch"
)
def checkpoints_attached() -> None:
    batches = [torch.randn(4, 2, 8) for _ in range(4)]
    for kind in (True, False):
        mine = net()
        theirs = copy.deepcopy(mine)

        def call(model: nn.Module, x: Tensor, kind: bool = kind) -> Tensor:
            return checkpoint(model, x.requires_grad_(), use_reentrant=kind)  # type: ignore[no-any-return]

        optimizer = torch.optim.Adam(theirs.parameters(), 0.05)
        expected = trained(theirs, optimizer, lambda: torch.autocast("cpu"), batches, call)
        optimizer = torch.optim.Adam(mine.parameters(), 0.05)
        precast.attach(mine)
        result = trained(mine, optimizer, lambda: precast.autocast("cpu"), batches, call)
        equal(result, expected)
        same_state(mine, theirs)


@scenario(
    "attach", "hooks on parameters are called in PyTorch's order, by both engines", "plain PyTorch"
)
def order_of_hooks() -> None:
    from precast.engine import registration

    def order(region: Any, attached: bool) -> list[str]:
        model = nn.Sequential(nn.Linear(3, 3), nn.Conv1d(3, 2, 1), nn.Flatten(), nn.Linear(2, 2))
        if attached:
            precast.attach(model)
        records: list[str] = []
        for name, p in model.named_parameters():
            p.register_hook(lambda g, name=name: records.append(name))
        with region("cpu"):
            loss = model[3](model[2](model[1](model[0](torch.ones(3, 3)).unsqueeze(-1)))).sum()
        loss.float().backward()
        return records

    expected = order(torch.autocast, False)
    for name in registration.available_engines():
        with registration.use_engine(name):
            assert order(precast.autocast, False) == expected, name
            assert order(precast.autocast, True) == expected, f"{name}, attached"


@scenario(
    "attach", "a model with an attachment pickles, copies and saves as one without", "plain PyTorch"
)
def pickles_and_states() -> None:
    model = net(3)
    plain = net(3)
    precast.attach(model)
    with torch.no_grad(), precast.autocast("cpu"):
        model(torch.ones(1, 2, 8))
    assert model.state_dict().keys() == plain.state_dict().keys()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        same_state(other, plain)
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    plain.load_state_dict(torch.load(io.BytesIO(buffer.getvalue())))


@scenario("attach", "detach leaves no hook on the model, and no copy", "by hand")
def detach_leaves_nothing() -> None:
    model = net()
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    policy = precast.Policy.load("default").replace(modules={"head": "fp32"})
    attachment = precast.attach(model, policy)
    with torch.no_grad(), precast.autocast("cpu"):
        model(torch.ones(1, 2, 8))
    attachment.detach()
    assert [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()] == hooks
    assert int(attachment.memory()) == 0


@scenario("attach", "an attached model goes when nobody has it any more", "by hand")
def attached_models_go() -> None:
    model = net()
    precast.attach(model)
    with torch.no_grad(), precast.autocast("cpu"):
        model(torch.ones(1, 2, 8))
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None


@scenario(
    "attach",
    "adapters that are merged through .data are used at once, or said to be stale",
    "by hand",
)
def merged_adapters() -> None:
    layer = nn.Linear(8, 8, bias=False).requires_grad_(False)
    attachment = precast.attach(layer)
    x = torch.randn(2, 8)
    for _ in range(3):
        with torch.no_grad(), precast.autocast("cpu"):
            layer(x)
    with attachment.writing():
        layer.weight.data += torch.randn(8, 2) @ torch.randn(2, 8)
    with torch.no_grad(), precast.autocast("cpu"):
        equal(layer(x), F.linear(x.bfloat16(), layer.weight.bfloat16()))


@scenario(
    "attach", "several attachments of one model share copies, and each may end first", "by hand"
)
def several_attachments() -> None:
    model = net()
    first, second = precast.attach(model), precast.attach(model.head)
    x = torch.randn(1, 2, 8)
    with torch.no_grad(), torch.autocast("cpu"):
        expected = model(x)
    for ended in (first, second):
        with torch.no_grad(), precast.autocast("cpu"):
            equal(model(x), expected)
        ended.detach()
    with torch.no_grad(), precast.autocast("cpu"):
        equal(model(x), expected)


@scenario(
    "attach",
    "accumulated gradients of several regions are added as PyTorch adds them",
    "plain PyTorch",
)
def accumulated_gradients() -> None:
    mine = net()
    theirs = copy.deepcopy(mine)
    precast.attach(mine)
    for x in [torch.randn(2, 2, 8) for _ in range(4)]:
        for model, region in ((theirs, torch.autocast), (mine, precast.autocast)):
            with region("cpu"):
                loss = model(x).float().square().sum()
            loss.backward()
    equal([p.grad for p in mine.parameters()], [p.grad for p in theirs.parameters()])


@scenario(
    "attach",
    "a write through NumPy that nobody tells of is used in the very next region",
    "by hand",
    limit=Limit(
        "Nothing in PyTorch counts a write through NumPy. A region compares a part of the weights, so it is found some "
        "regions later; `writing()` and `refresh()` tell of it at once.",
        "the old copy|StaleWeightError",
    ),
)
def an_untold_write_at_once() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8)))
    precast.attach(model)
    x = torch.ones(1, 64)
    with torch.no_grad():
        for _ in range(9):
            with precast.autocast("cpu"):
                before = model(x)
        for layer in model:  # a whole weight is seen at once: see test_writes_through_data.py
            write_unsampled(layer.weight, 1e6)
        with precast.autocast("cpu"):
            assert not torch.equal(model(x), before), "the old copy is used"


@scenario(
    "attach",
    "model.double() that swaps its parameters works on an attached model",
    "plain PyTorch",
    limit=Limit(
        "PyTorch swaps no parameter that is referenced weakly, and an attachment has to know its parameters without "
        "keeping them. Detach the model, convert it, attach it again.",
        "swap|weakref|weak",
    ),
)
def swapping_an_attached_model() -> None:
    model = nn.Linear(2, 2)
    precast.attach(model)
    torch.__future__.set_swap_module_params_on_conversion(True)
    model.double()
