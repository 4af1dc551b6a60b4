"""The exception tree: every error that precast raises on purpose is a `PrecastError`.

    PrecastError
    ├── PolicyError (ValueError)          a policy that cannot be read or is invalid
    ├── RegionError (ValueError, RuntimeError)  an autocast region that the device or PyTorch does not support
    │   └── RegionTypeError (TypeError)   an argument is missing or of the wrong type
    ├── BannedOperationError (RuntimeError)  an operation that the policy refuses inside a region
    ├── AttachError (TypeError, ValueError)  a model that `attach` does not support
    ├── ConversionError (ValueError, RuntimeError)  a model that cannot be converted, or a use of a converted
    │                                     model whose results would not be those of its policy
    ├── ExportError (RuntimeError, ValueError)  a model that cannot be exported, or a file that is no exported program
    ├── StaleWeightError (RuntimeError)   a held weight was written undetected, so its copy was stale
    ├── ScalerError (RuntimeError, ValueError, AssertionError)  a gradient scaler used wrongly
    │   └── BrokenModelError              gradients stay infinite or NaN; `diagnosis` has the details
    ├── MonitorError (TypeError, ValueError)  invalid arguments of `monitor`
    ├── TuningError (TypeError, ValueError)  invalid arguments of `tune`
    ├── ComparisonError (ValueError)      a recording that cannot be read, or two runs that cannot be compared
    ├── ReportError (ValueError)          a document from which no report can be made
    ├── BuildError (RuntimeError)         the library of the native engine could not be compiled
    ├── OutputError (OSError)             a file that could not be written; an existing file is unchanged
    ├── MissingExtraError (ImportError)   an optional package is not installed
    └── TorchVersionError (ImportError)   the installed PyTorch is too old

    PrecastWarning (UserWarning)          code that probably does not have the intended effect

Each message names the invalid input, what is allowed, and what to do.
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
    """A policy that cannot be read, or is invalid."""


class RegionError(PrecastError, ValueError, RuntimeError):
    """An autocast region that the device or PyTorch does not support.

    PyTorch raises `ValueError` or `RuntimeError`, and this is a subclass of both.
    """


class RegionTypeError(RegionError, TypeError):
    """An autocast region with an argument missing or of the wrong type."""


class BannedOperationError(PrecastError, RuntimeError):
    """An operation that the policy in force refuses inside a region."""


class AttachError(PrecastError, TypeError, ValueError):
    """A model that `attach` does not support."""


class ConversionError(PrecastError, ValueError, RuntimeError):
    """A model that cannot be converted and has not changed, or an unsupported use of a converted model.

    The message names the weight, module or file, and what to do. It is no `TypeError`, because operators of tensors
    convert these into other errors.
    """


class ExportError(PrecastError, RuntimeError, ValueError):
    """A model that cannot be exported under a policy, or a file that contains no exported program."""


class StaleWeightError(PrecastError, RuntimeError):
    """A held weight was written without a change of its version counter. The message names it, and what to do."""


class MonitorError(PrecastError, TypeError, ValueError):
    """An object that `monitor` cannot watch, or an invalid setting."""


class TuningError(PrecastError, TypeError, ValueError):
    """A model, a step or batches with which `tune` cannot train copies. The message names the requirement."""


class ScalerError(PrecastError, RuntimeError, ValueError, AssertionError):
    """A call of a gradient scaler in the wrong order, or on tensors that it does not support.

    PyTorch raises `RuntimeError`, `ValueError` or `AssertionError`, and this is a subclass of all.
    """


class BrokenModelError(ScalerError):
    """Gradients that stay infinite or NaN with lower scales and other batches.

    The skipped steps have changed no parameter.

    Attributes:
        diagnosis: the `precast.events.ScalerDiagnosis`: reason, step, scale, names.
    """

    def __init__(self, message: str, diagnosis: object = None) -> None:
        super().__init__(message)
        self.diagnosis = diagnosis

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.args[0], self.diagnosis)


class ComparisonError(PrecastError, ValueError):
    """A recording that cannot be made or read, or two runs that cannot be compared."""


class ReportError(PrecastError, ValueError):
    """A document that does not follow the schema, or documents of different runs."""


class BuildError(PrecastError, RuntimeError):
    """The library of the native engine could not be compiled. The message has the reason in one line."""


class OutputError(PrecastError, OSError):
    """A file that could not be written. An existing file at its path is unchanged.

    The arguments are those of `OSError`: error number, reason and file.
    """

    remedy = ""
    """Advice for the user; if empty, the advice for the error number."""

    def __str__(self) -> str:
        remedy = self.remedy or _REMEDIES.get(self.errno or 0, _ANY_REMEDY)
        return f"cannot write {self.filename}: {self.strerror}; an existing file is unchanged. {remedy}"


_WRITABLE: Final = "Name a file in a folder that you may write to"
_ROOM: Final = "Free some space, or name a file on another disk"
_OTHER_FILE: Final = "Name another file, or move the existing one"
_ANY_REMEDY: Final = "Free some space, or name a file in a folder that you may write to"
_REMEDIES: Final = {
    errno.EACCES: _WRITABLE,
    errno.EPERM: _WRITABLE,
    errno.EROFS: _WRITABLE,
    errno.ENOSPC: _ROOM,
    errno.EDQUOT: _ROOM,
    errno.EEXIST: _OTHER_FILE,
    errno.EISDIR: "Name a file in this folder, or another path",
    errno.ENOENT: "Create the folder, or name a file in an existing folder",
    errno.ENOTDIR: "Name a file in a folder",
    errno.ENODEV: "Name a file in a folder",
}
"""The advice for each error number."""


class MissingExtraError(PrecastError, ImportError):
    """An optional package is not installed. The message has the command that installs it."""


class TorchVersionError(PrecastError, ImportError):
    """The installed PyTorch is older than the oldest supported version."""


class PrecastWarning(UserWarning):
    """Code that probably does not have the intended effect."""
