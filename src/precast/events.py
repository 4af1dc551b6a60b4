"""Types that programs seldom write: events that observers receive, and the records in traces, scalers and conversions.

Nothing here needs PyTorch.
"""

from precast._internal.events import (
    BrokenState,
    Counters,
    HealthEvent,
    NonfiniteOrigin,
    OperationNote,
    ScalerDiagnosis,
    StepEvent,
    TensorRange,
)
from precast.comparison.difference import Cause, GrowthPoint, StepDistance, TokenDistance
from precast.report.saved_trace import (
    ChangedOperation,
    Explanation,
    LineageStep,
    SavedTrace,
    TraceDifference,
)
from precast.report.schema import (
    CastFlow,
    Finding,
    FindingCost,
    FindingLocation,
    ModuleRuleEffects,
    OperationRow,
    RuleCount,
    TracedModule,
    TraceTotals,
)
from precast.shipping.conversion import StoredAs

__all__ = [
    "BrokenState",
    "CastFlow",
    "Cause",
    "ChangedOperation",
    "Counters",
    "Explanation",
    "Finding",
    "FindingCost",
    "FindingLocation",
    "GrowthPoint",
    "HealthEvent",
    "LineageStep",
    "ModuleRuleEffects",
    "NonfiniteOrigin",
    "OperationNote",
    "OperationRow",
    "RuleCount",
    "SavedTrace",
    "ScalerDiagnosis",
    "StepDistance",
    "StepEvent",
    "StoredAs",
    "TensorRange",
    "TokenDistance",
    "TraceDifference",
    "TraceTotals",
    "TracedModule",
]
