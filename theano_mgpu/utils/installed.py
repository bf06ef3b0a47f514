"""The versions of installed distributions."""
from __future__ import annotations

from importlib import metadata


def installed(name: str) -> str | None:
    """Return the version of a distribution; None if it is not installed."""
    return next((each.version for each in metadata.distributions(name=name)), None)
