"""load: what convert makes, straight from a checkpoint on disk; and what is wrong with a file is one error."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import precast
from precast.errors import ConversionError
from precast.shipping.function_calls import is_same
from precast.shipping.loading import read_checkpoint

BF16 = torch.bfloat16
_NAMES = {torch.float32: "F32", BF16: "BF16", torch.int64: "I64"}


class Net(nn.Module):
    """Tied weights, buffers in the state dict and outside of it, a GRU."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 16)
        self.body = nn.Linear(16, 16)
        self.norm = nn.BatchNorm1d(5)
        self.gru = nn.GRU(16, 16, batch_first=True)
        self.head = nn.Linear(16, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.arange(16.0), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden: Tensor = self.gru(self.norm(self.body(self.embed(tokens) * self.scale).float()))[0]
        return self.head(hidden)


def _safetensors(path: Path, tensors: dict[str, Tensor], *, shift: int = 0) -> None:
    """Writes the format by its description, so that the reader is not held to itself."""
    header, data = {"__metadata__": {"format": "pt"}}, b""
    for name, tensor in tensors.items():
        numbers = (
            tensor.contiguous().view(torch.uint8)
            if tensor.dim()
            else tensor.reshape(1).view(torch.uint8)
        )
        raw = bytes(numbers.flatten().tolist())
        places = [len(data), len(data) + len(raw)]
        header[name] = {  # type: ignore[assignment]
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": places,  # type: ignore[dict-item]
        }
        data += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8 + shift)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def _model() -> tuple[Any, Tensor, dict[str, Tensor]]:
    torch.manual_seed(0)
    model = Net().eval()
    model.norm.running_mean.normal_()
    tokens = torch.randint(11, (3, 5))
    state = dict(model.state_dict())
    del state["head.weight"]  # as transformers saves tied weights
    return model, tokens, state


def _write_safetensors(folder: Path, state: dict[str, Tensor]) -> Path:
    _safetensors(folder / "model.safetensors", state)
    return folder / "model.safetensors"


def _write_shifted(folder: Path, state: dict[str, Tensor]) -> Path:
    _safetensors(folder / "model.safetensors", state, shift=3)
    return folder / "model.safetensors"


def _write_sharded(folder: Path, state: dict[str, Tensor]) -> Path:
    placed = {name: f"part-{number % 2}.safetensors" for number, name in enumerate(state)}
    for shard in set(placed.values()):
        _safetensors(folder / shard, {n: v for n, v in state.items() if placed[n] == shard})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    return folder / "model.safetensors.index.json"


def _write_torch(folder: Path, state: dict[str, Tensor]) -> Path:
    torch.save(state, folder / "model.pt")
    return folder / "model.pt"


def _write_lightning(folder: Path, state: dict[str, Tensor]) -> Path:
    torch.save({"epoch": 3, "state_dict": state}, folder / "last.ckpt")
    return folder / "last.ckpt"


def _write_torch_shards(folder: Path, state: dict[str, Tensor]) -> Path:
    placed = {name: f"part-{number % 2}.bin" for number, name in enumerate(state)}
    for shard in set(placed.values()):
        torch.save({n: v for n, v in state.items() if placed[n] == shard}, folder / shard)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": placed}))
    return folder / "pytorch_model.bin.index.json"


WRITERS: list[Callable[[Path, dict[str, Tensor]], Path]] = [
    _write_safetensors,
    _write_shifted,
    _write_sharded,
    _write_torch,
    _write_lightning,
    _write_torch_shards,
]


@pytest.mark.parametrize("write", WRITERS)
def test_what_is_loaded_is_what_is_converted(
    write: Callable[[Path, dict[str, Tensor]], Path], tmp_path: Path
) -> None:
    model, tokens, state = _model()
    expected = precast.convert(model, example=tokens)
    loaded: Any = precast.load_converted(Net, write(tmp_path, state), example=tokens)
    assert is_same(loaded(tokens), expected(tokens))
    assert {n: p.dtype for n, p in loaded.state_dict().items()} == {
        n: p.dtype for n, p in expected.state_dict().items()
    }
    assert loaded.head.weight is loaded.embed.weight
    for file in tmp_path.iterdir():  # nothing of the model lies in the file any more
        file.write_bytes(b"")
    assert is_same(loaded(tokens), expected(tokens))


