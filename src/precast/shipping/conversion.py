"""What `convert` did to a model: in which dtype it stored each weight, why, and how many bytes that takes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from precast._internal.display import Card, Displayed, size

__all__ = ["Conversion", "StoredAs"]


class StoredAs(NamedTuple):
    """One weight of a converted model.

    Attributes:
        name: its name; the first one of a tied weight.
        dtype: the dtype that it is stored in: "bfloat16".
        bytes: the memory that it takes.
        bytes_before: what it took before.
        why: why it is stored so.
        low: the 16-bit dtype that the policy uses it in, too, where it stays float32; None where it is not.
    """

    name: str
    dtype: str
    bytes: int
    bytes_before: int
    why: str
    low: str | None = None


@dataclass(frozen=True, repr=False)
class Conversion(Displayed):
    """What became of each weight of a model; `print` shows all of it.

    Attributes:
        model: the name of the model's class.
        policy: the name of the policy.
        dtype: the lower precision of the policy's region: "bfloat16".
        device_type: the device type that it was converted for.
        weights: every parameter and buffer.
    """

    model: str
    policy: str
    dtype: str
    device_type: str
    weights: tuple[StoredAs, ...]

    @property
    def bytes(self) -> int:
        """What all weights take now."""
        return sum(weight.bytes for weight in self.weights)

    @property
    def bytes_before(self) -> int:
        """What all weights took before."""
        return sum(weight.bytes_before for weight in self.weights)

    @property
    def kept(self) -> tuple[StoredAs, ...]:
        """The weights that stay as they were, those that take most memory first."""
        kept = [weight for weight in self.weights if weight.bytes == weight.bytes_before]
        return tuple(sorted(kept, key=lambda weight: -weight.bytes))

    @property
    def extra_bytes(self) -> int:
        """What the policy's float32 costs: so many bytes fewer would be taken with every float32 weight in 16 bits."""
        return sum(weight.bytes // 2 for weight in self.kept if weight.dtype == "float32")

    def _card(self) -> Card:
        stored = size(len(self.weights) - len(self.kept), "weight")
        facts = [
            f"{stored} of {len(self.weights):,} in 16 bits",
            f"{self.bytes:,} bytes of {self.bytes_before:,}",
            f"policy {self.policy!r}, {self.dtype}, on {self.device_type}",
        ]
        rows = [(w.name, w.dtype, w.bytes, w.why) for w in (*self.kept, *self.weights)]
        rows = list(dict.fromkeys(rows))
        return Card(f"Conversion of {self.model}", facts, ("name", "dtype", "bytes", "why"), rows)

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield self._card().text()
        for weight in sorted(self.weights, key=lambda weight: -weight.bytes):
            again = f"; cast to {weight.low} at each use" if weight.low else ""
            yield f"  {weight.name}: {weight.dtype}, {weight.bytes:,} bytes; {weight.why}{again}"
        if self.extra_bytes:
            yield f"  float32 weights cost {self.extra_bytes:,} bytes more than 16-bit ones would"
