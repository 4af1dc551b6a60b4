"""Programs of many kinds under `precast try`: each is measured as it is, and ends in a right answer."""

from __future__ import annotations

import itertools
import os
import statistics
import subprocess
from pathlib import Path

import pytest

from precast.cli.try_command import _CODES
from precast.running.trial.plan import TrialPlan
from tests.support.trials import ForkedTrials, try_program

Server = subprocess.Popen[str]

HEAD = """
import torch
from torch import nn
from torch.nn import functional as F
torch.manual_seed(1)
x, y = torch.randn(32, 16), torch.randn(32, 4)
model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
LOOP = """
for _ in range(100):
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
"""
DIGITS = """
from sklearn.datasets import load_digits
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
data = load_digits()
images = torch.tensor(data.images, dtype=torch.float32)[:256, None] / 16
loader = DataLoader(TensorDataset(images, torch.tensor(data.target)[:256]), 32, shuffle=True)
model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10))
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.Adam(model.parameters())
for epoch in range(9):
    model.train()
    for images, labels in loader:
        optimizer.zero_grad()
        loss = criterion(model(images), labels)
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        for images, labels in loader:
            (model(images).argmax(1) == labels).float().mean()
"""
LANGUAGE = """
        from sklearn.datasets import load_digits
        import torch
        from torch import nn
        words = torch.tensor(load_digits().data[:64], dtype=torch.long).view(8, -1).t()
        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.words, self.rnn, self.out = nn.Embedding(17, 8), nn.GRU(8, 16), nn.Linear(16, 17)
            def forward(self, x, state):
                y, state = self.rnn(self.words(x), state)
                return self.out(y).flatten(0, 1), state
        model, state = Model(), None
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for n in range(0, 400, 8):
            state = None if state is None else state.detach()
            output, state = model(words[n:n + 8], state)
            loss = nn.functional.cross_entropy(output, words[n + 1:n + 9].flatten())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            optimizer.step()
"""
GRAPH = """
        from sklearn.datasets import load_digits
        import torch
        from torch import nn
        data = load_digits()
        x, y = torch.tensor(data.data[:64]).float() / 16, torch.tensor(data.target[:64])
        graph = (torch.cdist(x, x) < 2.5).float()
        class Layer(nn.Module):
            def __init__(self, inputs, outputs):
                super().__init__()
                self.weight = nn.Parameter(torch.randn(inputs, outputs) / 8)
                self.edge = nn.Parameter(torch.randn(2, outputs) / 8)
            def forward(self, x):
                x = x @ self.weight
                LAYER
        model = nn.Sequential(Layer(64, 16), nn.ELU(), Layer(16, 10))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
        for _ in range(50):
            optimizer.zero_grad()
            nn.functional.nll_loss(model(x).log_softmax(1), y).backward()
            optimizer.step()
"""
PROCESSES = """
        import multiprocessing
        def train(model, x, y):
            import torch
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(50):
                optimizer.zero_grad()
                (model(x) - y).square().mean().backward()
                optimizer.step()
        if __name__ == "__main__":
            import torch
            context = multiprocessing.get_context("METHOD")
            model = torch.nn.Linear(16, 4).share_memory()
            x, y = torch.randn(32, 16), torch.randn(32, 4)
            processes = [context.Process(target=train, args=(model, x, y)) for _ in range(2)]
            [each.start() for each in processes]
            [each.join() for each in processes]
            assert all(each.exitcode == 0 for each in processes)