@pytest.mark.parametrize("write", [_write_safetensors, _write_torch])
def test_the_checkpoint_of_a_converted_model_needs_no_example(
    write: Callable[[Path, dict[str, Tensor]], Path], tmp_path: Path
) -> None:
    model, tokens, _ = _model()
    converted = precast.convert(model, example=tokens)
    loaded = precast.load_converted(Net, write(tmp_path, dict(converted.state_dict())))
    assert is_same(loaded(tokens), converted(tokens))
    assert precast.conversion_report(loaded).bytes == precast.conversion_report(converted).bytes
    with pytest.raises(ConversionError, match=r"'body\.weight'"), precast.autocast("cpu"):
        loaded.body.weight.sum()  # type: ignore[operator, union-attr]


def test_a_model_on_the_meta_device_is_loaded_in_place(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(8, 8).eval(), torch.randn(2, 8)
    file = _write_safetensors(tmp_path, dict(model.state_dict()))
    empty = nn.Linear(8, 8, device="meta")
    loaded = precast.load_converted(empty, file, example=x)
    assert loaded is empty
    assert is_same(loaded(x), precast.convert(model, example=x)(x))


def test_a_16_bit_checkpoint_of_a_float32_model_is_read_with_its_numbers(tmp_path: Path) -> None:
    model, tokens, state = _model()
    rounded = {n: v.to(BF16) if v.is_floating_point() else v for n, v in state.items()}
    model.load_state_dict({**rounded, "head.weight": rounded["embed.weight"]})
    loaded: Any = precast.load_converted(Net, _write_torch(tmp_path, rounded), example=tokens)
    assert is_same(loaded(tokens), precast.convert(model, example=tokens)(tokens))
    assert loaded.embed.weight.dtype is torch.float32


def _rewrite(change: Callable[[bytes], bytes]) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        file = _write_safetensors(folder, _model()[2])
        file.write_bytes(change(file.read_bytes()))
        return file

    return write


def _other(change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Callable[[Path], Path]:
    return lambda folder: _write_safetensors(folder, change(_model()[2]))


def _bias(value: Tensor) -> Callable[[Path], Path]:
    return lambda folder: _write_torch(folder, _model()[2] | {"body.bias": value})


def _quantized(folder: Path) -> Path:
    return _bias(torch.quantize_per_tensor(torch.ones(16), 0.1, 0, torch.quint8))(folder)


def _truncated_zip(folder: Path) -> Path:
    file = _write_torch(folder, _model()[2])
    file.write_bytes(file.read_bytes()[:-500])
    return file


def _no_tensors(folder: Path) -> Path:
    torch.save({"epoch": 3}, folder / "model.pt")
    return folder / "model.pt"


def _lost_shard(folder: Path) -> Path:
    _write_sharded(folder, _model()[2])
    (folder / "part-1.safetensors").unlink()
    return folder / "model.safetensors.index.json"


def _index(text: str) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        _write_sharded(folder, _model()[2])
        (folder / "model.safetensors.index.json").write_text(text)
        return folder / "model.safetensors.index.json"

    return write


def _entry(**changes: Any) -> Callable[[Path], Path]:
    """A safetensors file whose entry of `body.bias` is changed."""

    def change(data: bytes) -> bytes:
        (length,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + length])
        header["body.bias"] |= changes
        text = json.dumps(header).encode()
        return struct.pack("<Q", len(text)) + text + data[8 + length :]

    return _rewrite(change)


def _nested_header(_: bytes) -> bytes:
    text = b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    return struct.pack("<Q", len(text)) + text


def _other_types(folder: Path) -> Path:
    torch.save({1: torch.ones(2), "body.bias": torch.ones(2)}, folder / "model.pt")
    return folder / "model.pt"


WRONG: dict[str, tuple[Callable[[Path], Path], str]] = {
    "truncated": (_rewrite(lambda data: data[:-5]), "nor a whole safetensors file"),
    "truncated header": (_rewrite(lambda data: data[:40]), "nor a whole safetensors file"),
    "another format": (
        _rewrite(lambda _: b"GGUF" + b"\xff" * 100),
        r"neither a file of torch\.save .* nor a whole safetensors file",
    ),
    "not JSON": (
        _rewrite(lambda data: data[:8] + b"?" * (len(data) - 8)),
        "nor a whole safetensors file",
    ),
    "empty": (_rewrite(lambda _: b""), "nor a whole safetensors file"),
    "truncated zip": (_truncated_zip, r"cannot be read as a file of torch\.save"),
    "no tensors": (_no_tensors, "has no state dict"),
    "missing": (
        _other(lambda state: {n: v for n, v in state.items() if n != "body.bias"}),
        r"lacks body\.bias\.",
    ),
    "unexpected": (
        _other(lambda state: state | {"more.weight": torch.ones(2)}),
        r"has more\.weight, which the model does not have",
    ),
    "shape": (
        _other(lambda state: state | {"body.bias": torch.ones(2)}),
        r"body\.bias has the shape \(2,\) there, and \(16,\) in the model",
    ),
    "sparse": (
        _bias(torch.ones(16).to_sparse()),
        r"body\.bias is sparse_coo there, and strided in the model",
    ),
    "quantized": (
        _quantized,
        r"body\.bias is quint8 there, and strided in the model",
    ),
    "complex": (
        _bias(torch.ones(16) * 1j),
        r"body\.bias is complex64 there, and strided in the model",
    ),
    "lost shard": (_lost_shard, r"there is no checkpoint .*part-1\.safetensors"),
    "no index": (_index("[]"), "is not an index of a checkpoint"),
    "nested index": (
        _index("[" * 100_000 + "]" * 100_000),
        "is not an index of a checkpoint",
    ),
    "index of values": (
        _index('{"weight_map": {"body.bias": 3}}'),
        r"index\.json is damaged: its 'weight_map' has 3 where the name of a safetensors file",
    ),
    "index of itself": (
        _index('{"weight_map": {"body.bias": "model.safetensors.index.json"}}'),
        r"index\.json is damaged: its 'weight_map' has 'model\.safetensors\.index\.json' where",
    ),
    "index of another folder": (
        _index('{"weight_map": {"body.bias": "../part-0.safetensors"}}'),
        r"index\.json is damaged: its 'weight_map' has '\.\./part-0\.safetensors' where",
    ),
    "nested header": (_rewrite(_nested_header), "nor a whole safetensors file"),
    "overlap": (
        _entry(data_offsets=[0, 64]),
        r"nor a whole safetensors file: body\.bias and embed\.weight overlap",
    ),
    "negative shape": (
        _entry(shape=[-1]),
        r"nor a whole safetensors file: the shape \[-1\] at \d+:\d+ has no size",
    ),
    "no bytes": (
        _entry(data_offsets=[0, 0]),
        r"nor a whole safetensors file: a tensor of shape \[16\] in F32 has 0 bytes",
    ),
    "backward offsets": (
        _entry(data_offsets=[64, 0]),
        r"nor a whole safetensors file: a tensor of shape \[16\] in F32 has -64 bytes",
    ),
    "names of other types": (_other_types, "has no state dict, a mapping of names to tensors"),
    "tied weights that differ": (
        _other(lambda state: state | {"head.weight": state["embed.weight"] + 1}),
        r"embed\.weight and head\.weight are one tensor in the model, and differ there",
    ),
    "folder": (lambda folder: folder, "there is no checkpoint"),
    "no file": (lambda folder: folder / "none.safetensors", "there is no checkpoint"),
}


@pytest.mark.filterwarnings(
    "ignore:TypedStorage|torch.quantize"
)  # quantized tensors are deprecated
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_checkpoint_is_one_error(name: str, tmp_path: Path) -> None:
    make, message = WRONG[name]
    with pytest.raises(ConversionError, match=message):
        precast.load_converted(Net, make(tmp_path), example=torch.zeros(1, 5, dtype=torch.long))


def test_what_no_checkpoint_has_must_not_stay_on_the_meta_device(tmp_path: Path) -> None:
    _, tokens, state = _model()
    with torch.device("meta"):
        empty = Net()
    with pytest.raises(ConversionError, match="scale stayed on the meta device"):
        precast.load_converted(empty, _write_torch(tmp_path, state), example=tokens)


def test_other_mistakes_are_one_error(tmp_path: Path) -> None:
    _, tokens, state = _model()
    file = _write_torch(tmp_path, state)
    with pytest.raises(ConversionError, match="float32 weights only, and no example"):
        precast.load_converted(Net, file)
    with pytest.raises(ConversionError, match="Pass a function that creates the model"):
        precast.load_converted("Net", file, example=tokens)  # type: ignore[arg-type]
    with pytest.raises(ConversionError, match="returned int, not a model"):
        precast.load_converted(lambda: 3, file, example=tokens)  # type: ignore[arg-type, return-value]
    with pytest.raises(
        ConversionError, match=r"make\(\) raised ZeroDivisionError: integer division"
    ):
        precast.load_converted(lambda: 1 // 0, file, example=tokens)  # type: ignore[arg-type, return-value]


_MEASURES = """
import re, sys, threading, time
import torch
from torch import nn
import precast

def anonymous():
    return int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024

def make():
    return nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(24)))

x = torch.ones(1, 1024)
precast.convert(nn.Linear(8, 8).eval(), example=torch.ones(1, 8))(torch.ones(1, 8))
before, most, done = anonymous(), [0], []
def sample():
    while not done:
        most[0] = max(most[0], anonymous())
        time.sleep(0.001)
thread = threading.Thread(target=sample)
thread.start()
if len(sys.argv) > 1:
    model = precast.load_converted(make, sys.argv[1], example=x)
else:
    model = precast.convert(make().eval(), example=x, in_place=True)
done.append(1)
thread.join()
print((most[0] - before) / precast.conversion_report(model).bytes_before)
"""


_ONLY_LINUX = pytest.mark.skipif(
    not Path("/proc/self/status").exists(),
    reason="only Linux tells how much memory is a program's own",
)


@_ONLY_LINUX
def test_converting_in_place_takes_hardly_more_than_the_float32_model() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _MEASURES], capture_output=True, text=True, check=True
    )
    assert float(done.stdout) < 1.15, done.stdout


