"""The cases of AMP210: checkpoints that have the scaler's state, or need none, and those that lack it."""

from __future__ import annotations

from precast_lint.model import Case

__all__ = ["INVALID", "VALID"]

VALID = (
    Case("""
        import torch

        scaler = torch.amp.GradScaler("cuda")
        scaler.scale(loss).backward()
        torch.save(
            {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "scaler": scaler.state_dict(),
            },
            path,
        )
    """),
    Case("""
        import torch

        scaler = torch.amp.GradScaler("cuda")
        scaler.scale(loss).backward()
        checkpoint = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        if amp:
            checkpoint["scaler"] = scaler.state_dict()
        torch.save(checkpoint, path)
    """),
    Case(
        """
        import torch

        scaler = torch.amp.GradScaler("cuda")
        scaler.scale(loss).backward()
        torch.save({"model": model.state_dict(), "epoch": epoch}, path)
        """,
        note="Weights for inference.",
    ),
    Case("""
        import torch

        def save(model, optimizer, path):
            state = {"model": model.state_dict(), "optim": optimizer.state_dict()}
            torch.save(state, path)

        def train(model, optimizer, batches):
            scaler = torch.amp.GradScaler("cuda")
            for batch in batches:
                scaler.scale(model(batch)).backward()
    """),
    Case(
        """
        import torch

        def train(model, optimizer, batches, path, amp):
            scaler = torch.amp.GradScaler("cuda")
            state = None
            for batch in batches:
                scaler.scale(model(batch)).backward()
                scaler.step(optimizer)
                scaler.update()
                state = {"model": model, "optimizer": optimizer.state_dict()}
                state.update(extra(scaler))
                torch.save(state, path)
        """,
        note="More is put into it.",
    ),
    Case(
        """
        import torch

        def save(path, model, optimizer, **more):
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), **more}, path)

        def keep(path, model, optimizer, grad_scaler):
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            extend(state, grad_scaler)
            torch.save(state, path)

        def train(model, batches):
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            scaler = torch.amp.GradScaler("cuda")
            for batch in batches:
                optimizer.zero_grad()
                scaler.scale(model(batch)).backward()
                scaler.step(optimizer)
                scaler.update()
            save("last.pt", model, optimizer, amp=scaler.get_scale())
            keep("last.pt", model, optimizer, scaler)
        """,
    ),
    Case(
        """
        import torch

        def train(model, batches):
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            scaler = torch.amp.GradScaler("cuda", init_scale=1024)
            for batch in batches:
                optimizer.zero_grad()
                scaler.scale(model(batch)).backward()
                optimizer.step()
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "state.pt")
        """,
        note="A scaler that never updates has one scale.",
    ),
    Case(
        """
        import torch

        def save(path, model, optimizer, grad_scaler):
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, path)
            torch.save(grad_scaler, path + ".scaler")

        def train(model, batches):
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            scaler = torch.amp.GradScaler("cuda")
            for batch in batches:
                optimizer.zero_grad()
                scaler.scale(model(batch)).backward()
                scaler.step(optimizer)
                scaler.update()
            save("last.pt", model, optimizer, scaler)
        """,
        note="The function does something with the scaler that it is given.",
    ),
)

