"""Trackers of experiments, such as MLflow: rank 0 alone records, or each rank of a job would record a run of its own.
"""
from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from typing import Any

from ..utils import mpi_environment

# Variables with which a tracker records nothing, from the manuals of Weights & Biases and Neptune.
SILENT = {'WANDB_MODE': 'disabled', 'NEPTUNE_MODE': 'debug'}
CALLBACKS = {'mlflow', 'wandb', 'neptune', 'comet_ml', 'clearml', 'aim', 'dvclive', 'livelossplot', 'keras_tqdm'}


def _is_silent():
    return mpi_environment.trains_together() and mpi_environment.rank() > 0


def silence_trackers() -> None:
    """Have Weights & Biases and Neptune record nothing on ranks above 0."""
    if _is_silent():
        os.environ.update(SILENT)


def record_elsewhere(mlflow: Any) -> None:
    """Have MLflow record into a folder that is deleted, on ranks above 0, whatever the script names."""
    if _is_silent():
        folder = tempfile.mkdtemp(prefix='mlflow-of-rank')
        atexit.register(shutil.rmtree, folder, True)
        for name in 'MLFLOW_RUN_ID', 'MLFLOW_EXPERIMENT_ID':  # of the runs that are recorded
            os.environ.pop(name, None)
        mlflow.set_tracking_uri('file:' + folder)
        for module in mlflow, mlflow.tracking:
            module.set_tracking_uri = lambda uri: None
