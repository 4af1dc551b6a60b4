"""Chapter 6 of `examples/` is right: broken files, shares of a stream, and what a region reaches."""

from __future__ import annotations

import importlib
import tarfile
from collections import Counter
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_sample_image
from torch.utils.data import DataLoader

FOLDER: ModuleType = importlib.import_module("06_image_folder")
TAR: ModuleType = importlib.import_module("06_tar_stream")


@pytest.fixture
def tiles(tmp_path: Path) -> Path:
    FOLDER.write_tiles(tmp_path, stride=160)
    return tmp_path


def test_a_folder_is_its_images(tiles: Path) -> None:
    dataset = FOLDER.ImageFolder(tiles)
    assert dataset.classes == ["china", "flower"]
    photographs = [load_sample_image(f"{name}.jpg") for name in dataset.classes]
    assert len(dataset) == len(list(tiles.glob("*/*.png"))) > 10
    for index, file in enumerate(dataset.files):
        image, kind = dataset[index]
        row, column = map(int, file.stem.split("_"))
        tile = photographs[kind][row : row + 32, column : column + 32]
        assert image.dtype == torch.uint8
        assert np.array_equal(image.permute(1, 2, 0).numpy(), tile)


@pytest.mark.parametrize("content", [b"", b"no image", "half"], ids=["empty", "text", "cut off"])
def test_broken_files_are_skipped_with_one_message(
    tiles: Path, content: bytes | str, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = next(tiles.glob("*/*.png")).read_bytes()
    broken = tiles / "flower" / "broken.png"
    broken.write_bytes(content if isinstance(content, bytes) else whole[: len(whole) // 2])
    dataset = FOLDER.ImageFolder(tiles)
    for size in (4, 1):  # by ones, the broken file has a batch of its own
        loader = DataLoader(dataset, size, collate_fn=FOLDER.collate)
        assert sum(len(kinds) for _, kinds in filter(None, loader)) == len(dataset) - 1
    assert capsys.readouterr().err.count("skipped flower/broken.png") == 1


# --- the stream ---


@pytest.fixture
def tar_file(tmp_path: Path) -> Path:
    path = tmp_path / "tiles.tar"
    TAR.write_tar(path, 23)
    return path


@pytest.mark.parametrize(("ranks", "workers"), [(1, 0), (1, 2), (2, 2), (3, 0)])
def test_shares_cure_duplicates(tar_file: Path, ranks: int, workers: int) -> None:
    names = [f"{number:04}.png" for number in range(23)]
    copies = ranks * max(workers, 1)
    naive = TAR.times_seen(tar_file, ranks, workers, shard=False)
    assert naive == Counter(dict.fromkeys(names, copies))
    assert TAR.times_seen(tar_file, ranks, workers, shard=True) == Counter(names)


def test_the_images_of_a_stream_are_those_written(tar_file: Path) -> None:
    with tarfile.open(tar_file) as tar:
        for name, image in TAR.TarStream(tar_file):
            with Image.open(tar.extractfile(name)) as expected:
                assert np.array_equal(image.permute(1, 2, 0).numpy(), np.array(expected))
