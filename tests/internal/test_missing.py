"""Errors for packages that are not installed."""

from __future__ import annotations

from importlib import metadata

import pytest

from precast._internal.missing import missing_extra


def test_error_names_all_missing_packages_of_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = metadata.distribution

    def without_plotly(name: str) -> metadata.Distribution:
        if name == "plotly":
            raise metadata.PackageNotFoundError(name)
        return installed(name)

    monkeypatch.setattr(metadata, "distribution", without_plotly)
    assert str(missing_extra("The page", "jinja2", "report")) == (
        "The page needs the package jinja2, which is not installed. Install it: pip install jinja2 plotly."
    )


def test_error_names_one_package_where_precast_has_no_metadata(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def requires(name: str) -> list[str]:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", requires)
    assert "pip install jinja2." in str(missing_extra("The page", "jinja2", "report"))
