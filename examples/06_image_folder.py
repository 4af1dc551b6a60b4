"""A folder of images as a dataset: broken files are skipped with a message, and pixels stay 8-bit until the end.

The images are tiles of two photographs that come with scikit-learn; their folders are their classes.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from showing import Region, mixed, plain, say, table
from sklearn.datasets import load_sample_image
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, default_collate

UNREADABLE = (UnidentifiedImageError, OSError, SyntaxError)  # what Pillow raises
TILE, PHOTOGRAPHS = 32, ("china.jpg", "flower.jpg")
Sample = tuple[Tensor, int]


def write_tiles(folder: Path, stride: int = 64) -> int:
    """Cuts the photographs into tiles, one folder for each; returns how many there are."""
    count = 0
    for name in PHOTOGRAPHS:
        photograph = load_sample_image(name)
        (folder / Path(name).stem).mkdir()
        for row in range(0, photograph.shape[0] - TILE, stride):
            for column in range(0, photograph.shape[1] - TILE, stride):
                tile = photograph[row : row + TILE, column : column + TILE]
                Image.fromarray(tile).save(folder / Path(name).stem / f"{row}_{column}.png")
                count += 1
    return count


class ImageFolder(Dataset[Sample | None]):
    """Images of `folder/class/file.png`, 8-bit, (3, height, width), and numbers of classes.

    A file that is no image is None, after a message, once; `collate` leaves it out.
    """

    def __init__(self, folder: Path) -> None:
        self.classes = sorted(entry.name for entry in folder.iterdir() if entry.is_dir())
        self.files = sorted(folder.glob("*/*.png"))
        self.broken: set[Path] = set()

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Sample | None:
        file = self.files[index]
        try:
            with Image.open(file) as image:
                pixels = np.array(image.convert("RGB"))
        except UNREADABLE as error:
            if file not in self.broken:
                why = type(error).__name__
                print(f"skipped {file.parent.name}/{file.name}: {why}", file=sys.stderr)
            self.broken.add(file)
            return None
        number = self.classes.index(file.parent.name)
        return torch.from_numpy(pixels).permute(2, 0, 1), number


def collate(samples: list[Sample | None]) -> list[Tensor]:
    """A batch of what could be read: images, (batch, 3, height, width), classes, (batch,).

    Where nothing could, the list is empty: `filter(None, loader)` passes over it.
    """
    whole = [sample for sample in samples if sample is not None]
    return default_collate(whole) if whole else []


def train(folder: Path, region: Region, epochs: int = 3) -> tuple[float, Tensor]:
    """The share of tiles that a small network has learnt to name, and its outputs.

    The region is around the model, not around the loop: in this process, and in
    workers that are forked from it, datasets would run inside it too.
    """
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 4, stride=4), nn.ReLU(), nn.Flatten(), nn.Linear(1024, 2)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    dataset = ImageFolder(folder)
    loader = DataLoader(dataset, batch_size=32, shuffle=True, collate_fn=collate)
    for _ in range(epochs):
        for images, classes in filter(None, loader):
            optimizer.zero_grad()
            with region():
                loss = F.cross_entropy(model(images.float() / 255), classes)
            loss.backward()
            optimizer.step()
    images, classes = collate(list(dataset))  # type: ignore[call-overload]
    with torch.no_grad(), region():
        outputs: Tensor = model(images.float() / 255)
    return (outputs.argmax(1) == classes).float().mean().item(), outputs


def largest_error(dtype: torch.dtype) -> float:
    """How far pixel / 255, computed in a dtype, is from the truth, in steps of brightness."""
    pixels = torch.arange(256)
    return ((pixels.to(dtype) / 255).double() * 255 - pixels).abs().max().item()


def main() -> None:
    """Makes the folder, breaks a file, trains, and prints what a batch needs in each dtype."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        count = write_tiles(folder)
        (folder / "china" / "broken.png").write_bytes(b"no image")
        dataset = ImageFolder(folder)
        read = [sample for sample in dataset if sample is not None]  # type: ignore[attr-defined]
        print(f"{count} tiles and a broken file: {len(dataset)} files, {len(read)} images\n")
        rows = [(kind, *train(folder, r)) for kind, r in (("float32", plain), ("bfloat16", mixed))]
        images = torch.stack([image for image, _ in read[:32]])
    table(("trained in", "tiles named", "output"), *((k, f"{a:.1%}", o.dtype) for k, a, o in rows))
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    table(
        ("32 tiles as", "KiB", "error of pixel / 255, in steps of brightness"),
        ("uint8", images.nbytes / 1024, "not divided yet"),
        *((d, images.to(d).nbytes / 1024, largest_error(d)) for d in dtypes),
    )
    say(
        "Keep pixels in 8 bits until they are on the GPU: a quarter of the bytes to move, and "
        "exact. A region rounds what its first layer gets, whoever divided."
    )


if __name__ == "__main__":
    main()