"""
PROGRAMS = {
    "MLP": HEAD + LOOP,
    "CNN on digits, with an evaluation in each epoch": DIGITS,
    "RNN with packed sequences": """
        import torch
        from torch import nn
        from torch.nn.utils.rnn import pack_sequence, pad_packed_sequence
        model = nn.LSTM(4, 8)
        head = nn.Linear(8, 1)
        optimizer = torch.optim.Adam([*model.parameters(), *head.parameters()])
        packed = pack_sequence([torch.randn(n, 4) for n in (5, 3, 2)])
        for _ in range(50):
            output, state = model(packed)
            assert output.data.dtype is torch.float32, output.data.dtype
            loss = head(pad_packed_sequence(output)[0]).square().mean() + state[0].square().mean()
            optimizer.zero_grad(); loss.backward(); optimizer.step()
    """,
    "word language model": LANGUAGE,
    "GCN": GRAPH.replace("LAYER", "return graph @ x / graph.sum(1, keepdim=True)"),
    "GAT": GRAPH.replace(
        "LAYER",
        "score = nn.functional.leaky_relu((x @ self.edge[0])[:, None] + x @ self.edge[1])\n"
        "                return torch.where(graph > 0, score, -9e15).softmax(1) @ x",
    ),
    "time sequence in float64": """
        from sklearn.datasets import load_digits
        import torch
        from torch import nn
        data = torch.tensor(load_digits().data[:16, :24]) / 16  # in float64
        class Sequence(nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.second, self.out = nn.LSTMCell(1, 8), nn.LSTMCell(8, 8), nn.Linear(8, 1)
            def forward(self, x):
                states, outputs = [None, None], []
                for each in x.split(1, dim=1):
                    states[0] = self.first(each, states[0])
                    states[1] = self.second(states[0][0], states[1])
                    outputs.append(self.out(states[1][0]))
                return torch.cat(outputs, 1)
        model = Sequence().double()
        criterion = nn.MSELoss()
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.8, max_iter=2)
        for _ in range(50):
            def closure():
                optimizer.zero_grad()
                loss = criterion(model(data[:, :-1]), data[:, 1:])
                loss.backward()
                return loss
            optimizer.step(closure)
    """,
    "processes that share a model (Hogwild)": PROCESSES.replace("METHOD", "fork"),
    "a model in torch.compile": HEAD + 'model = torch.compile(model, backend="eager")\n' + LOOP,
    "LBFGS with a closure": HEAD
    + """
optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
def closure():
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    return loss
for _ in range(50):
    optimizer.step(closure)
""",
    "GAN with two optimizers": """
        import torch
        from torch import nn
        critic, maker = nn.Linear(8, 1), nn.Linear(4, 8)
        steps = [torch.optim.Adam(each.parameters()) for each in (critic, maker)]
        criterion = nn.BCEWithLogitsLoss()
        real = torch.randn(16, 8)
        for _ in range(50):
            fake = maker(torch.randn(16, 4))
            steps[0].zero_grad()
            loss = criterion(critic(real), torch.ones(16, 1)) + criterion(critic(fake.detach()), torch.zeros(16, 1))
            loss.backward()
            steps[0].step()
            steps[1].zero_grad()
            criterion(critic(fake), torch.ones(16, 1)).backward()
            steps[1].step()
    """,
    "gradient accumulation and clipping": HEAD
    + """
