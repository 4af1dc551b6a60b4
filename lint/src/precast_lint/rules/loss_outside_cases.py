"""Cases of AMP303: a loss that is computed behind the region in which its inputs were."""

from __future__ import annotations

from precast_lint.model import Case

__all__ = ["INVALID", "VALID"]

VALID = (
    Case("""
        import torch
        import torch.nn.functional as F

        with torch.autocast("cuda"):
            out = model(x)
            loss = F.cross_entropy(out, y)
        scaler.scale(loss).backward()
    """),
    Case("""
        import torch
        import torch.nn.functional as F

        with torch.autocast("cuda"):
            out = model(x)
        loss = F.cross_entropy(out.float(), y)
        loss.backward()

        with torch.autocast("cuda"):
            out = model(x)
        out = out.float()
        loss = F.cross_entropy(out, y)
        loss.backward()
    """),
    Case(
        """
        import torch
        import torch.nn.functional as F

        with torch.autocast("cuda"):
            out = model(x)
            loss = criterion(out, y)
        error = F.mse_loss(out, y)
        loss.backward()
        """,
        note="A metric is not propagated back.",
    ),
    Case("""
        import torch
        import torch.nn.functional as F

        with torch.autocast("cuda"):
            for x in xs:
                out = model(x)
            if debug: print(out)
        with torch.autocast("cuda"): out = model(x).float()
        with torch.autocast("cuda"):
            out = model(x).float()
            other = model(x).softmax(-1)
        with torch.autocast("cuda"):
            loss = F.cross_entropy(out, y)
        loss.backward()
    """),
    Case("""
        import torch

        with torch.autocast("cuda"):
            logits, y = model(x)
        loss = torch.nn.functional.cross_entropy(logits.float(), y)
        loss.backward()
    """),
    Case(
        """
        import torch
        import torch.nn.functional as F
        from torch import nn

        class Wide(nn.Module):
            def __init__(self):
                super().__init__()
                self.head = nn.Linear(8, 8)

            def forward(self, x):
                return self.head(x).float()

        class Trainer:
            def __init__(self):
                self.model = Wide()

            def predict(self, x):
                with torch.autocast("cuda"):
                    return self.model(x)

            def predict_wide(self, x):
                with torch.autocast("cuda"):
                    return self.net(x).float()

            def loss(self, x, y):
                return F.mse_loss(self.predict_wide(x), y) + F.mse_loss(self.predict(x), y)

            def inside(self, out, y):
                return F.mse_loss(out, y)

            def step(self, x, y):
                self.loss(x, y).backward()
                with torch.autocast("cuda"):
                    out = self.model(x)
                    loss = self.inside(out, y)
                    with torch.autocast("cuda", enabled=False):
                        loss = loss + F.l1_loss(out, y)
                loss.backward()

            def validate(self, x, y):
                with torch.autocast("cuda"):
                    out = self.net(x)
                return F.mse_loss(out, y).item()
        """,
        note="The model returns float32; the loss is called in the region; a metric is returned.",
    ),
    Case(
        """
        import torch
        from torch import nn

        def criterion(outputs, targets):
            return nn.functional.mse_loss(outputs, targets)

        def train(model, batches, optimizer):
            for x, y in batches:
                with torch.autocast("cuda", dtype=torch.bfloat16):
                    outputs = model(x)
                    loss = criterion(outputs, y)
                loss.backward()
                criterion(outputs.float(), y).backward()
                optimizer.step()
        """,
    ),
    Case(
        """
        import torch
        import torch.nn.functional as F

        @torch.no_grad()
        def targets(teacher_model, x):
            with torch.autocast("cuda"):
                return teacher_model(x)

        def train(student, teacher_model, batches, optimizer):
            for x in batches:
                loss = F.mse_loss(student(x), targets(teacher_model, x))
                with torch.no_grad(), torch.autocast("cuda"):
                    target = teacher_model(x)
                loss = loss + F.l1_loss(student(x), target)
                loss.backward()
                optimizer.step()
        """,
        note="The student computes in float32, and so does the loss.",
    ),
    Case(
        """
        import torch
        from torch import nn

        def flow_loss(labels, out):
            criterion = nn.MSELoss(reduction="mean")
            flows = 5.0 * labels[:, -2:]
            loss = criterion(out[:, -3:-1], flows)
            loss /= 2.0
            return loss

        def fit(net, optimizer, batches, device, low):
            for image, labels in batches:
                image, labels = image.to(device), torch.from_numpy(labels).to(device)
                with torch.autocast(device_type=device.type, dtype=torch.bfloat16):
                    out = net(image)[0]
                loss = flow_loss(labels, out)
                if low:
                    labels = labels.bfloat16()
                loss += nn.functional.l1_loss(out, labels)
                loss += nn.functional.smooth_l1_loss(out, torch.zeros(8, device=device))
                loss += nn.functional.mse_loss(out, torch.ones_like(out, dtype=torch.float32))
                with torch.autocast("cuda", dtype=torch.bfloat16):
                    pair = net(image)
                    first, second = net(image)
                loss += nn.functional.mse_loss(out, second) + nn.functional.mse_loss(out, pair[1])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        """,
        note="With a target that is float32, or may be, PyTorch computes these losses in float32.",
    ),
)

