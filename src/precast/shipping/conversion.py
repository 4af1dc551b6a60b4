"""The report of `convert`: the dtype in which each weight is stored, the reason, and the bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from precast._internal.display import Card, Displayed, plural

__all__ = ["Conversion", "StoredAs"]


class StoredAs(NamedTuple):
    """One weight of a converted model.

    Attributes:
        name: its name; the first one of a tied weight.
        dtype: the dtype that it is stored in: "bfloat16".
        bytes: its memory.
        bytes_before: its memory before the conversion.
        why: the reason for the dtype.
        low: the 16-bit dtype that a float32 weight is cast to at some uses; None if there is none.
    """

    name: str
    dtype: str
    bytes: int
    bytes_before: int
    why: str
    low: str | None = None


@dataclass(frozen=True, repr=False)
class Conversion(Displayed):
    """The report of a converted model, with an entry for each weight; `print` shows all of it.

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
        """The memory of all weights."""
        return sum(weight.bytes for weight in self.weights)

    @property
    def bytes_before(self) -> int:
        """The memory of all weights before the conversion."""
        return sum(weight.bytes_before for weight in self.weights)

    @property
    def kept(self) -> tuple[StoredAs, ...]:
        """The weights that do not take fewer bytes than before, largest first."""
        same = [weight for weight in self.weights if weight.bytes >= weight.bytes_before]
        return tuple(sorted(same, key=lambda weight: -weight.bytes))

    @property
    def extra_bytes(self) -> int:
        """The bytes that would be saved if every float32 weight were stored in 16 bits."""
        return sum(weight.bytes // 2 for weight in self.kept if weight.dtype == "float32")

    def _card(self) -> Card:
        stored = plural(len(self.weights) - len(self.kept), "weight")
        facts = [
            f"{stored} of {len(self.weights):,} in 16 bits",
            f"{self.bytes:,} bytes of {self.bytes_before:,}",
            f"policy {self.policy!r}, {self.dtype}, on {self.device_type}",
        ]
        in_order = dict.fromkeys((*self.kept, *self.weights))
        rows = [(w.name, w.dtype, w.bytes, w.why) for w in in_order]
        return Card(f"Conversion of {self.model}", facts, ("name", "dtype", "bytes", "why"), rows)

    def __str__(self) -> str:
        lines = [self._card().text()]
        for weight in sorted(self.weights, key=lambda weight: -weight.bytes):
            cast_note = f"; cast to {weight.low} at each use" if weight.low else ""
            lines.append(
                f"  {weight.name}: {weight.dtype}, {weight.bytes:,} bytes; {weight.why}{cast_note}"
            )
        if self.extra_bytes:
            extra = f"  float32 weights cost {self.extra_bytes:,} bytes more than 16-bit ones would"
            lines.append(extra)
        return "\n".join(lines)