for step in range(200):
    loss = F.mse_loss(model(x), y) / 2
    loss.backward()
    if step % 2:
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
""",
    "sparse embeddings": """
        import torch
        from torch import nn
        model = nn.Sequential(nn.EmbeddingBag(50, 8, sparse=True), nn.Linear(8, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        words = torch.randint(0, 50, (16, 5))
        for _ in range(50):
            optimizer.zero_grad()
            model(words).square().mean().backward()
            optimizer.step()
    """,
    "a model that takes and returns dicts": """
        import torch
        from torch import nn
        class Detector(nn.Module):
            def __init__(self):
                super().__init__()
                self.body, self.boxes, self.scores = nn.Conv2d(3, 4, 3), nn.Linear(4, 4), nn.Linear(4, 1)
            def forward(self, images, targets):
                features = self.body(torch.stack(images)).mean((2, 3))
                boxes = self.boxes(features)
                losses = {"boxes": (boxes - torch.stack([t["boxes"] for t in targets])).abs().mean()}
                return losses | {"scores": self.scores(features).sigmoid().mean()}
        model = Detector()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        images, targets = [torch.randn(3, 8, 8)] * 4, [{"boxes": torch.rand(4)}] * 4
        for _ in range(50):
            losses = model(images, targets)
            assert all(each.dtype is torch.float32 for each in losses.values())
            optimizer.zero_grad(); sum(losses.values()).backward(); optimizer.step()
    """,
    "a penalty on gradients": HEAD
    + """
for _ in range(50):
    optimizer.zero_grad()
    point = x.clone().requires_grad_()
    output = model(point)
    gradient, = torch.autograd.grad(output.sum(), point, create_graph=True)
    (F.mse_loss(output, y) + gradient.square().mean()).backward()
    optimizer.step()
""",
    "a variational autoencoder": """
        import torch
        from torch import nn
        encoder, decoder = nn.Linear(16, 8), nn.Linear(4, 16)
        optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()])
        images = torch.rand(32, 16)
        for _ in range(50):
            mean, variance = encoder(images).chunk(2, 1)
            output = decoder(mean + torch.randn_like(mean) * (variance / 2).exp())
            loss = nn.functional.binary_cross_entropy_with_logits(output, images)
            loss = loss - 0.01 * (1 + variance - mean**2 - variance.exp()).mean()
            optimizer.zero_grad(); loss.backward(); optimizer.step()
    """,
    "a regression without modules of its own": """
        import torch
        weights = torch.zeros(4, requires_grad=True)
        optimizer = torch.optim.SGD([weights], lr=0.1)
        for _ in range(50):
            optimizer.zero_grad()
            (torch.randn(8, 4) @ weights - 1).square().mean().backward()
            optimizer.step()
    """,
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_is_measured(name: str, tmp_path: Path, server: Server) -> None:
    answer, result, _ = try_program(tmp_path, server, PROGRAMS[name], dtype="float16")
    assert result.base.error is None
    [comparison] = result.comparisons()
    assert comparison.setting.error is None
    assert [o.ended for o in result.base.outcomes] == ["steps"] * len(result.base.outcomes)
    assert result.is_repeatable or "Hogwild" in name  # whose processes race
    assert len(result.first.seconds) == 9
    assert result.first.peak_memory
    assert comparison.is_equal or "Hogwild" in name, (comparison, result.base.outcomes[0].losses)
    assert answer.verdict in {"use", "keep", "undecided"}
    assert comparison.speedup is not None
    assert os.listdir(tmp_path / "work") == ["program.py"]


def test_inference_is_measured_by_calls(tmp_path: Path, server: Server) -> None:
    text = HEAD + "with torch.no_grad():\n    for _ in range(30):\n        model(x)\n"
    text = text.replace("optimizer =", "#")
    answer, result, _ = try_program(tmp_path, server, text)
    [comparison] = result.comparisons()
    assert not result.first.trains
    assert "the mean of its outputs was that of float32" in answer.sentence
    assert len(result.first.seconds) == 9
    assert comparison.is_equal
    assert answer.verdict in {"use", "keep", "undecided"}


def test_an_evaluation_before_the_training_is_not_measured(tmp_path: Path, server: Server) -> None:
    text = HEAD + "with torch.no_grad():\n    for _ in range(30):\n        model(x)\n" + LOOP
    _, result, _ = try_program(tmp_path, server, text)
    assert result.first.trains
    assert len(result.first.seconds) == 9


ANSWERS = {
    "never steps": (
        "import torch\ntorch.ones(2).sum()\n",
        "undecided: no optimizer stepped and no model was called. Name a function",
    ),
    "updates its weights by hand": (
        LANGUAGE.replace("optimizer = ", "# ")
        .replace("optimizer.zero_grad", "model.zero_grad")
        .replace("optimizer.step()", "[x.data.sub_(x.grad) for x in model.parameters()]"),
        "undecided: no optimizer stepped. Name a function each of whose calls is a step: `--step",
    ),
    "trains in processes that it spawns": (
        PROCESSES.replace("METHOD", "spawn").replace("range(50)", "range(0)"),
        "undecided: the script starts processes of its own",
    ),
    "waits for its data": (
        DIGITS.replace(
            "loader =",
            "import time\nclass TensorDataset(TensorDataset):\n"
            "    def __getitem__(self, index):\n        time.sleep(0.002)\n"
            "        return super().__getitem__(index)\nloader =",
        ),
        "use|keep|undecided: of a step in float32 pass before the model is called, which mixed precision",
    ),
    "fails at step 12": (
        HEAD
        + LOOP.replace(
            "optimizer.step()", "optimizer.step()\n    if _ == 11: raise OSError('gone')"
        ),
        "failed: The script failed in float32, after 12 steps: OSError: gone.",
    ),
    "is not reproducible": (
        HEAD
        + "import os\ntorch.manual_seed(int.from_bytes(os.urandom(4)))\nx = torch.randn(32, 16)\n"
        + LOOP,
        "use|keep|undecided: The script is not reproducible",
    ),
    "fails in 16 bits": (
        HEAD + LOOP.replace("model(x)", "model(x) + 1e5 * (model(x).dtype is torch.bfloat16)"),
        "keep: its loss differed by",
    ),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_a_program_gets_its_answer(name: str, tmp_path: Path, server: Server) -> None:
    program, expected = ANSWERS[name]
    verdicts, _, text = expected.partition(": ")
    answer, _, _ = try_program(tmp_path, server, program, steps=12)
    assert answer.verdict in verdicts.split("|")
    assert text in " ".join([answer.sentence, *answer.reasons])
    errors = [row["error"] for row in answer.to_dict()["settings"]]
    assert errors == ["OSError: gone"] or not any(errors)
    assert os.listdir(tmp_path / "work") == ["program.py"]


@pytest.mark.parametrize("where", ["program:step", "work_step:step"])
def test_a_named_function_is_the_step(where: str, tmp_path: Path, server: Server) -> None:
    step = "def step(weights):\n    return (weights @ weights).mean()\n"
    loop = "weights = torch.ones(8, 8)\nfor _ in range(50):\n    step(weights)\n"
    source = step if where == "program:step" else "from work_step import step\n"
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "work_step.py").write_text(step)
    _, result, _ = try_program(
        tmp_path, server, f"import torch\n{source}{loop}", step_function=where
    )
    assert result.first.losses == [8.0] * 9


def test_an_error_of_mixed_precision_is_in_its_row(tmp_path: Path, server: Server) -> None:
    text = HEAD + LOOP.replace("model(x)", "double(x)") + "\n"
    text = text.replace(
        "for _ in",
        "class Strict(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        self.inner = model\n"
        "    def forward(self, x):\n        out = self.inner(x)\n"
        "        assert out.dtype is torch.float32, 'not float32'\n        return out\n"
        "double = Strict()\nfor _ in",
    )
    answer, result, _ = try_program(tmp_path, server, text)
    assert result.comparisons()[0].setting.error == "AssertionError: not float32"
    assert answer.verdict == "keep"
    assert "failed (AssertionError: not float32)" in answer.sentence


def test_a_program_with_few_steps_is_measured(tmp_path: Path, server: Server) -> None:
    _, result, _ = try_program(tmp_path, server, HEAD + LOOP.replace("100", "4"))
    assert result.first.ended == "itself"
    assert len(result.first.seconds) == 4
    assert result.comparisons()[0].speedup is not None


def test_lines_are_recorded_in_steps_that_are_not_measured(tmp_path: Path, server: Server) -> None:
    steps = "    if _ < 3:\n        optimizer.step()\n    else:\n        optimizer.step()\n"
    _, result, _ = try_program(
        tmp_path, server, HEAD + LOOP.replace("    optimizer.step()\n", steps)
    )
    assert [len(numbers) for numbers in result.first.lines["step"].values()] == [1]


# --- a program with mixed precision of its own ---


def test_own_regions_and_a_scaler_are_compared_with_them_off(
    tmp_path: Path, server: Server
) -> None:
    text = (
        HEAD
        + """
