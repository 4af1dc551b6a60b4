"""The cases of AMP503: data sets that each worker of a loader reads whole, or shares."""

from __future__ import annotations

from precast_lint.model import Case

__all__ = ["INVALID", "VALID"]

VALID = (
    Case("""
        from elsewhere import Mixin
        from torch.utils.data import DataLoader, IterableDataset

        class Base(IterableDataset):
            def files(self):
                return self.all_files[self.worker :: self.workers]

        class Lines(Base):
            def __iter__(self):
                for file in self.files():
                    yield from open(file)

        class Mixed(Mixin, IterableDataset):
            def __iter__(self):
                yield from open(self.path)

        loaders = DataLoader(Lines(), num_workers=4), DataLoader(Mixed(), num_workers=4)
    """),
    Case(
        """
        import random
        from torch.utils.data import DataLoader, IterableDataset

        class Lines(IterableDataset):
            def __init__(self, lines):
                self.lines = lines

            def __iter__(self):
                yield from self.lines

        class Drawn(IterableDataset):
            def __init__(self, rows, seed):
                self.rows, self.rng = rows, random.Random(seed)

            def __iter__(self):
                for _ in range(1000):
                    yield self.rows[self.rng.randrange(len(self.rows))]

        class Some(IterableDataset):
            def __init__(self, rows):
                self.rows = rows

            def __iter__(self):
                rng = random.Random(0)
                for row in self.rows:
                    if rng.random() < 0.1:
                        yield row

        options = dict(batch_size=8, num_workers=4)
        if shared:
            options["worker_init_fn"] = share
        first = DataLoader(Lines(lines), **options)
        second = DataLoader(Drawn(rows, 0), num_workers=2)
        third = DataLoader(Some(rows), num_workers=2)
        """,
        note="A table that may say more, and data that are drawn by chance.",
    ),
    Case(
        """
        import random
        from torch.utils.data import DataLoader, IterableDataset

        class Counted(IterableDataset):
            def __init__(self, files, shard, shards):
                self.files, self.shard, self.shards = files, shard, shards

            def __iter__(self):
                for i, file in enumerate(self.files):
                    if i % self.shards == self.shard:
                        yield from open(file)

        class Picked(IterableDataset):
            def __iter__(self):
                for shard in my_part(self.shards):
                    yield from open(shard)

        class Sliced(IterableDataset):
            def __iter__(self):
                for shard in self.shards[self.first :: self.count]:
                    yield from open(shard)

        class Renamed(IterableDataset):
            def __init__(self, files, first, count):
                self.files, self.first, self.count = files, first, count

            def __iter__(self):
                files = list(self.files)
                for file in files[self.first :: self.count]:
                    yield from open(file)

        class Chosen(IterableDataset):
            def __iter__(self):
                rows = []
                for shard in self.shards:
                    rows.append(shard)
                for _ in range(100):
                    yield rows[random.randrange(len(rows))]

        class Made(IterableDataset):
            def __init__(self, seed):
                self.seed = seed

            def __iter__(self):
                yield from make(self.seed)

        class Drawn(IterableDataset):
            def __iter__(self):
                rows = []
                for shard in self.shards:
                    rows.append(shard)
                while True:
                    yield rows[random.randrange(len(rows))]

        loaders = [
            DataLoader(Counted(files, 0, 2), num_workers=4),
            DataLoader(Picked(), num_workers=4),
            DataLoader(Sliced(), num_workers=4),
            DataLoader(Renamed(files, 0, 2), num_workers=4),
            DataLoader(Chosen(), num_workers=4),
            DataLoader(Made(0), num_workers=4),
            DataLoader(Drawn(), num_workers=4),
        ]
        """,
        note="A part is picked, or what comes next is drawn by chance.",
    ),
    Case("""
        from torch.utils.data import DataLoader, IterableDataset, get_worker_info

        class Lines(IterableDataset):
            def __init__(self, lines):
                self.lines = lines

            def __iter__(self):
                info = get_worker_info()
                yield from self.lines[info.id :: info.num_workers] if info else self.lines

        loader = DataLoader(Lines(lines), num_workers=4)
    """),
    Case(
        """
        from torch.utils.data import DataLoader, IterableDataset

        class Lines(IterableDataset):
            def __init__(self, lines):
                self.lines = lines

            def __iter__(self):
                yield from self.lines

        loader = DataLoader(Lines(lines))
        loader = DataLoader(Lines(lines), num_workers=0)
        loader = DataLoader(Lines(lines), num_workers=4, worker_init_fn=share)
        """,
        note="Without workers, or they share the work when they start.",
    ),
    Case("""
        import torch
        from torch.utils.data import DataLoader, IterableDataset

        class Noise(IterableDataset):
            def __iter__(self):
                while True:
                    yield torch.randn(3)

        loader = DataLoader(Noise(), num_workers=4)
    """),
    Case("""
        from torch.utils.data import DataLoader, Dataset

        class Lines(Dataset):
            def __getitem__(self, i):
                return self.lines[i]

        loader = DataLoader(Lines(), num_workers=4)
    """),
)