INVALID = (
    Case(
        """
        import torch
        import torch.nn.functional as F
        from torch import nn

        LOSSES = {"first": nn.L1Loss(), "second": nn.MSELoss()}

        def train(net, optimizer, batches):
            for x, y in batches:
                with torch.autocast("cuda", dtype=torch.bfloat16):
                    mean, variance = net(x)
                loss = F.gaussian_nll_loss(mean, y, variance) + LOSSES["first"](mean, y.bfloat16())
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        """,
        count=2,
    ),
    Case(
        """
        import torch

        class Fit:
            def __init__(self, m):
                self.m = m
                self.criterion = torch.nn.CrossEntropyLoss()
                self.optimizer = torch.optim.SGD(m.parameters(), 0.1)
                self.scaler = torch.amp.GradScaler("cuda")

            def step(self, x, y):
                self.optimizer.zero_grad()
                with torch.autocast("cuda"):
                    out = self.m(x)
                loss = self.criterion(out, y)
                self.scaler.scale(loss).backward()
                self.scaler.step(self.optimizer)
                self.scaler.update()
        """,
        count=1,
        note="A model by its parameters.",
    ),
    Case(
        """
        import torch
        import torch.nn.functional as F

        def train(model, batches, scaler):
            for x, y in batches:
                with torch.autocast("cuda"):
                    out = model(x)
                loss = F.cross_entropy(out, y)
                total = loss + 0.1 * model.penalty()
                scaled = scaler.scale(total)
                scaled.backward()
        """,
        count=1,
    ),
    Case("""
        import torch
        import torch.nn.functional as F

        with torch.autocast("cuda"):
            out = model(x)
        loss = F.cross_entropy(out, y)
        loss.backward()
    """),
    Case("""
        import torch
        from torch import nn

        def train(model, batches, scaler):
            criterion = nn.MSELoss()
            for x, y in batches:
                with torch.cuda.amp.autocast():
                    out = model(x)
                scaler.scale(criterion(out.squeeze(1), y.type_as(out))).backward()
    """),
    Case(
        """
        import torch
        import torch.nn.functional as F

        class Trainer:
            def __init__(self, model):
                self.model = model
                self.criterion = torch.nn.MSELoss()

            def forward(self, x):
                with torch.autocast("cuda"):
                    return self.model(x)

            def loss(self, x, y):
                with torch.autocast("cuda"):
                    logits = self.model(x)
                return F.cross_entropy(logits.transpose(1, 2), y), logits

            def first(self, x, y):
                out = self.forward(x)
                loss = self.criterion(out, torch.ones_like(out))
                loss.backward()

            def second(self, x, y):
                loss, _ = self.loss(x, y)
                loss.backward()
        """,
        count=2,
        note="A method returns what the model does, or the loss.",
    ),
    Case(
        """
        import torch
        import torch.nn.functional as F

        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.head = torch.nn.Linear(8, 8)

            @torch.autocast("cuda", dtype=torch.bfloat16)
            def forward(self, x):
                return self.head(x)

        class Gan:
            def forward(self, x):
                with torch.autocast("cuda"):
                    self.fake = self.generator(x)

            def backward(self, y):
                self.loss = F.l1_loss(self.fake, y.to("cuda", torch.float16))
                self.scaler.scale(self.loss).backward()

        def train(batches, optimizer):
            net = Net().cuda()
            for x, y in batches:
                loss = F.cross_entropy(net(x), y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        """,
        count=2,
        note="A region in the model's `forward`, and an output that is kept.",
    ),
    Case(
        """
        import torch
        from torch import nn

        class Smooth(nn.Module):
            def __init__(self):
                super().__init__()
                self.ce = nn.CrossEntropyLoss(label_smoothing=0.1)

            def forward(self, outputs, targets):
                return self.ce(outputs, targets)

        class Trainer:
            def loss(self, outputs, targets):
                return nn.functional.mse_loss(outputs, targets)

            def step(self, x, y):
                with torch.autocast("cuda"):
                    outputs = self.model(x)
                loss = self.loss(outputs, y.half())
                self.scaler.scale(loss).backward()

            @torch.no_grad()
            def validate(self, x, y):
                with torch.autocast("cuda"):
                    outputs = self.model(x)
                return self.loss(outputs, y.half())

        def train(model, batches, optimizer):
            criterion = Smooth()
            for x, y in batches:
                with torch.autocast("cuda", dtype=torch.bfloat16):
                    outputs = model(x)
                loss = criterion(outputs, y)
                loss.backward()
                optimizer.step()
        """,
        count=2,
        note="A function or a module of the file computes the loss.",
    ),
    Case(
        """
        import torch

        def train(model, batches, optimizer, amp=True):
            region = lambda: torch.autocast("cuda", dtype=torch.bfloat16, enabled=amp)
            for x, y in batches:
                with region():
                    out = model(x)
                y = y.to(out.dtype)
                loss = torch.nn.functional.mse_loss(out, y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        """,
        count=1,
    ),
    Case(
        """
        import torch
        import torch.nn.functional as F
        from torch.utils.data import DataLoader, Dataset

        class Images(Dataset):
            def __init__(self, images, depths):
                self.images = images
                self.depths = depths.half()

            def __len__(self):
                return len(self.images)

            def __getitem__(self, i):
                return self.images[i], self.depths[i]

        def train(model, teacher_model, images, depths, optimizer, scaler):
            data = Images(images, depths)
            loader = DataLoader(data, batch_size=8)
            for x, depth in loader:
                x, depth = x.cuda(), depth.cuda()
                with torch.no_grad(), torch.autocast("cuda"):
                    wanted = teacher_model(x)
                with torch.autocast("cuda"):
                    out, code = model(x)
                loss = F.smooth_l1_loss(out, depth) + F.mse_loss(input=out, target=wanted.detach())
                loss = loss + F.l1_loss(torch.zeros(8, dtype=code.dtype), code)
                loss = loss + F.mse_loss(out, out.new_ones(8)) + F.l1_loss(out, x[:, 0].long())
                optimizer.zero_grad()
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
        """,
        count=5,
        note="Targets of 16 bits: of a data set, of another model, made like the output; and of integers.",
    ),
    Case(
        """
        import torch
        import torch.nn.functional as F

        def train(model, batches, optimizer):
            for x, y in batches:
                with torch.autocast("cuda", dtype=torch.bfloat16):
                    out = model(x)
                loss = F.binary_cross_entropy_with_logits(out, y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        """,
        count=1,
        note="With a float32 target, too, the sigmoid in the gradient is rounded to 16 bits.",
    ),
)
