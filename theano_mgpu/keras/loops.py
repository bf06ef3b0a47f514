"""What a model over contexts adds to Keras's loops: checkpoints and, with several processes, one order of samples, one
writer, and results for all the data.
"""
import contextlib
import functools
import inspect
import random

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


def loop_of(method):
    """A training, evaluation or prediction loop of `keras.Model`, for a model over contexts.

    A Checkpoint among the callbacks continues from its file. With several processes, only the first one shows progress
    and writes, all take its order of samples, and where each process feeds its own data, losses and metrics are those
    of all the data.
    """
    names = list(inspect.signature(method).parameters)

    @functools.wraps(method)
    def loop(self, *args, **kwargs):
        def given(name):
            position = names.index(name) - 1
            return args[position] if position < len(args) else kwargs.get(name)

        def run(**changed):
            own = {name: value for name, value in changed.items() if names.index(name) > len(args)}
            changed_args = [changed.get(name, value) for name, value in zip(names[1:], args)]
            return method(self, *changed_args, **dict(kwargs, **own))

        trains_together = mpi_environment.trains_together()
        callbacks = given('callbacks') or []
        # The validation of another loop, or what `fit` does with a Sequence: it calls fit_generator.
        is_nested = isinstance(callbacks, keras_callbacks.CallbackList) or \
            any(isinstance(callback, LoopCallbacks) for callback in callbacks)
        feeds = trains_together and 'generator' in names and not isinstance(callbacks, keras_callbacks.CallbackList)
        if feeds and theano.config.mgpu.data != 'sharded':
            args, kwargs = with_feeds(names[1:], args, kwargs)
        if is_nested or not (callbacks or trains_together):
            return method(self, *args, **kwargs)
        callbacks = list(callbacks)
        checkpoint = checkpoint_among(callbacks)
        with checkpoint or contextlib.nullcontext():
            if trains_together:
                return run_on_each_rank(self, run, callbacks, checkpoint)
            return run(callbacks=[LoopCallbacks(callbacks, checkpoint)] if checkpoint else callbacks)
    return loop


def with_feeds(names, args, kwargs):
    """Return the arguments of a loop, for this rank, in which batches are those that rank 0 makes.

    Parameters
    ----------
    names : list of str
        Of the loop's parameters.
    args : tuple
    kwargs : dict
    """
    ranks = mpi_communicator()
    given = dict(zip(names, args), **kwargs)
    if 'nb_worker' in given:  # its name before Keras 2
        given['workers'] = given.pop('nb_worker')
    workers = given.get('workers', 1)
    for name in ('generator', 'validation_data'):
        if name in given:
            given[name] = fed(ranks, given[name], workers)
    if ranks.rank:
        given['workers'] = 0  # no thread asks for batches here
    return (), given


def run_on_each_rank(model, run, callbacks, checkpoint):
    """Run a loop of a model on every rank: ``run(**changed)``, with changed arguments."""
    sync = RankSync()
    sync.share_random_states()
    quiet = {'verbose': 0} if sync.ranks.rank else {}
    try:
        with failing_together(sync.ranks):
            returned = run(callbacks=[LoopCallbacks(callbacks, checkpoint, sync)], **quiet)
    except Exception as error:
        if getattr(error, 'known_to_all', False):  # each rank is here: the script may go on
            state = parallel_state_of(model)
            if state is not None:
                state.compare()
            sync.share_random_states()
        raise
    sync.share_random_states()
    return sync.results(returned)


class RankSync(keras.callbacks.Callback):
    """Keeps the loops of several processes in step.

    Attributes
    ----------
    ranks : MpiCommunicator
    """

    def __init__(self):
        super().__init__()
        self.ranks = mpi_communicator()
        self._tested = None

    def share_random_states(self):
        """Have the other ranks continue with the random numbers of rank 0, from which the order of samples is drawn.

        Rank 0 goes on as one process would: a thread of its generator may be drawing. So does each rank that has its
        own data.
        """
        if theano.config.mgpu.data == 'sharded':
            return
        states = broadcast_object(self.ranks, (random.getstate(), np.random.get_state()))
        if self.ranks.rank:
            random.setstate(states[0])
            np.random.set_state(states[1])

    def on_epoch_begin(self, epoch, logs=None):
        self._trained = None
        self._begin('train')

    def on_batch_end(self, batch, logs=None):
        if batch == self._n_batches() - 1:
            self._join_training()

    def on_epoch_end(self, epoch, logs=None):
        self._join_training()
        if self._trained:
            names = self.model.metrics_names
            logs.update(zip(names, self._trained))
            if self._tested and any(name.startswith('val_') for name in logs):
                logs.update(('val_' + name, value) for name, value in zip(names, self._tested))

    def on_test_begin(self, logs=None):
        self._tested = None
        self._begin('test')

    def on_test_end(self, logs=None):
        self._tested = self._join('test')

    def on_train_end(self, logs=None):
        self.ranks.divided.consolidate()  # a script may save the model on rank 0 alone

    def on_predict_end(self, logs=None):
        self._join('predict')

    def results(self, returned):
        """The return value of a loop; the loss and metrics of all the data, in place of those of this process's part.
        """
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

    def _n_batches(self):
        steps, samples, size = (self.params.get(name) for name in ('steps', 'samples', 'batch_size'))
        return steps if steps is not None else -(-samples // size)

    def _join_training(self):
        if self._trained is None:
            self._trained = self._join('train') or ()