INVALID = (
    Case("""
        import random
        from torch.utils.data import DataLoader, IterableDataset

        class Lines(IterableDataset):
            def __init__(self, lines):
                self.lines = lines

            def __iter__(self):
                random.shuffle(self.lines)
                yield from self.lines

        loader = DataLoader(Lines(lines), num_workers=4)
    """),
    Case(
        """
        from torch.utils.data import DataLoader, IterableDataset

        class Base(IterableDataset[str]):
            def __init__(self, path):
                self.path = path

        class Lines(Base):
            def __iter__(self):
                yield from open(self.path)

        loader = DataLoader(Lines(path), num_workers=4)
        """,
        count=1,
    ),
    Case(
        """
        import random
        import torch
        from torch.utils.data import DataLoader, IterableDataset

        class Files(IterableDataset):
            def __init__(self, files, seed=0):
                self.files, self.seed, self.epoch = files, seed, 0

            def __iter__(self):
                rng = random.Random(self.seed + self.epoch)
                files = list(self.files)
                rng.shuffle(files)
                for file in files:
                    yield from open(file)

        class Buffered(IterableDataset):
            def __init__(self, file, seed):
                self.file = file
                self.rng = random.Random(seed)
                self.rng.seed(seed)

            def __iter__(self):
                buffer = []
                for line in open(self.file):
                    buffer.append(line)
                    if len(buffer) > 100:
                        yield buffer.pop(self.rng.randrange(len(buffer)))
                self.rng.shuffle(buffer)
                yield from buffer

        class Ordered(IterableDataset):
            def __init__(self, rows, seed):
                self.rows, self.seed = rows, seed

            def __iter__(self):
                g = torch.Generator()
                g.manual_seed(self.seed)
                for i in torch.randperm(len(self.rows), generator=g).tolist():
                    yield self.rows[i]

        options = dict(batch_size=8, num_workers=4)
        options["pin_memory"] = True
        first = DataLoader(Files(files), **options)
        second = DataLoader(Buffered(file, 0), **{"num_workers": 2})
        third = DataLoader(Ordered(rows, 0), num_workers=2)
        """,
        count=3,
        note="Options in a table; a generator that only says in which order they come.",
    ),
    Case(
        """
        from torch.utils.data import DataLoader, IterableDataset

        class Lines(IterableDataset):
            def __init__(self, lines):
                self.lines = lines

            def __iter__(self):
                yield from self.lines

        dataset = Lines(lines)
        loader = DataLoader(dataset, batch_size=8, num_workers=4)
        """,
        count=1,
    ),
    Case(
        """
        import os
        from torch.utils.data import DataLoader, IterableDataset

        class Rows(IterableDataset):
            def __init__(self, files):
                self.files = files

            def __iter__(self):
                for file in self.files:
                    for line in open(file):
                        yield line.split(",")

        def make(files, workers=8):
            first = DataLoader(Rows(files), num_workers=os.cpu_count() // 2)
            return first, DataLoader(dataset=Rows(files), num_workers=min(workers, os.cpu_count()))
        """,
        count=2,
    ),
    Case(
        """
        import gzip
        import random
        from torch.utils.data import DataLoader, IterableDataset

        class Lines(IterableDataset):
            def __init__(self, shards, seed):
                self.shards = sorted(shards)
                self.buffer, self.seed = 512, seed

            def __iter__(self):
                shards = list(self.shards)
                random.Random(self.seed).shuffle(shards)
                waiting = []
                for shard in shards:
                    with gzip.open(shard, "rt") as lines:
                        for line in lines:
                            if len(waiting) < self.buffer:
                                waiting.append(line)
                                continue
                            i = random.randrange(len(waiting))
                            yield waiting[i]
                            waiting[i] = line
                yield from waiting

        loader = DataLoader(Lines(files, 0), num_workers=4)
        """,
        count=1,
        note="That the files are called shards, and their lines come in another order, shares nothing.",
    ),
)
