"""A tar file of images as a stream: nothing held, broken members skipped, and each sample seen once.

An `IterableDataset` is copied into each worker of each rank, and each copy streams the whole file. So
samples come as often as there are copies, until every copy keeps only its share.
"""

from __future__ import annotations

import io
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from showing import mixed, plain, say, table
from sklearn.datasets import load_sample_image
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

Sample = tuple[str, Tensor]


def write_tar(path: Path, count: int, broken: int | None = None) -> None:
    """Tiles of a photograph, `0000.png` and so on; the one with the number `broken` is no image."""
    photograph = load_sample_image("flower.jpg")
    with tarfile.open(path, "w") as tar:
        for number in range(count):
            file = io.BytesIO()
            row, column = 16 * (number // 30), 16 * (number % 30)
            Image.fromarray(photograph[row : row + 16, column : column + 16]).save(file, "png")
            content = b"no image" if number == broken else file.getvalue()
            member = tarfile.TarInfo(f"{number:04}.png")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


class TarStream(IterableDataset[Sample]):
    """Names and 8-bit images, (3, height, width), of a tar file, from front to back.

    Args:
        path: the file.
        rank: which of the processes that train this one is.
        ranks: how many there are: `get_world_size()` of `torch.distributed`.
        shard: whether each worker of each rank has a share of its own, or all have all.
    """

    def __init__(self, path: Path, rank: int = 0, ranks: int = 1, shard: bool = True) -> None:
        self.path, self.rank, self.ranks, self.shard = path, rank, ranks, shard

    def __iter__(self) -> Iterator[Sample]:
        share, shares = self._share() if self.shard else (0, 1)
        with tarfile.open(self.path, "r|") as tar:
            for number, member in enumerate(members(tar)):
                if number % shares == share and (image := read(tar, member)) is not None:
                    yield member.name, image

    def _share(self) -> tuple[int, int]:
        """This copy's number, and how many copies there are: workers times ranks."""
        worker = get_worker_info()
        workers, own = (worker.num_workers, worker.id) if worker else (1, 0)
        return self.rank * workers + own, self.ranks * workers


def members(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """The files of an open tar file. It keeps a list of all it has seen: emptied, memory stays flat."""
    while (member := tar.next()) is not None:
        tar.members.clear()  # type: ignore[attr-defined]
        if member.isfile():
            yield member


def read(tar: tarfile.TarFile, member: tarfile.TarInfo) -> Tensor | None:
    """One image, or None after a message."""
    file = tar.extractfile(member)
    assert file is not None  # of a file, there is one
    try:
        with Image.open(io.BytesIO(file.read())) as image:
            pixels = np.array(image.convert("RGB"))
    except (UnidentifiedImageError, OSError, SyntaxError) as error:  # what Pillow raises
        print(f"skipped {member.name}: {type(error).__name__}", file=sys.stderr)
        return None
    return torch.from_numpy(pixels).permute(2, 0, 1)


def times_seen(path: Path, ranks: int, workers: int, shard: bool) -> Counter[str]:
    """How often each sample comes in one epoch of all ranks together."""
    seen: Counter[str] = Counter()
    for rank in range(ranks):
        stream = TarStream(path, rank, ranks, shard)
        for names, _ in DataLoader(stream, batch_size=8, num_workers=workers):
            seen.update(names)
    return seen


def main() -> None:
    """Prints how often samples come, with and without shares, and a model's features of the stream."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "tiles.tar")
        write_tar(path, 40)
        rows = []
        for ranks, workers in ((1, 0), (1, 2), (2, 2)):
            counts = [times_seen(path, ranks, workers, shard) for shard in (False, True)]
            rows.append((f"{ranks} x {workers}", *(sorted(set(c.values())) for c in counts)))
        table(("ranks x workers", "times each came", "with a share each"), *rows)
        write_tar(path, 40, broken=7)
        images = torch.stack([image for _, image in TarStream(path)])
    print(f"one member of 40 was no image: {len(images)} images came\n")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 64, 3), nn.ReLU())
    layers = []
    for name, region in (("float32", plain), ("bfloat16 region", mixed)):
        with torch.no_grad(), region():
            features = model(images.float() / 255)
        layers.append((name, images.nbytes / 1024, features.dtype, features.nbytes / 1024))
    table(("the batch through a layer, in", "KiB loaded", "features", "KiB"), *layers)
    say("What is loaded is the same for both: a region halves what the model makes of it.")


if __name__ == "__main__":
    main()