scaler = torch.amp.GradScaler("cpu")
for _ in range(50):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        output = model(x)
    loss = F.mse_loss(output.float(), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""
    )
    answer, result, launcher = try_program(tmp_path, server, text)
    rows = answer.to_dict()["settings"]
    assert [row["name"] for row in rows] == ["float32 (regions off)", "float16 + scaler (as is)"]
    assert all(row["loss"] for row in rows)
    assert not any(o.region_dtypes == {} for o in result.settings[0].outcomes)
    assert {plan.disables for plan in launcher.plans} == {True, False}
    assert result.comparisons()[0].is_equal
    assert result.base.outcomes[0].losses != result.settings[0].outcomes[0].losses


def test_precasts_own_regions_are_compared_with_them_off(tmp_path: Path, server: Server) -> None:
    text = (
        HEAD
        + "import precast\n"
        + LOOP.replace("loss = F", "with precast.autocast('cpu'): loss = F")
    )
    _, result, _ = try_program(tmp_path, server, text)
    assert result.has_own_precision
    assert [*result.first.region_dtypes] == ["bfloat16"]
    assert result.base.outcomes[0].losses != result.settings[0].outcomes[0].losses


# --- plants ---

TIMED = """
import os, time, torch
from torch import nn
class Model(nn.Linear):
    def forward(self, x):
        output = super().forward(x)
        time.sleep(SECONDS[output.dtype])
        dtypes.append(str(output.dtype))
        return output
SECONDS, dtypes = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16}, []
model, x = Model(16, 4), torch.ones(8, 16)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for _ in range(100):
    now = time.perf_counter()
    with open(f"{os.getpid()}.txt", "a") as file:
        print(*dtypes[-1:], now, file=file)
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("seconds", "verdict", "code"), [((0.06, 0.01), "use", 0), ((0.01, 0.06), "keep", 3)]
)
def test_the_time_of_a_step_is_what_the_script_itself_measures(
    seconds: tuple[float, float], verdict: str, code: int, tmp_path: Path, server: Server
) -> None:
    """The script sleeps by the dtype of its activation, and writes when each of its steps begins."""
    text = TIMED.replace("BFLOAT16", str(seconds[1])).replace("FLOAT32", str(seconds[0]))
    answer, result, _ = try_program(tmp_path, server, text, allows_writes=True)
    assert (answer.verdict, _CODES[answer.verdict]) == (verdict, code)
    [comparison] = result.comparisons()
    assert comparison.is_equal
    files = [path.read_text().splitlines() for path in (tmp_path / "work").glob("*.txt")]
    for setting, least in zip((result.base, comparison.setting), seconds, strict=True):
        own = [each for each in files if each[1].startswith(f"torch.{setting.dtype}")]
        assert len(own) == len(setting.outcomes)
        times = [[float(line.split()[-1]) for line in lines] for lines in own]
        steps = [[b - a for a, b in itertools.pairwise(each[3:])] for each in times]
        trials = [each.seconds[3:-1] for each in setting.outcomes]
        assert sorted(map(sum, trials)) == pytest.approx(sorted(map(sum, steps)), rel=0.2)
        measured = setting.seconds(9)
        assert measured is not None
        assert measured[0] >= least  # a sleep is never shorter
        best = statistics.fmean(map(min, zip(*steps, strict=True)))
        assert measured[0] == pytest.approx(best, rel=0.2)


OVERFLOW = (
    HEAD.replace("nn.Tanh()", "Overflow()").replace(
        "x, y =",
        "class Overflow(nn.Module):\n    def forward(self, x):\n        return (x * 1e5) * 1e-5\nx, y =",
    )
    + LOOP
)


def test_the_module_at_fault_is_named_and_bfloat16_is_tried(tmp_path: Path, server: Server) -> None:
    answer, result, _ = try_program(tmp_path, server, OVERFLOW, dtype="float16", explains=True)
    reason = "In float16 + scaler the first output that is not finite is that of the module `1`."
    assert reason in answer.reasons
    names = [each.name for each in result.settings]
    assert names == ["float16 + scaler", "float16 + scaler, 1 in float32", "bfloat16"]
    assert result.comparisons()[2].is_equal


def test_an_overflow_of_float16_is_seen(tmp_path: Path, server: Server) -> None:
    answer, result, _ = try_program(tmp_path, server, OVERFLOW, dtype="float16")
    [comparison] = result.comparisons()
    assert comparison.is_equal is False
    assert comparison.setting.first.nonfinite or comparison.setting.first.skipped
    assert answer.verdict == "keep"
    _, result, _ = try_program(tmp_path / "trials", server, OVERFLOW, dtype="bfloat16")
    assert result.comparisons()[0].is_equal


PLANT = """
class Model(nn.Sequential):
    def forward(self, x):
        out = super().forward(x)
        return out * FACTOR if out.dtype is torch.bfloat16 else out
