"""The tests of slow files that a run of CI makes: one of a few, other ones in each run."""

from __future__ import annotations

import random

__all__ = ["SLOW_FILES", "is_drawn"]

SLOW_FILES = frozenset(
    f"tests/{name}.py"
    for name in (
        "attachment/test_threads",
        "attack/test_attack",
        "browser/test_report",
        "browser/test_site",
        "cli/test_cli",
        "cli/test_export_command",
        "conformance/test_attention",
        "conformance/test_compile",
        "conformance/test_compiler_cache",
        "conformance/test_custom_operations",
        "conformance/test_fake_devices",
        "demo/test_demo",
        "comparison/test_batches",
        "comparison/test_planted",
        "comparison/test_ranks",
        "comparison/test_recordings",
        "comparison/test_worked_examples",
        "diagnostics/explain/test_explain",
        "diagnostics/numerics/test_plantings",
        "diagnostics/test_watching",
        "diagnostics/tracing/test_systems",
        "engine/test_first_use",
        "engine/test_native_library",
        "float8/test_shipping",
        "grad_scaler/test_recovery",
        "grad_scaler/test_states",
        "lint/test_mutation",
        "optim/test_sharded",
        "policy/test_lean_preset",
        "policy/test_tables",
        "processes/test_processes",
        "project/test_benchmarks",
        "project/test_benchmarks_float8",
        "project/test_examples_serve",
        "report/test_between",
        "report/test_true",
        "running/test_ends",
        "running/test_run",
        "running/test_run_training",
        "running/trial/test_command",
        "running/trial/test_programs",
        "shipping/test_exported",
        "shipping/test_exported_elsewhere",
        "shipping/test_exported_programs",
        "tuning/test_sensitivity",
        "tuning/test_tuner",
    )
)
"""Files that start programs, compile or train: two thirds of the time of all tests."""


def is_drawn(test: str, seed: int, share: int) -> bool:
    """Return True if a run with this seed makes a test of a slow file; one of `share` is made."""
    return random.Random(f"{seed} {test}").randrange(share) == 0
