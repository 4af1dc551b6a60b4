"""The exception tree: every error that precast raises on purpose is a `PrecastError`.

    PrecastError
    ├── PolicyError (ValueError)          a policy file or table that cannot be read, or says something impossible
    ├── RegionError (ValueError, RuntimeError)  an autocast region asked for something that cannot be
    │   └── RegionTypeError (TypeError)   an argument is missing or of the wrong type
    ├── BannedOperationError (RuntimeError)  an operation that the policy refuses inside a region
    ├── AttachError (TypeError, ValueError)  `attach` was given what it cannot attach to
    ├── ConversionError (ValueError, RuntimeError)  a model that cannot be converted, or a use of a converted
    │                                     model whose results would not be those of its policy
    ├── ExportError (RuntimeError, ValueError)  a model that cannot be exported, or a file that is no exported program
    ├── StaleWeightError (RuntimeError)   a held weight was written without a trace, so its copy is out of date
    ├── ScalerError (RuntimeError, ValueError, AssertionError)  a gradient scaler used wrongly
    │   └── BrokenModelError              gradients stay infinite or NaN; `diagnosis` says what was seen
    ├── MonitorError (TypeError, ValueError)  `monitor` was given what it cannot watch, or impossible settings
    ├── TuningError (TypeError, ValueError)  `tune` was given what it cannot train copies of
    ├── ComparisonError (ValueError)      a recording that cannot be read, or two runs that cannot be compared
    ├── ReportError (ValueError)          a document that no report can be made of; says what is wrong where
    ├── BuildError (RuntimeError)         the library of the native engine could not be compiled
    ├── OutputError (OSError)             a result that could not be written; what was there before still is
    ├── MissingExtraError (ImportError)   an optional package is not installed; says what to install
    └── TorchVersionError (ImportError)   the installed PyTorch is older than precast can run on

    PrecastWarning (UserWarning)          something will not do what was probably meant

Each message says what was asked, what is allowed and what to do.
"""

from __future__ import annotations

import errno
from typing import Final

__all__ = [
    "AttachError",
    "BannedOperationError",
    "BrokenModelError",
    "BuildError",
    "ComparisonError",
    "ConversionError",
    "ExportError",
    "MissingExtraError",
    "MonitorError",
    "OutputError",
    "PolicyError",
    "PrecastError",
    "PrecastWarning",
    "RegionError",
    "RegionTypeError",
    "ReportError",
    "ScalerError",
    "StaleWeightError",
    "TorchVersionError",
    "TuningError",
]


class PrecastError(Exception):
    """Base of all errors that precast raises on purpose."""


class PolicyError(PrecastError, ValueError):
    """A policy that cannot be read or that says something impossible."""


class RegionError(PrecastError, ValueError, RuntimeError):
    """An autocast region that asks for what the device or PyTorch cannot do.

    Both a `ValueError` and a `RuntimeError`: PyTorch raises one or the other, and programs catch either.
    """


class RegionTypeError(RegionError, TypeError):
    """An autocast region with an argument missing or of the wrong type."""


class BannedOperationError(PrecastError, RuntimeError):
    """An operation that the policy in force refuses inside a region."""


class AttachError(PrecastError, TypeError, ValueError):
    """`attach` was given something that it cannot attach to."""


class ConversionError(PrecastError, ValueError, RuntimeError):
    """A model cannot be converted, and nothing has changed; or a converted model was used in a way it was not made for.

    The message names the weight, module or file, and what to do. It is no `TypeError`: operators of tensors turn these
    into other errors.
    """


class ExportError(PrecastError, RuntimeError, ValueError):
    """A model that cannot be exported under a policy, or a file that no exported program can be read from."""


class StaleWeightError(PrecastError, RuntimeError):
    """A held weight was written in a way that no version counter sees; the message names it and the remedy."""


class MonitorError(PrecastError, TypeError, ValueError):
    """`monitor` was given something that it cannot watch, or a setting that is impossible."""


class TuningError(PrecastError, TypeError, ValueError):
    """`tune` was given a model, a step or batches that it cannot train copies of; the message says what it needs."""


class ScalerError(PrecastError, RuntimeError, ValueError, AssertionError):
    """A gradient scaler used in the wrong order or on tensors that it cannot handle.

    A `RuntimeError`, a `ValueError` and an `AssertionError`: PyTorch raises one of them, and programs catch any.
    """


class BrokenModelError(ScalerError):
    """Gradients stay infinite or NaN, and neither a lower scale nor the next batch has helped.

    The steps that were skipped changed no parameter.

    Attributes:
        diagnosis: the `precast.events.ScalerDiagnosis`: reason, step, scale, names.
    """

    def __init__(self, message: str, diagnosis: object = None) -> None:
        super().__init__(message)
        self.diagnosis = diagnosis

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.args[0], self.diagnosis)


class ComparisonError(PrecastError, ValueError):
    """A recording that cannot be made or read, or two runs that cannot be compared; the message says what to do."""


class ReportError(PrecastError, ValueError):
    """A document that is not as the schema says, or documents that are not of one run."""


class BuildError(PrecastError, RuntimeError):
    """The library of the native engine could not be compiled; the message says why in one line."""


class OutputError(PrecastError, OSError):
    """A result could not be written; made as an `OSError` is: its number, the reason, the file.

    What was at the file's path before is unchanged.
    """

    remedy = ""
    """What the user can do; where it is empty, what the number of the error asks for."""

    def __str__(self) -> str:
        remedy = self.remedy or _REMEDIES.get(self.errno or 0, _ANY_REMEDY)
        return (
            f"cannot write {self.filename}: {self.strerror}; what was there before is unchanged. "
            f"{remedy}"
        )


_WRITABLE: Final = "Name a file in a folder that you may write to"
_ROOM: Final = "Free some space, or name a file on another disk"
_OTHER_FILE: Final = "Name another file, or move that one away"
_ANY_REMEDY: Final = "Free some space, or name a file in a folder that you may write to"
_REMEDIES: Final = {
    errno.EACCES: _WRITABLE,
    errno.EPERM: _WRITABLE,
    errno.EROFS: _WRITABLE,
    errno.ENOSPC: _ROOM,
    errno.EDQUOT: _ROOM,
    errno.EEXIST: _OTHER_FILE,
    errno.EISDIR: "Name a file in it, or another place",
    errno.ENOENT: "Make the folder, or name a file in one that is there",
    errno.ENOTDIR: "Name a file in a folder",
    errno.ENODEV: "Name a file in a folder",
}
"""What a user can do about the number of an error."""


class MissingExtraError(PrecastError, ImportError):
    """An optional package is missing; the message names the extra to install."""


class TorchVersionError(PrecastError, ImportError):
    """The installed PyTorch is older than precast can run on; the message names both and the way out."""


class PrecastWarning(UserWarning):
    """Something that will not do what was probably meant."""
