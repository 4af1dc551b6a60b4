"""Correct programs in the styles that people write them in: scripts, functions, classes, models, data sets.

Invariant: each is correct by PyTorch's documentation, and no rule that is on finds anything in it.
"""

from __future__ import annotations

__all__ = ["PROGRAMS"]

PROGRAMS = {
    "script": """
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_
from data import batches, epochs, path

model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, 1000)
scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)

for x, y in batches:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        output = model(x)
        loss = F.cross_entropy(output, y)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    clip_grad_norm_(model.parameters(), 1.0)
    scale = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    if scaler.get_scale() >= scale:
        scheduler.step()

state = {
    "model": model.state_dict(),
    "optimizer": optimizer.state_dict(),
    "scaler": scaler.state_dict(),
}
torch.save(state, path)
""",
    "plain": """
import torch
from data import criterion, loader

device = torch.device("cuda")
model = torch.nn.Linear(16, 4).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cuda")
losses = []
for inputs, targets in loader:
    inputs = inputs.to(device)
    targets = targets.to(device)
    with torch.autocast(device_type="cuda", dtype=torch.float16):
        loss = criterion(model(inputs), targets)
    optimizer.zero_grad(set_to_none=True)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    losses.append(loss.detach())
""",
    "bfloat16": """
import torch
from torch import nn
from data import loader

model = nn.Transformer(64).cuda()
criterion = nn.MSELoss()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
for source, target in loader:
    with torch.autocast("cuda", dtype=torch.bfloat16):
        prediction = model(source, target)
        loss = criterion(prediction, target)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()

model.eval()
with torch.no_grad(), torch.autocast("cuda", dtype=torch.bfloat16):
    answer = model(source, target)
print(answer.float().cpu().numpy())
""",
    "function": """
import torch
from torch.nn import functional as F
from data import Net, make_loader


def train(model, optimizer, loader, steps):
    scaler = torch.amp.GradScaler("cuda")
    model.train()
    for image, label in loader:
        image = image.cuda()
        label = label.cuda()
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            logits = model(image)
            loss = F.cross_entropy(logits, label)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()


def evaluate(model, loader):
    model.eval()
    right = 0
    with torch.inference_mode():
        for image, label in loader:
            with torch.autocast("cuda", dtype=torch.float16):
                logits = model(image.cuda())
            right += (logits.argmax(1) == label.cuda()).sum()
    return right


def main():
    model = Net().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train(model, optimizer, make_loader(), 100)
    print(evaluate(model, make_loader()))


main()
""",
    "trainer": """
import torch
from torch import nn
from data import Net, loader


class Trainer:
    def __init__(self, rate, path):
        self.model = Net().cuda()
        self.path = path
        self.criterion = nn.CrossEntropyLoss()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=rate)
        self.scaler = torch.amp.GradScaler("cuda")

    def train(self):
        for x, y in loader:
            self.optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                output = self.model(x)
                loss = self.criterion(output, y)
            self.scaler.scale(loss).backward()
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.scaler.step(self.optimizer)
            self.scaler.update()

    def save(self):
        torch.save(
            {
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "scaler": self.scaler.state_dict(),
            },
            self.path,
        )


trainer = Trainer(0.1, "here.pt")
trainer.train()
trainer.save()
""",
    "accumulate": """
import torch
from data import Net, criterion, loader

every = 4
model = Net().cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
scaler = torch.amp.GradScaler("cuda")
for i, (x, y) in enumerate(loader):
    with torch.autocast("cuda", dtype=torch.float16):
        output = model(x)
        loss = criterion(output, y) / every
    scaler.scale(loss).backward()
    if (i + 1) % every == 0:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
""",
    "adversaries": """
import torch
from data import Critic, Generator, noise, pictures

generator = Generator().cuda()
critic = Critic().cuda()
first = torch.optim.Adam(generator.parameters(), lr=2e-4)
second = torch.optim.Adam(critic.parameters(), lr=2e-4)
scaler = torch.amp.GradScaler("cuda")
for picture in pictures:
    first.zero_grad()
    second.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        fake = generator(noise(picture))
        loss = critic(fake).mean() - critic(picture).mean()
    scaler.scale(loss).backward()
    scaler.step(first)
    scaler.step(second)
    scaler.update()
""",
    "penalty": """
import torch
from data import Net, criterion, loader

model = Net().cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
scaler = torch.amp.GradScaler("cuda")
for x, y in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = criterion(model(x), y)
    scaled = torch.autograd.grad(scaler.scale(loss), model.parameters(), create_graph=True)
    inverse = 1.0 / scaler.get_scale()
    gradients = [gradient * inverse for gradient in scaled]
    with torch.autocast("cuda", dtype=torch.float16):
        norm = 0
        for gradient in gradients:
            norm += gradient.pow(2).sum()
        loss = loss + norm.sqrt()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
    "frozen teacher": """
import torch
from torch.nn import functional as F
from data import Student, Teacher, loader

teacher = Teacher().cuda().eval()
student = Student().cuda()
optimizer = torch.optim.AdamW(student.parameters(), lr=1e-4)
scaler = torch.amp.GradScaler("cuda")
for x, _ in loader:
    with torch.no_grad(), torch.autocast("cuda", dtype=torch.float16):
        target = teacher(x).softmax(-1)
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        guess = student(x)
        loss = F.kl_div(F.log_softmax(guess, dim=-1), target, reduction="batchmean")
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
    "detector": """
import torch
from torch import nn
from torch.nn import functional as F
from data import Net, loader

model = Net().cuda()
criterion = nn.BCEWithLogitsLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
scaler = torch.amp.GradScaler("cuda")
for x, y, boxes in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        score, box = model(x)
        loss = F.binary_cross_entropy_with_logits(score, y) + F.l1_loss(box, boxes)
        loss = loss + criterion(score, y) + F.logsigmoid(score).mean() + score.logsumexp(-1).mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
    "attention": """
import math

import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self, size, heads):
        super().__init__()
        self.heads = heads
        self.inputs = nn.Linear(size, 3 * size)
        self.outputs = nn.Linear(size, size)
        self.norm = nn.LayerNorm(size)

    def forward(self, x, mask):
        q, k, v = self.inputs(self.norm(x)).chunk(3, dim=-1)
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        scores = scores.masked_fill(mask, float("-inf"))
        weights = torch.softmax(scores, dim=-1)
        return self.outputs(weights @ v)