@_ONLY_LINUX
def test_the_float32_model_is_never_in_memory(tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(24)))
    torch.save(model.state_dict(), tmp_path / "model.pt")
    done = subprocess.run(
        [sys.executable, "-c", _MEASURES, str(tmp_path / "model.pt")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert float(done.stdout) < 0.75, done.stdout  # of 1, of which 0.5 stay


def test_tensors_of_a_checkpoint_are_pages_of_the_file(tmp_path: Path) -> None:
    _, _, state = _model()
    file = _write_safetensors(tmp_path, state)
    tensors = read_checkpoint(file)
    assert {n: v.dtype for n, v in tensors.items()} == {n: v.dtype for n, v in state.items()}
    assert all(torch.equal(tensors[name], value) for name, value in state.items())
    tensors["body.bias"].zero_()  # the file stays as it is
    again = read_checkpoint(file)
    assert torch.equal(again["body.bias"], state["body.bias"])


_STARTS = """
import sys
import torch
import precast
from torch import nn

def make():
    layers = nn.Embedding(11, 16), nn.Linear(16, 16), nn.Linear(16, 16)
    for weight in (layers[1].weight, layers[2].weight):
        nn.init.trunc_normal_(weight) if weight is layers[1].weight else nn.init.kaiming_normal_(weight)
    return nn.Sequential(*layers)

known = set(sys.modules)
model = precast.load_converted(make, sys.argv[1], "default", torch.bfloat16)
with torch.inference_mode():
    model(torch.arange(11))
print(sorted(name for name in set(sys.modules) - known if name in ("torch._dynamo", "sympy")))
"""


def test_no_compiler_is_imported_where_a_converted_model_is_loaded(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Embedding(11, 16), nn.Linear(16, 16), nn.Linear(16, 16)).eval()
    converted = precast.convert(model, "default", BF16, example=torch.arange(11))
    torch.save(converted.state_dict(), tmp_path / "model.pt")
    done = subprocess.run(
        [sys.executable, "-c", _STARTS, str(tmp_path / "model.pt")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "[]\n", done.stdout


def test_numbers_that_are_drawn_outside_of_a_model_are_drawn(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(16, 16))
    torch.save(model.state_dict(), tmp_path / "model.pt")
    drawn = []

    class Net(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(nn.Linear(16, 16))
            self.register_buffer("noise", torch.empty(3).normal_(), persistent=False)
            drawn.append(self.noise)

    torch.manual_seed(3)
    loaded = precast.load_converted(
        Net, tmp_path / "model.pt", dtype=BF16, example=torch.ones(2, 16)
    )
    assert torch.equal(loaded.noise.float(), drawn[0].to(loaded.noise.dtype).float())
    assert drawn[0].std() > 0.1