INVALID = (
    Case(
        """
        import torch

        def train(model, optimizer, batches, path):
            scaler = torch.amp.GradScaler("cuda")
            for batch in batches:
                scaler.scale(model(batch)).backward()
                scaler.step(optimizer)
                scaler.update()
            state = {"model": model.state_dict(), "optim": optimizer.state_dict()}
            torch.save(state, path)
        """,
        """
        import torch

        def train(model, optimizer, batches, path):
            scaler = torch.amp.GradScaler("cuda")
            for batch in batches:
                scaler.scale(model(batch)).backward()
                scaler.step(optimizer)
                scaler.update()
            state = {"model": model.state_dict(), "optim": optimizer.state_dict(), "scaler": scaler.state_dict()}
            torch.save(state, path)
        """,
        unsafe=True,
        count=1,
    ),
    Case(
        """
        import torch

        class Trainer:
            def __init__(self, model):
                self.model = model
                self.scaler = torch.amp.GradScaler("cuda")

            def step(self, loss):
                self.scaler.scale(loss).backward()

            def save(self, path):
                state = {
                    "model": self.model.state_dict(),
                    "optimizer": self.optimizer.state_dict(),
                    "epoch": self.epoch,  # the next one
                }
                torch.save(state, path)
        """,
        """
        import torch

        class Trainer:
            def __init__(self, model):
                self.model = model
                self.scaler = torch.amp.GradScaler("cuda")

            def step(self, loss):
                self.scaler.scale(loss).backward()

            def save(self, path):
                state = {
                    "model": self.model.state_dict(),
                    "optimizer": self.optimizer.state_dict(),
                    "epoch": self.epoch,
                    "scaler": self.scaler.state_dict(),  # the next one
                }
                torch.save(state, path)
        """,
        unsafe=True,
        count=1,
    ),
    Case(
        """
        import torch

        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        scaler = torch.amp.GradScaler("cuda")

        def train(batch):
            scaler.scale(model(batch)).backward()
            scaler.step(optimizer)
            scaler.update()

        def save(path):
            torch.save({"net": model.state_dict(), "sgd": optimizer.state_dict()}, path)
        """,
        """
        import torch

        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        scaler = torch.amp.GradScaler("cuda")

        def train(batch):
            scaler.scale(model(batch)).backward()
            scaler.step(optimizer)
            scaler.update()

        def save(path):
            torch.save({"net": model.state_dict(), "sgd": optimizer.state_dict(), "scaler": scaler.state_dict()}, path)
        """,
        unsafe=True,
    ),
    Case(
        """
        import torch
        from copy import deepcopy

        def train(model, optimizer, batches, last):
            scaler = torch.amp.GradScaler("cuda")
            for epoch in range(9):
                for batch in batches:
                    scaler.scale(model(batch)).backward()
                    scaler.step(optimizer)
                    scaler.update()
                saved = {
                    "epoch": epoch,
                    "model": deepcopy(model).half(),
                    "optimizer": optimizer.state_dict(),
                }
                torch.save(saved, last)
                del saved
        """,
        """
        import torch
        from copy import deepcopy

        def train(model, optimizer, batches, last):
            scaler = torch.amp.GradScaler("cuda")
            for epoch in range(9):
                for batch in batches:
                    scaler.scale(model(batch)).backward()
                    scaler.step(optimizer)
                    scaler.update()
                saved = {
                    "epoch": epoch,
                    "model": deepcopy(model).half(),
                    "optimizer": optimizer.state_dict(),
                    "scaler": scaler.state_dict(),
                }
                torch.save(saved, last)
                del saved
        """,
        unsafe=True,
        note="A model that is saved as a whole.",
    ),
    Case(
        """
        import torch

        scaler = torch.amp.GradScaler("cuda", enabled=dtype == "float16")
        checkpoint = torch.load(path) if resume else None
        while True:
            if step % 1000 == 0:
                checkpoint = {
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                }
                torch.save(checkpoint, path)
            scaler.scale(model(batch)).backward()
            scaler.step(optimizer)
            scaler.update()
        """,
        """
        import torch

        scaler = torch.amp.GradScaler("cuda", enabled=dtype == "float16")
        checkpoint = torch.load(path) if resume else None
        while True:
            if step % 1000 == 0:
                checkpoint = {
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "scaler": scaler.state_dict(),
                }
                torch.save(checkpoint, path)
            scaler.scale(model(batch)).backward()
            scaler.step(optimizer)
            scaler.update()
        """,
        unsafe=True,
        note="The name has had another value before.",
    ),
    Case(
        """
        import torch

        def main(model, batches):
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            scaler = torch.amp.GradScaler("cuda")
            train(model, optimizer, scaler, batches)
            state = dict(model=model.state_dict(), optim=optimizer.state_dict())
            torch.save(state, "last.pt")

        def train(model, optimizer, scaler, batches):
            for batch in batches:
                scaler.scale(model(batch)).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        """,
        """
        import torch

        def main(model, batches):
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            scaler = torch.amp.GradScaler("cuda")
            train(model, optimizer, scaler, batches)
            state = dict(model=model.state_dict(), optim=optimizer.state_dict(), scaler=scaler.state_dict())
            torch.save(state, "last.pt")

        def train(model, optimizer, scaler, batches):
            for batch in batches:
                scaler.scale(model(batch)).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        """,
        unsafe=True,
        note="The scaler is made here, and used in a function of the file.",
    ),
    Case(
        """
        import torch

        class Trainer:
            def __init__(self, model):
                self.model = model
                self.optimizer = torch.optim.SGD(model.parameters(), 0.1)
                self.scaler = torch.amp.GradScaler("cuda")

            def step(self, batch):
                self.scaler.scale(self.model(batch)).backward()
                self.scaler.step(self.optimizer)
                self.scaler.update()
                self.optimizer.zero_grad()

            def save(self, path):
                state = {}
                state["model"] = self.model.state_dict()
                state["optimizer"] = self.optimizer.state_dict()
                torch.save(state, path)
        """,
    ),
    Case(
        """
        import torch

        def save(path, model, optimizer):
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)

        def train(model, batches):
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            scaler = torch.amp.GradScaler("cuda")
            for batch in batches:
                optimizer.zero_grad()
                scaler.scale(model(batch)).backward()
                scaler.step(optimizer)
                scaler.update()
            save("last.pt", model, optimizer)
        """,
        note="The function that saves is not given the scaler.",
    ),
    Case(
        """
        import torch

        class Trainer:
            def __init__(self, net):
                self.net = net
                self.opt = torch.optim.SGD(net.parameters(), 0.1)
                self.scaler = torch.amp.GradScaler("cuda")

            def state(self):
                return {"net": self.net.state_dict(), "opt": self.opt.state_dict()}

            def save(self, path):
                torch.save(self.state(), path)

            def step(self, batch):
                self.scaler.scale(self.net(batch)).backward()
                self.scaler.step(self.opt)
                self.scaler.update()
        """,
        """
        import torch

        class Trainer:
            def __init__(self, net):
                self.net = net
                self.opt = torch.optim.SGD(net.parameters(), 0.1)
                self.scaler = torch.amp.GradScaler("cuda")

            def state(self):
                return {"net": self.net.state_dict(), "opt": self.opt.state_dict(), "scaler": self.scaler.state_dict()}

            def save(self, path):
                torch.save(self.state(), path)

            def step(self, batch):
                self.scaler.scale(self.net(batch)).backward()
                self.scaler.step(self.opt)
                self.scaler.update()
        """,
        unsafe=True,
        count=1,
    ),
    Case(
        """
        import torch

        def save(path, model, optimizer, grad_scaler):
            print("scale", grad_scaler.get_scale())
            state = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
            }
            torch.save(state, path)

        def train(model, batches):
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            scaler = torch.amp.GradScaler("cuda")
            for batch in batches:
                optimizer.zero_grad()
                scaler.scale(model(batch)).backward()
                scaler.step(optimizer)
                scaler.update()
            save("last.pt", model, optimizer, scaler)
        """,
        """
        import torch

        def save(path, model, optimizer, grad_scaler):
            print("scale", grad_scaler.get_scale())
            state = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "scaler": grad_scaler.state_dict(),
            }
            torch.save(state, path)

        def train(model, batches):
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            scaler = torch.amp.GradScaler("cuda")
            for batch in batches:
                optimizer.zero_grad()
                scaler.scale(model(batch)).backward()
                scaler.step(optimizer)
                scaler.update()
            save("last.pt", model, optimizer, scaler)
        """,
        unsafe=True,
        count=1,
        note="The function that saves is given the scaler, and does not save it.",
    ),
    Case(
        """
        import torch

        def states(model, optimizer):
            return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

        def train(model, batches):
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            scaler = torch.amp.GradScaler("cuda")
            for batch in batches:
                optimizer.zero_grad()
                scaler.scale(model(batch)).backward()
                scaler.step(optimizer)
                scaler.update()
            torch.save(states(model, optimizer), "last.pt")
        """,
        count=1,
        note="The function that makes the dictionary does not know the scaler.",
    ),
)