attention = Attention(64, 4).cuda()
with torch.autocast("cuda", dtype=torch.float16):
    answer = attention(torch.randn(2, 8, 64, device="cuda"), torch.zeros(8, 8, dtype=torch.bool, device="cuda"))
print(answer.float().cpu().numpy())
""",
    "functional attention": """
import torch


def attend(q, k, v, mask):
    with torch.autocast("cuda", dtype=torch.float16):
        scores = torch.matmul(q, k.transpose(-1, -2))
        scores = scores.masked_fill(mask == 0, -1e4)
        weights = scores.softmax(dim=-1)
        return torch.bmm(weights, v)


def entropy(logits):
    with torch.autocast("cuda", dtype=torch.float16):
        scores = logits @ logits.t()
        return torch.log_softmax(scores, dim=1)
""",
    "own function": """
import torch
from torch.amp import custom_bwd, custom_fwd
from data import loader


class Product(torch.autograd.Function):
    @staticmethod
    @custom_fwd(device_type="cuda")
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    @custom_bwd(device_type="cuda")
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.t() @ x


class Layer(torch.nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(size, size))

    def forward(self, x):
        return Product.apply(x, self.weight)


layer = Layer(8).cuda()
with torch.autocast("cuda", dtype=torch.float16):
    print(layer(next(loader)))
""",
    "behind": """
import torch

weights = torch.randn(8, 8, device="cuda")
head = torch.nn.Linear(8, 2).cuda()
x = torch.randn(8, 8, device="cuda")
with torch.no_grad():
    with torch.autocast("cuda", dtype=torch.bfloat16):
        product = torch.mm(x, weights)
    values = torch.linalg.eigvalsh(product.float())
    answer = head(product.float())
    picture = product.float().cpu().numpy()
print(values, answer, picture)
""",
    "products": """
import torch

a = torch.randn(8, 8, device="cuda")
b = torch.randn(8, 8, device="cuda")
with torch.autocast("cuda", dtype=torch.float16):
    c = torch.mm(a, b)
    d = torch.addmm(c, a, b)
    e = torch.matmul(a, b)
print(c, d, e)
""",
    "on the CPU": """
import torch
from data import Net, loader

model = Net()
with torch.no_grad():
    for x in loader:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            if torch.is_autocast_enabled("cpu"):
                print(torch.get_autocast_dtype("cpu"))
            answer = model(x)
        print(answer.float().sum())
""",
    "state": """
import torch


def fast_dtype():
    if torch.is_autocast_enabled("cuda"):
        return torch.get_autocast_dtype("cuda")
    if torch.is_autocast_enabled("cpu"):
        return torch.get_autocast_dtype("cpu")
    return torch.get_default_dtype()


