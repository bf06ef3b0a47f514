"""Processes of PyMC3's chains, and their devices."""
from __future__ import annotations

from typing import Any

from ..compat.wrapping import wrap
from . import leases


def share_devices(parallel_sampling: Any) -> None:
    """Have each process of ``pm.sample(chains=2, cores=2)`` take its share of the devices: two of four, say."""
    @wrap(parallel_sampling.ParallelSampler, '__init__')
    def begin(original, self, draws, tune, chains, *arguments, **options):
        with leases.shared_by(chains):
            original(self, draws, tune, chains, *arguments, **options)