model = Model(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
for _ in range(100):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
"""


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_program_that_both_dtypes_break_keeps_float32(
    dtype: str, tmp_path: Path, server: Server
) -> None:
    text = HEAD + PLANT.replace("FACTOR", "float('nan')").replace(
        "torch.bfloat16", f"torch.{dtype}"
    )
    answer, _, _ = try_program(tmp_path, server, text, dtype=dtype)
    assert answer.verdict == "keep"
    assert answer.to_dict()["settings"][1]["loss_equal"] is False


@pytest.mark.parametrize(("factor", "is_equal"), [(1.025, False), (1.002, True)])
def test_a_loss_that_differs_is_told_from_rounding(
    factor: float, is_equal: bool, tmp_path: Path, server: Server
) -> None:
    """Other seeds change the loss of this program: by some per cent, as its weights are drawn again."""
    text = HEAD.replace("torch.randn(32, 16)", "torch.ones(32, 16)") + PLANT.replace(
        "FACTOR", str(factor)
    ).replace("optimizer =", "[nn.init.ones_(each) for each in model.parameters()]\noptimizer =")
    _, result, _ = try_program(tmp_path, server, text)
    [comparison] = result.comparisons()
    assert comparison.difference == pytest.approx(factor**2 - 1, abs=5e-3)
    assert comparison.is_equal is is_equal
    assert len(result.others) == (0 if is_equal else 2)
    assert comparison.noise == (None if is_equal else 0.0)


def test_the_batches_of_loaders_are_multiplied(tmp_path: Path, server: Server) -> None:
    program = tmp_path / "program.py"
    program.write_text(DIGITS.replace("range(9)", "range(1)"))
    for factor, steps in [(1, 8), (4, 2)]:
        folder = tmp_path / str(factor)
        folder.mkdir()
        plan = TrialPlan(str(program), folder=str(folder), batch_factor=factor)
        assert len(ForkedTrials(tmp_path, server).run(plan, 600).seconds) == steps


def test_a_checkpoint_is_read_again_and_leaves_no_file(tmp_path: Path, server: Server) -> None:
    text = (
        HEAD
        + """
import os
os.makedirs("out", exist_ok=True)
for _ in range(100):
    optimizer.zero_grad()
    F.mse_loss(model(x), y).backward()
    optimizer.step()
    torch.save(model.state_dict(), "out/model.pt")
    model.load_state_dict(torch.load("out/model.pt"))
    assert os.path.exists("out/model.pt")
"""
    )
    answer, result, _ = try_program(tmp_path, server, text)
    assert result.base.error is None
    assert [Path(each).name for each in answer.to_dict()["withheld_writes"]] == [
        "out",
        "model.pt",
    ]
    assert os.listdir(tmp_path / "work") == ["program.py"]


def test_writes_are_allowed_on_demand(tmp_path: Path, server: Server) -> None:
    text = HEAD + LOOP + "    torch.save(model, 'model.pt')\n    open('log.txt', 'w').close()\n"
    _, result, _ = try_program(tmp_path, server, text, allows_writes=True)
    assert result.withheld == []
    assert sorted(os.listdir(tmp_path / "work")) == ["log.txt", "model.pt", "program.py"]