def prepare(dtype):
    torch.set_autocast_dtype("cuda", dtype)
    torch.set_autocast_enabled("cpu", True)
    torch.set_autocast_dtype("cpu", dtype)
""",
    "decorated": """
import torch
from data import Net

model = Net().cuda()


@torch.autocast("cuda")
def predict(x):
    return model(x)


class Encoder(torch.nn.Module):
    def __init__(self, size):
        super().__init__()
        self.layer = torch.nn.Linear(size, size)

    @torch.autocast("cuda", dtype=torch.bfloat16)
    def forward(self, x):
        return self.layer(x)


print(predict(torch.ones(1)))
""",
    "old and new": """
import torch
from packaging.version import Version

if Version(torch.__version__) >= Version("2.3"):
    scaler = torch.amp.GradScaler("cuda")
else:
    scaler = torch.cuda.amp.GradScaler()

NEW = Version(torch.__version__) >= Version("2.4")


def region(enabled):
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (1, 10):
        return torch.autocast("cuda", enabled=enabled)
    return torch.cuda.amp.autocast(enabled)


def fast_dtype():
    if NEW:
        return torch.get_autocast_dtype("cuda")
    return torch.get_autocast_gpu_dtype()
""",
    "threads": """
import threading

import torch
from data import Net, batches

model = Net().cuda()


def work(batch, answers):
    with torch.no_grad(), torch.autocast("cuda", dtype=torch.float16):
        answers.append(model(batch))


answers = []
for batch in batches:
    thread = threading.Thread(target=work, args=(batch, answers))
    thread.start()
    thread.join()
""",
    "data set": """
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class Lines(IterableDataset):
    def __init__(self, path):
        self.path = path

    def __iter__(self):
        worker = get_worker_info()
        number, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        with open(self.path) as file:
            for i, line in enumerate(file):
                if i % workers == number:
                    yield torch.tensor([float(line)] * 8)


loader = DataLoader(Lines("numbers.txt"), batch_size=8, num_workers=4)
model = torch.nn.Linear(8, 8).cuda()
with torch.autocast("cuda"):
    for batch in loader:
        print(model(batch.cuda()))
""",
    "numbers": """
import torch

x = torch.randn(8, 8, device="cuda").half()
y = x / (x.norm(dim=-1, keepdim=True) + 1e-6)
z = torch.tensor([1.0, 1000.0], dtype=torch.float16, device="cuda")
top = torch.full((8,), 60000.0, dtype=torch.float16)
low = x.clamp(min=1e-6)
print(y, z, top, low)
""",
    "types": """
from __future__ import annotations

from unittest import mock

import torch


class Loop:
    scaler: "torch.amp.GradScaler"

    def __init__(self, scaler: torch.amp.GradScaler | None) -> None:
        self.scaler = scaler or torch.amp.GradScaler("cuda")

    def is_scaled(self, thing: object) -> bool:
        return isinstance(thing, torch.amp.GradScaler)


def test_step() -> None:
    with mock.patch("torch.amp.GradScaler") as made:
        Loop(None)
    made.assert_called_once()
""",
    "plain float32": """
import torch
from data import Net, criterion, loader

model = Net().to("cuda")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
for x, y in loader:
    optimizer.zero_grad()
    loss = criterion(model(x), y)
    loss.backward()
    optimizer.step()
""",
    "checkpoint by hand": """
import torch


class Checkpoint(torch.autograd.Function):
    @staticmethod
    def forward(ctx, function, length, *args):
        ctx.function = function
        ctx.inputs = list(args[:length])
        ctx.params = list(args[length:])
        ctx.enabled = torch.is_autocast_enabled("cuda")
        with torch.no_grad():
            return ctx.function(*ctx.inputs)

    @staticmethod
    def backward(ctx, *grads):
        inputs = [x.detach().requires_grad_(True) for x in ctx.inputs]
        with torch.set_grad_enabled(True), torch.autocast("cuda", enabled=ctx.enabled):
            outputs = ctx.function(*inputs)
        found = torch.autograd.grad(outputs, inputs + ctx.params, grads, allow_unused=True)
        return (None, None) + found
""",
    "activations": """
import torch
from torch.nn import functional as F


def feed(x, weight):
    with torch.autocast("cuda", dtype=torch.bfloat16):
        hidden = F.gelu(x @ weight)
        return F.silu(hidden) + torch.amax(hidden, dim=-1, keepdim=True)
""",
}
