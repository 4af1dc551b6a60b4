"""The cases of AMP210 in files that load their checkpoints: where the scaler is loaded, too, and where not."""

from __future__ import annotations

from precast_lint.model import Case

__all__ = ["LOAD_INVALID"]

LOAD_INVALID = (
    Case(
        """
        import torch

        def train(model, batches, path):
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            scaler = torch.amp.GradScaler("cuda")
            for batch in batches:
                optimizer.zero_grad()
                scaler.scale(model(batch)).backward()
                scaler.step(optimizer)
                scaler.update()
            state = dict(model=model.state_dict())
            state.update(optimizer=optimizer.state_dict(), epoch=3)
            torch.save(state, path)
        """,
        """
        import torch

        def train(model, batches, path):
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            scaler = torch.amp.GradScaler("cuda")
            for batch in batches:
                optimizer.zero_grad()
                scaler.scale(model(batch)).backward()
                scaler.step(optimizer)
                scaler.update()
            state = dict(model=model.state_dict(), scaler=scaler.state_dict())
            state.update(optimizer=optimizer.state_dict(), epoch=3)
            torch.save(state, path)
        """,
        unsafe=True,
        count=1,
        note="Put in by `update`.",
    ),
    Case(
        """
        import torch

        def train(model, batches, path):
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            scaler = torch.amp.GradScaler("cuda")
            for batch in batches:
                optimizer.zero_grad()
                scaler.scale(model(batch)).backward()
                scaler.step(optimizer)
                scaler.update()
            torch.save(
                {**{"model": model.state_dict(), "o": optimizer.state_dict()}}, path
            )
        """,
        """
        import torch

        def train(model, batches, path):
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            scaler = torch.amp.GradScaler("cuda")
            for batch in batches:
                optimizer.zero_grad()
                scaler.scale(model(batch)).backward()
                scaler.step(optimizer)
                scaler.update()
            torch.save(
                {**{"model": model.state_dict(), "o": optimizer.state_dict()}, "scaler": scaler.state_dict()}, path
            )
        """,
        unsafe=True,
    ),
    Case(
        """
        import torch

        def resume(model, optimizer, scaler, path):
            state = torch.load(path)
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["opt"])
            if "amp" in state:
                amp_state = state.get("amp")
                scaler.load_state_dict(amp_state)

        def train(model, batches, path):
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            scaler = torch.amp.GradScaler("cuda")
            resume(model, optimizer, scaler, path)
            for batch in batches:
                optimizer.zero_grad()
                scaler.scale(model(batch)).backward()
                scaler.step(optimizer)
                scaler.update()
            torch.save({"model": model.state_dict(), "opt": optimizer.state_dict()}, path)
        """,
        """
        import torch

        def resume(model, optimizer, scaler, path):
            state = torch.load(path)
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["opt"])
            if "amp" in state:
                amp_state = state.get("amp")
                scaler.load_state_dict(amp_state)

        def train(model, batches, path):
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            scaler = torch.amp.GradScaler("cuda")
            resume(model, optimizer, scaler, path)
            for batch in batches:
                optimizer.zero_grad()
                scaler.scale(model(batch)).backward()
                scaler.step(optimizer)
                scaler.update()
            torch.save({"model": model.state_dict(), "opt": optimizer.state_dict(), "amp": scaler.state_dict()}, path)
        """,
        unsafe=True,
        note="Saved under the key that is loaded.",
    ),
    Case(
        """
        import torch

        def train(model, batches, path):
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            scaler = torch.amp.GradScaler("cuda")
            if path:
                state = torch.load(path)
                model.load_state_dict(state["model"])
                optimizer.load_state_dict(state["optimizer"])  # its momentum
                print(state["epoch"])
            for batch in batches:
                optimizer.zero_grad()
                scaler.scale(model(batch)).backward()
                scaler.step(optimizer)
                scaler.update()
            torch.save({"model": model, "optimizer": optimizer.state_dict()}, "last.pt")
        """,
        """
        import torch

        def train(model, batches, path):
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            scaler = torch.amp.GradScaler("cuda")
            if path:
                state = torch.load(path)
                model.load_state_dict(state["model"])
                optimizer.load_state_dict(state["optimizer"])  # its momentum
                if "scaler" in state:
                    scaler.load_state_dict(state["scaler"])
                print(state["epoch"])
            for batch in batches:
                optimizer.zero_grad()
                scaler.scale(model(batch)).backward()
                scaler.step(optimizer)
                scaler.update()
            torch.save({"model": model, "optimizer": optimizer.state_dict(), "scaler": scaler.state_dict()}, "last.pt")
        """,
        unsafe=True,
        count=1,
        note="Made in the function, before.",
    ),
    Case(
        """
        import torch

        def train(model, batches, path):
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            scaler = torch.amp.GradScaler("cuda", enabled=model.half)
            if path:
                state = torch.load(path)
                model.load_state_dict(state["model"])
                optimizer.load_state_dict(state["optimizer"])  # its momentum
                print(state["epoch"])
            for batch in batches:
                optimizer.zero_grad()
                scaler.scale(model(batch)).backward()
                scaler.step(optimizer)
                scaler.update()
            torch.save({"model": model, "optimizer": optimizer.state_dict()}, "last.pt")
        """,
        """
        import torch

        def train(model, batches, path):
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            scaler = torch.amp.GradScaler("cuda", enabled=model.half)
            if path:
                state = torch.load(path)
                model.load_state_dict(state["model"])
                optimizer.load_state_dict(state["optimizer"])  # its momentum
                if state.get("scaler"):
                    scaler.load_state_dict(state["scaler"])
                print(state["epoch"])
            for batch in batches:
                optimizer.zero_grad()
                scaler.scale(model(batch)).backward()
                scaler.step(optimizer)
                scaler.update()
            torch.save({"model": model, "optimizer": optimizer.state_dict(), "scaler": scaler.state_dict()}, "last.pt")
        """,
        unsafe=True,
        count=1,
        note="A scaler that was off has an empty state, which one that is on refuses.",
    ),
    Case(
        """
        import torch

        def train(model, batches, path):
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            state = torch.load(path)
            optimizer.load_state_dict(state["optimizer"])
            scaler = torch.amp.GradScaler("cuda")
            for batch in batches:
                optimizer.zero_grad()
                scaler.scale(model(batch)).backward()
                scaler.step(optimizer)
                scaler.update()
            torch.save({"model": model, "optimizer": optimizer.state_dict()}, "last.pt")
        """,
        """
        import torch

        def train(model, batches, path):
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            state = torch.load(path)
            optimizer.load_state_dict(state["optimizer"])
            scaler = torch.amp.GradScaler("cuda")
            for batch in batches:
                optimizer.zero_grad()
                scaler.scale(model(batch)).backward()
                scaler.step(optimizer)
                scaler.update()
            torch.save({"model": model, "optimizer": optimizer.state_dict(), "scaler": scaler.state_dict()}, "last.pt")
        """,
        unsafe=True,
        count=1,
        note="The scaler is not made before: nothing loads its state.",
    ),
    Case(
        """
        import torch

        def train(model, batches, state, path):
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            scaler = torch.amp.GradScaler("cuda")
            optimizer.load_state_dict(state["optimizer"])
            if path:
                pretrained = torch.load(path)
                optimizer.load_state_dict(pretrained["adam"])
                optimizer.load_state_dict(torch.load(path)["optimizer"])
            for batch in batches:
                optimizer.zero_grad()
                scaler.scale(model(batch)).backward()
                scaler.step(optimizer)
                scaler.update()
            torch.save({"model": model, "optimizer": optimizer.state_dict()}, "last.pt")
        """,
        """
        import torch

        def train(model, batches, state, path):
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            scaler = torch.amp.GradScaler("cuda")
            optimizer.load_state_dict(state["optimizer"])
            if path:
                pretrained = torch.load(path)
                optimizer.load_state_dict(pretrained["adam"])
                optimizer.load_state_dict(torch.load(path)["optimizer"])
            for batch in batches:
                optimizer.zero_grad()
                scaler.scale(model(batch)).backward()
                scaler.step(optimizer)
                scaler.update()
            torch.save({"model": model, "optimizer": optimizer.state_dict(), "scaler": scaler.state_dict()}, "last.pt")
        """,
        unsafe=True,
        count=1,
        note="A parameter, another key, and a checkpoint without a name: none of them is certain.",
    ),
    Case(
        """
        import torch

        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        scaler = torch.amp.GradScaler("cuda")

        def resume(path):
            state = torch.load(path, weights_only=True)
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])

        def train(batches):
            for batch in batches:
                optimizer.zero_grad()
                scaler.scale(model(batch)).backward()
                scaler.step(optimizer)
                scaler.update()
            torch.save(
                {
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                },
                "last.pt",
            )
        """,
        """
        import torch

        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        scaler = torch.amp.GradScaler("cuda")

        def resume(path):
            state = torch.load(path, weights_only=True)
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            if "scaler" in state:
                scaler.load_state_dict(state["scaler"])

        def train(batches):
            for batch in batches:
                optimizer.zero_grad()
                scaler.scale(model(batch)).backward()
                scaler.step(optimizer)
                scaler.update()
            torch.save(
                {
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "scaler": scaler.state_dict(),
                },
                "last.pt",
            )
        """,
        unsafe=True,
        count=1,
    ),
    Case(
        """
        import torch

        def resume(path, model, optimizer, amp):
            state = torch.load(path)
            optimizer.load_state_dict(state["optimizer"])
            model.load_state_dict(state["model"])

        def train(model, batches):
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            scaler = torch.amp.GradScaler("cuda")
            resume("last.pt", model, optimizer, scaler)
            for batch in batches:
                optimizer.zero_grad()
                scaler.scale(model(batch)).backward()
                scaler.step(optimizer)
                scaler.update()
            torch.save({"model": model, "optimizer": optimizer.state_dict()}, "last.pt")
        """,
        """
        import torch

        def resume(path, model, optimizer, amp):
            state = torch.load(path)
            optimizer.load_state_dict(state["optimizer"])
            if "scaler" in state:
                amp.load_state_dict(state["scaler"])
            model.load_state_dict(state["model"])

        def train(model, batches):
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            scaler = torch.amp.GradScaler("cuda")
            resume("last.pt", model, optimizer, scaler)
            for batch in batches:
                optimizer.zero_grad()
                scaler.scale(model(batch)).backward()
                scaler.step(optimizer)
                scaler.update()
            torch.save({"model": model, "optimizer": optimizer.state_dict(), "scaler": scaler.state_dict()}, "last.pt")
        """,
        unsafe=True,
        count=1,
        note="A parameter that gets the scaler from each call.",
    ),
    Case(
        """
        import torch

        def resume(path, model, optimizer, amp):
            state = torch.load(path)
            optimizer.load_state_dict(state["optimizer"])
            model.load_state_dict(state["model"])

        def train(model, batches):
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            scaler = torch.amp.GradScaler("cuda")
            resume("last.pt", model, optimizer, scaler)
            for batch in batches:
                optimizer.zero_grad()
                scaler.scale(model(batch)).backward()
                scaler.step(optimizer)
                scaler.update()
            torch.save({"model": model, "optimizer": optimizer.state_dict()}, "last.pt")

        def evaluate(model, optimizer):
            resume("best.pt", model, optimizer, None)
        """,
        """
        import torch

        def resume(path, model, optimizer, amp):
            state = torch.load(path)
            optimizer.load_state_dict(state["optimizer"])
            model.load_state_dict(state["model"])

        def train(model, batches):
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            scaler = torch.amp.GradScaler("cuda")
            resume("last.pt", model, optimizer, scaler)
            for batch in batches:
                optimizer.zero_grad()
                scaler.scale(model(batch)).backward()
                scaler.step(optimizer)
                scaler.update()
            torch.save({"model": model, "optimizer": optimizer.state_dict(), "scaler": scaler.state_dict()}, "last.pt")

        def evaluate(model, optimizer):
            resume("best.pt", model, optimizer, None)
        """,
        unsafe=True,
        count=1,
        note="A parameter that gets the scaler from some calls.",
    ),
    Case(
        """
        import torch

        def train(gen, disc, batches, path):
            one = torch.optim.SGD(gen.parameters(), 0.1)
            two = torch.optim.SGD(disc.parameters(), 0.1)
            scaler = torch.amp.GradScaler("cuda")
            if path:
                state = torch.load(path)
                one.load_state_dict(state["one"])
                two.load_state_dict(state["two"])
            for batch in batches:
                scaler.scale(gen(batch) + disc(batch)).backward()
                scaler.step(one)
                scaler.step(two)
                scaler.update()
            state = dict(gen=gen.state_dict(), one=one.state_dict(), two=two.state_dict())
            torch.save(state, "last.pt")
        """,
        """
        import torch

        def train(gen, disc, batches, path):
            one = torch.optim.SGD(gen.parameters(), 0.1)
            two = torch.optim.SGD(disc.parameters(), 0.1)
            scaler = torch.amp.GradScaler("cuda")
            if path:
                state = torch.load(path)
                one.load_state_dict(state["one"])
                two.load_state_dict(state["two"])
                if "scaler" in state:
                    scaler.load_state_dict(state["scaler"])
            for batch in batches:
                scaler.scale(gen(batch) + disc(batch)).backward()
                scaler.step(one)
                scaler.step(two)
                scaler.update()
            state = dict(gen=gen.state_dict(), one=one.state_dict(), two=two.state_dict(), scaler=scaler.state_dict())
            torch.save(state, "last.pt")
        """,
        unsafe=True,
        count=1,
        note="Behind the last of several optimizers.",
    ),
    Case(
        """
        import torch

        class Trainer:
            def __init__(self, model, path):
                self.model = model
                self.optimizer = torch.optim.SGD(model.parameters(), 0.1)
                self.scaler = torch.amp.GradScaler("cuda")

            def step(self, batch):
                self.scaler.scale(self.model(batch)).backward()
                self.scaler.step(self.optimizer)
                self.scaler.update()

            def save(self, path):
                state = {
                    "model": self.model.state_dict(),
                    "optimizer": self.optimizer.state_dict(),
                }
                torch.save(state, path)

            def resume(self, path):
                state = torch.load(path)
                self.optimizer.load_state_dict(state["optimizer"])
        """,
        """
        import torch

        class Trainer:
            def __init__(self, model, path):
                self.model = model
                self.optimizer = torch.optim.SGD(model.parameters(), 0.1)
                self.scaler = torch.amp.GradScaler("cuda")

            def step(self, batch):
                self.scaler.scale(self.model(batch)).backward()
                self.scaler.step(self.optimizer)
                self.scaler.update()

            def save(self, path):
                state = {
                    "model": self.model.state_dict(),
                    "optimizer": self.optimizer.state_dict(),
                    "scaler": self.scaler.state_dict(),
                }
                torch.save(state, path)

            def resume(self, path):
                state = torch.load(path)
                self.optimizer.load_state_dict(state["optimizer"])
                if "scaler" in state:
                    self.scaler.load_state_dict(state["scaler"])
        """,
        unsafe=True,
        count=1,
    ),
    Case(
        """
        import torch

        class Trainer:
            def __init__(self, model, path):
                self.model = model
                self.optimizer = torch.optim.SGD(model.parameters(), 0.1)
                self.resume(path)
                self.scaler = torch.amp.GradScaler("cuda")

            def step(self, batch):
                self.scaler.scale(self.model(batch)).backward()
                self.scaler.step(self.optimizer)
                self.scaler.update()

            def save(self, path):
                state = {
                    "model": self.model.state_dict(),
                    "optimizer": self.optimizer.state_dict(),
                }
                torch.save(state, path)

            def resume(self, path):
                state = torch.load(path)
                self.optimizer.load_state_dict(state["optimizer"])
        """,
        """
        import torch

        class Trainer:
            def __init__(self, model, path):
                self.model = model
                self.optimizer = torch.optim.SGD(model.parameters(), 0.1)
                self.resume(path)
                self.scaler = torch.amp.GradScaler("cuda")

            def step(self, batch):
                self.scaler.scale(self.model(batch)).backward()
                self.scaler.step(self.optimizer)
                self.scaler.update()

            def save(self, path):
                state = {
                    "model": self.model.state_dict(),
                    "optimizer": self.optimizer.state_dict(),
                    "scaler": self.scaler.state_dict(),
                }
                torch.save(state, path)

            def resume(self, path):
                state = torch.load(path)
                self.optimizer.load_state_dict(state["optimizer"])
        """,
        unsafe=True,
        count=1,
        note="The method runs before the scaler is made.",
    ),
)
