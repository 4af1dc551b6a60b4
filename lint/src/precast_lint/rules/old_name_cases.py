"""The cases of AMP001 to AMP004 and AMP006, whose rules are the rows of the table in `amp00x_old_names.py`."""

from __future__ import annotations

from precast_lint.model import Case

__all__ = ["INVALID", "VALID"]

VALID: dict[str, tuple[Case, ...]] = {
    "AMP001": (
        Case("""
        import torch

        with torch.autocast("cuda"):
            pass
    """),
        Case(
            """
        try:
            from torch.amp import autocast
        except ImportError:
            from torch.cuda.amp import autocast

        with autocast("cuda"):
            pass
        """,
            note="A fallback is there on purpose.",
        ),
        Case("""
        import torch

        if hasattr(torch, "amp"):
            region = torch.amp.autocast("cuda")
        else:
            region = torch.cuda.amp.autocast()
    """),
        Case(
            """
        from torch.cuda.amp import autocast

        def autocast(*args):
            return args

        autocast()
        """,
            note="The name stands for something else.",
        ),
        Case(
            """
        import torch

        with torch.cuda.amp.autocast():
            pass
        """,
            min_torch="1.10",
            note="PyTorch 1.10 has no `torch.amp`.",
        ),
        Case(
            """
        import torch

        def region():
            if hasattr(torch, "autocast"):
                return torch.autocast("cuda")
            return torch.cuda.amp.autocast()
        """,
            note="What follows a test that returns is its other side.",
        ),
        Case("""
        from mine.torch.cuda.amp import autocast

        autocast()
    """),
        Case("""
        def f(torch):
            return torch.cuda.amp.autocast()
    """),
    ),
    "AMP002": (
        Case("""
        import torch

        with torch.autocast("cpu", dtype=torch.bfloat16):
            pass
    """),
        Case("""
        import torch

        if torch.__version__ >= "1.12":
            region = torch.amp.autocast("cpu")
        else:
            region = torch.cpu.amp.autocast()
    """),
    ),
    "AMP003": (
        Case("""
        import torch

        scaler = torch.amp.GradScaler("cuda")
    """),
        Case(
            """
        import torch

        scaler = torch.cuda.amp.GradScaler()
        """,
            min_torch="2.2",
            note="`torch.amp.GradScaler` is there since PyTorch 2.3.",
        ),
    ),
    "AMP004": (
        Case("""
        import torch

        class Square(torch.autograd.Function):
            @staticmethod
            @torch.amp.custom_fwd(device_type="cuda")
            def forward(ctx, x):
                return x * x
    """),
        Case(
            """
        import torch

        @torch.cuda.amp.custom_fwd
        def forward(ctx, x):
            return x
        """,
            min_torch="2.3",
            note="`torch.amp.custom_fwd` is there since PyTorch 2.4.",
        ),
    ),
    "AMP006": (
        Case(
            """
        import torch

        try:
            from torch.amp import GradScaler
        except Exception:
            GradScaler = torch.cuda.amp.GradScaler
        """,
            note="The fallback of an import, whatever it catches.",
        ),
        Case("""
        import torch

        custom_fwd = getattr(torch.amp, "custom_fwd", None) or torch.cuda.amp.custom_fwd
    """),
        Case("""
        import torch

        def train(scaler: torch.amp.GradScaler) -> None:
            assert isinstance(scaler, torch.amp.GradScaler)
    """),
        Case(
            """
        import torch

        KNOWN = [torch.cuda.amp.GradScaler, torch.amp.GradScaler]
        NAMES = {torch.cuda.amp.autocast: "autocast"}
        old = kind is torch.cuda.amp.autocast
        """,
            note="Code about the old name: what is listed, a key, or compared is meant.",
        ),
    ),
}
INVALID: dict[str, tuple[Case, ...]] = {
    "AMP001": (
        Case(
            """
        import torch

        with torch.cuda.amp.autocast():
            pass
        """,
            """
        import torch

        with torch.amp.autocast("cuda"):
            pass
        """,
        ),
        Case(
            """
        from torch.cuda.amp import autocast

        with autocast(use_amp, torch.bfloat16):
            pass
        """,
            """
        from torch.amp import autocast

        with autocast("cuda", enabled=use_amp, dtype=torch.bfloat16):
            pass
        """,
            note="What was positional is written as keywords: the new name has its parameters in another order.",
        ),
        Case(
            """
        import torch as th
        from torch.cuda import amp

        @amp.autocast(enabled=False)
        def f(x):
            with th.cuda.amp.autocast(  # why
                dtype=th.bfloat16,
            ):
                return x
        """,
            """
        import torch as th
        from torch import amp

        @amp.autocast("cuda", enabled=False)
        def f(x):
            with th.amp.autocast(  # why
                "cuda", dtype=th.bfloat16,
            ):
                return x
        """,
            count=2,
        ),
        Case(
            """
        import torch

        with torch.cuda.amp.autocast(dtype=torch.bfloat16):
            with torch.cuda.amp.autocast():
                pass
        """,
            """
        import torch

        with torch.amp.autocast("cuda", dtype=torch.bfloat16):
            with torch.amp.autocast("cuda", dtype=torch.float16):
                pass
        """,
            count=2,
            note="The old name has a dtype of its own; the new one takes that of the region around.",
        ),
        Case(
            """
        from torch.cuda.amp import GradScaler, autocast

        scaler = GradScaler()
        with autocast(enabled=True):
            pass
        """,
            """
        from torch.amp import autocast
        from torch.cuda.amp import GradScaler

        scaler = GradScaler()
        with autocast("cuda", enabled=True):
            pass
        """,
            min_torch="2.0",
            note="PyTorch 2.0 has no `torch.amp.GradScaler`, so that stays.",
        ),
        Case(
            """
        from torch.cuda.amp import autocast

        def region(*args):
            return autocast(*args)
    """,
            note="What `*args` holds is not known, so there is no fix.",
        ),
        Case(
            """
        import torch.cuda as tc

        with tc.amp.autocast():
            pass
        """,
            """
        import torch
        import torch.cuda as tc

        with torch.amp.autocast("cuda"):
            pass
        """,
        ),
        Case(
            """
        try:
            import torch
            from torch.cuda.amp.autocast_mode import autocast as region
        finally:
            pass

        def f():
            with region(): return 1
        """,
            """
        try:
            import torch
            from torch.amp.autocast_mode import autocast as region
        finally:
            pass

        def f():
            with region("cuda"): return 1
        """,
        ),
    ),
    "AMP002": (
        Case(
            """
        import torch

        with torch.cpu.amp.autocast():
            pass
        """,
            """
        import torch

        with torch.amp.autocast("cpu"):
            pass
        """,
        ),
        Case(
            """
        import torch
        from torch.cpu.amp import autocast

        @autocast(True, dtype=torch.bfloat16)
        def f(x):
            return x
        """,
            """
        import torch
        from torch.amp import autocast

        @autocast("cpu", enabled=True, dtype=torch.bfloat16)
        def f(x):
            return x
        """,
        ),
    ),
    "AMP003": (
        Case(
            """
        import torch

        scaler = torch.cuda.amp.GradScaler(2.0**10, enabled=use_amp)
        """,
            """
        import torch

        scaler = torch.amp.GradScaler("cuda", 2.0**10, enabled=use_amp)
        """,
            note="The device comes first, so that the other arguments stay as they are.",
        ),
        Case(
            """
        from torch.cuda.amp import GradScaler, autocast

        scaler = GradScaler()
        with autocast():
            pass
        """,
            """
        from torch.amp import GradScaler, autocast

        scaler = GradScaler("cuda")
        with autocast("cuda"):
            pass
        """,
            also=("AMP001",),
        ),
        Case(
            """
        from torch.cuda.amp import GradScaler

        print(f"{GradScaler()} {GradScaler(enabled=False)}")
        """,
            """
        from torch.amp import GradScaler

        print(f"{GradScaler('cuda')} {GradScaler('cuda', enabled=False)}")
        """,
            count=2,
        ),
        Case(
            """
        class Trainer:
            def setup(self, **options):
                from torch.cuda.amp import GradScaler as Scaler
                self.scaler = Scaler(**options)
        """,
            """
        class Trainer:
            def setup(self, **options):
                from torch.amp import GradScaler as Scaler
                self.scaler = Scaler("cuda", **options)
        """,
        ),
    ),
    "AMP004": (
        Case(
            """
        import torch
        from torch.cuda.amp import custom_bwd, custom_fwd

        class Square(torch.autograd.Function):
            @staticmethod
            @custom_fwd(cast_inputs=torch.float32)
            def forward(ctx, x):
                return x * x

            @staticmethod
            @custom_bwd
            def backward(ctx, grad):
                return grad
        """,
            """
        import torch
        from torch.amp import custom_bwd, custom_fwd

        class Square(torch.autograd.Function):
            @staticmethod
            @custom_fwd(cast_inputs=torch.float32, device_type="cuda")
            def forward(ctx, x):
                return x * x

            @staticmethod
            @custom_bwd(device_type="cuda")
            def backward(ctx, grad):
                return grad
        """,
            count=2,
        ),
        Case(
            """
        import torch

        forward = torch.cuda.amp.custom_fwd(run)
        """,
            """
        import torch

        forward = torch.amp.custom_fwd(run, device_type="cuda")
        """,
        ),
    ),
    "AMP006": (
        Case(
            """
        import torch

        def train(scaler: torch.cuda.amp.GradScaler | None) -> None:
            assert isinstance(scaler, torch.cuda.amp.GradScaler)
        """,
            """
        import torch

        def train(scaler: torch.amp.GradScaler | None) -> None:
            assert isinstance(scaler, torch.amp.GradScaler)
        """,
            count=2,
        ),
        Case(
            """
        from torch.cuda import amp

        type Maybe = amp.GradScaler | None

        def make[S: amp.GradScaler](kind: type[S]) -> S:
            return kind()
        """,
            """
        from torch import amp

        type Maybe = amp.GradScaler | None

        def make[S: amp.GradScaler](kind: type[S]) -> S:
            return kind()
        """,
            count=2,
        ),
        Case(
            """
        from functools import partial
        from torch.cuda.amp import autocast

        region = partial(autocast, enabled=False)
        """,
            """
        from functools import partial
        from torch.amp import autocast

        region = partial(autocast, "cuda", enabled=False)
        """,
        ),
        Case(
            """
        import torch

        region = torch.cuda.amp.autocast

        def f(x):
            with region(False):
                return x
        """,
            """
        import torch

        region = torch.amp.autocast

        def f(x):
            with region("cuda", enabled=False):
                return x
        """,
            also=("AMP001",),
            unsafe=True,
            count=1,
            note="Other files may call an alias of a module in the old way, so the fix is unsafe.",
        ),
        Case(
            """
        from torch.cuda import amp

        old = amp
        KINDS = {"scaler": amp.GradScaler, "region": old.autocast}
        """,
            """
        import functools
        from torch import amp

        old = amp
        KINDS = {"scaler": functools.partial(amp.GradScaler, "cuda"), "region": functools.partial(old.autocast, "cuda")}
        """,
            unsafe=True,
            count=2,
            note="Who calls what the table holds goes on calling it as before, if by keywords.",
        ),
        Case("""
        from torch.cuda.amp import GradScaler

        Scaler = GradScaler

        class Mine(Scaler):
            pass
    """),
        Case(
            """
        import torch

        class Scaler(torch.cuda.amp.GradScaler):
            pass
        """,
            note="The new class has another signature: what the subclass hands on has to be read by a person.",
        ),
        Case(
            """
        import torch

        try:
            autocast = torch.cuda.amp.autocast
            has_amp = torch.cuda.is_available()
        except:
            class autocast:
                def __init__(self, enabled):
                    pass

        with autocast(enabled=True):
            pass
        """,
            """
        import functools
        import torch

        try:
            autocast = functools.partial(torch.amp.autocast, "cuda")
            has_amp = torch.cuda.is_available()
        except:
            class autocast:
                def __init__(self, enabled):
                    pass

        with autocast(enabled=True):
            pass
        """,
            unsafe=True,
            note="The name has another value too: its calls stay as they are.",
        ),
    ),
}
