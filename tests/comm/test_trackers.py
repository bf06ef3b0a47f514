"""Trackers of experiments record on rank 0 alone; `make test-libraries` runs MLflow itself in two processes."""
import os
import types

from theano_mgpu.comm import trackers
from theano_mgpu.utils import mpi_environment

import pytest


@pytest.mark.parametrize('rank', [0, 1])
def test_ranks_record_one_run(rank, monkeypatch):
    """Each rank recorded a run of its own."""
    named = []
    tracking = types.SimpleNamespace(set_tracking_uri=named.append)
    mlflow = types.SimpleNamespace(set_tracking_uri=named.append, tracking=tracking)
    monkeypatch.setattr(mpi_environment, 'trains_together', lambda: True)
    monkeypatch.setattr(mpi_environment, 'rank', lambda: rank)
    for name, value in ('WANDB_MODE', 'online'), ('NEPTUNE_MODE', 'sync'), ('MLFLOW_RUN_ID', '7'):
        monkeypatch.setenv(name, value)
    trackers.silence_trackers()
    trackers.record_elsewhere(mlflow)
    mlflow.set_tracking_uri('http://server')
    tracking.set_tracking_uri('http://server')
    if rank:
        folder, = named
        assert folder.startswith('file:') and os.path.isdir(folder[5:]) and 'MLFLOW_RUN_ID' not in os.environ
        assert (os.environ['WANDB_MODE'], os.environ['NEPTUNE_MODE']) == ('disabled', 'debug')
    else:
        assert named == ['http://server'] * 2 and os.environ['WANDB_MODE'] == 'online'
