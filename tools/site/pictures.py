"""Pictures for the site: which there are, and what is said of each; `drawings.py` draws them.

Invariants: a picture is drawn from what a program of `examples/` computes, in a process of its own, once for
light and once for dark pages, and is kept by contents as output is.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path

from tools.site.apart import printed_apart
from tools.site.directives import PageError
from tools.site.programs import Programs

__all__ = ["PICTURES", "STYLES", "TWO_RUNS", "Picture", "Pictures", "file_name"]

STYLES = ("light", "dark")
_DRAWINGS = Path(__file__).with_name("drawings.py")


@dataclass(frozen=True)
class Picture:
    """The texts of a picture in each language: its alternative and its caption."""

    alt: dict[str, str]
    caption: dict[str, str]


TWO_RUNS = {
    "compiled": ("eager and compiled", "即时执行和编译"),
    "upgraded": ("two versions of PyTorch", "两个版本的 PyTorch"),
    "two_processes": ("one process and two", "一个进程和两个"),
    "served": ("trainer and server", "训练程序和服务"),
}
"""The comparisons of `examples/two_runs.py`."""

PICTURES = {
    "07_limits.py": Picture(
        {
            "en": "From the smallest number of each format to its largest, on a scale of powers of two: float32 and "
            "bfloat16 reach from about 2^-149 and 2^-133 to 2^128, float16 from 2^-24 to 2^16, the two of 8 bits less",
            "zh": "以 2 的幂为刻度，各格式从最小数到最大数的范围：float32 和 bfloat16 大约从 2^-149 和 2^-133 "
            "到 2^128，float16 从 2^-24 到 2^16，两种 8 位格式更窄",
        },
        {
            "en": "From the smallest number of each format to its largest, as measured.",
            "zh": "实测的各格式范围：从最小的数到最大的数。",
        },
    ),
    "08_checkerboard.py": Picture(
        {
            "en": "The target, a checkerboard, and what the network has learnt of it in float32 and in a "
            "bfloat16 region; below them the loss of each step: the two curves lie on each other",
            "zh": "目标棋盘图，以及网络在 float32 和 bfloat16 区域中学到的图像；下方是每一步的损失，两条曲线几乎重合",
        },
        {
            "en": "A checkerboard, learnt in float32 and in a bfloat16 region, and the loss of each step.",
            "zh": "分别在 float32 和 bfloat16 区域中学到的棋盘图，以及每一步的损失。",
        },
    ),
    "08_scaler.py": Picture(
        {
            "en": "The loss of each step: in float16 without a scaler it stays where it was, with one it falls as in "
            "float32; beside it the scale, which falls from 2^40 by halves, or is found at once",
            "zh": "每一步的损失：float16 不用梯度缩放时原地不动，用了之后和 float32 一样下降；"
            "旁边是缩放因子：从 2^40 逐次减半，或者一步找到",
        },
        {
            "en": "The loss of each step, and the scale. Without a scaler float16 learns nothing.",
            "zh": "每一步的损失和缩放因子。没有梯度缩放，float16 什么也学不到。",
        },
    ),
    **{
        f"two_runs.py {name}": Picture(
            {
                "en": f"The relative distance of each module's results, from the embedding to the head: {en}",
                "zh": f"从嵌入层到输出头，各模块结果的相对距离：{zh}",
            },
            {
                "en": f"The distance along the modules: {en}.",
                "zh": f"沿各模块的距离：{zh}。",
            },
        )
        for name, (en, zh) in TWO_RUNS.items()
    },
}
"""By the program's file name, and perhaps a part of it."""


class Pictures:
    """The pictures that pages ask for.

    Args:
        programs: what they are drawn from, and where they are kept.
    """

    def __init__(self, programs: Programs) -> None:
        self._programs = programs
        self.drawn: list[Path] = []

    def figure(self, name: str, folder: str, language: str) -> str:
        """The picture of a program as HTML with Markdown in it.

        Args:
            name: the program's file name, and perhaps a part of it.
            folder: where the pictures are, as seen from the page.
            language: `en` or `zh`.

        Raises:
            PageError: there is no picture of it, or it cannot be drawn.
        """
        if name not in PICTURES:
            raise PageError(f"there is no picture of {name!r}; there are {', '.join(PICTURES)}")
        picture = PICTURES[name]
        self._draw(name)
        images = "\n".join(
            f"![{picture.alt[language]}]({folder}/{file_name(name, style)}#only-{style})"
            for style in STYLES
        )
        caption = f"<figcaption>{picture.caption[language]}</figcaption>"
        return f'<figure markdown="span">\n{images}\n{caption}\n</figure>'

    def _draw(self, name: str) -> None:
        folder = self._programs.kept("picture", name, _DRAWINGS.read_text(encoding="utf-8"))
        paths = [folder / file_name(name, style) for style in STYLES]
        if not all(path.exists() for path in paths):
            printed_apart(f"the picture of {name}", self._programs.root, _draw, name, folder)
        self.drawn += [path for path in paths if path not in self.drawn]


def file_name(program: str, style: str) -> str:
    """The file of a program's picture in a style."""
    name, _, part = program.partition(".py")
    return f"{'-'.join([name, *part.split(), style])}.svg"


def _draw(name: str, folder: Path) -> None:
    drawings = importlib.import_module("tools.site.drawings")  # loads PyTorch and matplotlib
    drawings.draw(name, folder)
