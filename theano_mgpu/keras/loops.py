"""Keras's loops for a model over contexts: with checkpoints and, with several processes, one order of samples, one
writer, and results for all the data.
"""
from __future__ import annotations

import contextlib
import functools
import inspect
import random
from typing import Any, Callable

import keras
import numpy as np
import theano
from keras import callbacks as keras_callbacks

from ..distributed.collectives import broadcast_object
from ..distributed.failures import failing_together
from ..distributed.mpi import mpi_communicator
from ..jobs import mpi_environment
from .feed import fed
from .loop_callbacks import LoopCallbacks, checkpoint_among
from .parallel_state import parallel_state_of


def loop_of(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a training, evaluation or prediction loop of `keras.Model`, for a model over contexts.

    A Checkpoint among the callbacks continues from its file. With several processes, only the first one shows progress
    and writes, all take its order of samples, and where each process feeds its own data, losses and metrics count all
    the data.
    """
    _, *names = inspect.signature(method).parameters

    @functools.wraps(method)
    def loop(self, *args, **kwargs):
        def run(**changed):
            changed_args = [changed.pop(name, value) for name, value in zip(names, args)]
            return method(self, *changed_args, **dict(kwargs, **changed))

        trains_together = mpi_environment.trains_together()
        callbacks = dict(zip(names, args), **kwargs).get('callbacks') or []
        # The validation of another loop, or `fit` with a Sequence, which calls fit_generator.
        is_nested = isinstance(callbacks, keras_callbacks.CallbackList) or \
            any(isinstance(callback, LoopCallbacks) for callback in callbacks)
        feeds = trains_together and 'generator' in names and not isinstance(callbacks, keras_callbacks.CallbackList)
        if feeds and theano.config.mgpu.data != 'sharded':
            args, kwargs = (), with_feeds(dict(zip(names, args), **kwargs))
        if is_nested or not (callbacks or trains_together):
            return method(self, *args, **kwargs)
        callbacks = list(callbacks)
        checkpoint = checkpoint_among(callbacks)
        with checkpoint.among(callbacks) if checkpoint else contextlib.nullcontext():
            if trains_together:
                return _run_on_each_rank(self, run, callbacks, checkpoint)
            return run(callbacks=[LoopCallbacks(callbacks, checkpoint)] if checkpoint else callbacks)
    return loop


def with_feeds(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a loop, by name, for this rank: rank 0 makes the batches of all."""
    ranks = mpi_communicator()
    if 'nb_worker' in arguments:  # its name before Keras 2
        arguments['workers'] = arguments.pop('nb_worker')
    workers = arguments.get('workers', 1)
    arguments.update((name, fed(ranks, arguments[name], workers)) for name in ('generator', 'validation_data')
                     if name in arguments)
    return dict(arguments, workers=0) if ranks.rank else arguments  # no thread asks for batches on other ranks


def _run_on_each_rank(model, run, callbacks, checkpoint):
    """Run a loop of a model on every rank: ``run(**changed)``, with changed arguments."""
    sync = RankSync()
    sync.share_random_states()
    quiet = {'verbose': 0} if sync.ranks.rank else {}
    try:
        with failing_together(sync.ranks):
            returned = run(callbacks=[LoopCallbacks(callbacks, checkpoint, sync)], **quiet)
    except Exception as error:
        if getattr(error, 'known_to_all', False):  # each rank is here: the script may go on
            if parallel_state_of(model) is not None:
                parallel_state_of(model).compare()
            sync.share_random_states()
        raise
    sync.share_random_states()
    return sync.results(returned)


class RankSync(keras.callbacks.Callback):
    """A callback that keeps the loops of several processes in step.

    Attributes
    ----------
    ranks : MpiCommunicator
    """

    def __init__(self) -> None:
        super().__init__()
        self.ranks = mpi_communicator()
        self._trained: Any = None
        self._tested: list[float] | None = None

    def share_random_states(self) -> None:
        """Give the other ranks the random numbers of rank 0, from which the order of samples is drawn.

        Rank 0 goes on as one process would: a thread of its generator may be drawing. So does each rank that has its
        own data.
        """
        if theano.config.mgpu.data == 'sharded':
            return
        states = broadcast_object(self.ranks, (random.getstate(), np.random.get_state()))
        if self.ranks.rank:
            random.setstate(states[0])
            np.random.set_state(states[1])

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._trained = None
        self._begin('train')

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        steps, samples, size = (self.params.get(name) for name in ('steps', 'samples', 'batch_size'))
        if batch == (steps if steps is not None else -(-samples // size)) - 1:
            self._join_training()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._join_training()
        if self._trained:
            names = self.model.metrics_names
            logs.update(zip(names, self._trained))
            if self._tested and any(name.startswith('val_') for name in logs):
                logs.update(('val_' + name, value) for name, value in zip(names, self._tested))

    def on_test_begin(self, logs: Any = None) -> None:
        self._tested = None
        self._begin('test')

    def on_test_end(self, logs: Any = None) -> None:
        self._tested = self._join('test')

    def on_train_end(self, logs: Any = None) -> None:
        self.ranks.divided.consolidate()  # a script may save the model on rank 0 alone

    def on_predict_end(self, logs: Any = None) -> None:
        self._join('predict')

    def results(self, returned: Any) -> Any:
        """Return the results of a loop: the loss and metrics of all the data, in place of this process's part."""
        if self._tested is None or isinstance(returned, keras.callbacks.History):
            return returned
        return self._tested if isinstance(returned, list) else self._tested[0]

    def _begin(self, kind):
        function = self._function(kind)
        if function is not None:
            function.begin()

    def _join(self, kind):
        function = self._function(kind)
        return None if function is None else function.join()

    def _function(self, kind):
        """Return the model's own function of a kind: not one of the user's that stands in its place, or calls it."""
        return parallel_state_of(self.model).functions.get(kind)

    def _join_training(self):
        if self._trained is None:
            self._trained = self._join('train') or ()
