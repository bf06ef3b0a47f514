"""Keras's loops for a model over contexts: with checkpoints and, with several processes, one order of samples, one
writer, and results for all the data.
"""
from __future__ import annotations

import contextlib
import functools
import inspect
import os
from typing import Any, Callable

import numpy as np
from keras import callbacks as keras_callbacks
from keras.models import Model

from ...auto.divided_model import divided_model_of
from ...auto.model_function import ModelFunction
from ...checks.ranks import check_lengths
from ...comm.alone import is_alone
from ...comm.collectives import all_gather_int, all_gather_object, broadcast_object
from ...comm.mpi import choose_ranks, mpi_communicator
from ...comm.rank_0 import on_rank_0
from ...comm.rank_errors import failing_together
from ...compat import keras_versions
from ...errors import RankError
from ...options import Flags
from ...runtime.state.random_states import random_states, set_random_states
from ...utils import mpi_environment
from ...utils.rank_process import wait_until_needed
from ..models import members
from .checkpoint import Checkpoint
from .feed import fed
from .writers import only_writes

SET = 'set_%s' if hasattr(keras_callbacks.Callback, 'set_model') else '_set_%s'  # the latter before Keras 1.2


def run_loop(method: Callable[..., Any], self: Model, *args: Any, **kwargs: Any) -> Any:
    """Run a training, evaluation or prediction loop of `keras.Model`, for a model over contexts.

    A Checkpoint among the callbacks continues from its file. With several processes, only the first one shows progress
    and writes, all take its order of samples, and where each process feeds its own data, losses and metrics count all
    the data.
    """
    code = inspect.unwrap(method).__code__  # inspect.signature takes long
    names = code.co_varnames[1:code.co_argcount]
    trains_together = mpi_environment.trains_together() and not is_alone()
    callbacks = dict(zip(names, args), **kwargs).get('callbacks') or []
    # The validation of another loop, or `fit` with a Sequence, which calls fit_generator.
    is_nested = isinstance(callbacks, keras_callbacks.CallbackList) or \
        any(isinstance(callback, LoopCallbacks) for callback in callbacks)
    feeds = trains_together and 'generator' in names and not isinstance(callbacks, keras_callbacks.CallbackList)
    if feeds:
        args, kwargs = (), with_feeds(dict(zip(names, args), **kwargs))
    if is_nested or not (callbacks or trains_together):
        return method(self, *args, **kwargs)
    callbacks = list(callbacks)
    checkpoints: list[Any] = [callback for callback in callbacks if isinstance(callback, Checkpoint)]
    checkpoint, *others = checkpoints or [None]
    if others:
        raise ValueError('%d Checkpoints are among the callbacks: pass one' % (len(others) + 1))
    run = functools.partial(method, self, **dict(zip(names, args), **kwargs))
    with checkpoint.among(callbacks) if checkpoint else contextlib.nullcontext():
        if trains_together:
            return _run_on_each_rank(self, run, callbacks, checkpoint, names)
        return run(callbacks=[LoopCallbacks(callbacks, checkpoint)] if checkpoint else callbacks)


def with_feeds(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a loop, by name, for this rank: rank 0 makes the batches of all, or each its own ones."""
    of_all = Flags.now().data != 'sharded' and keras_versions.has_open_queues()
    ranks = choose_ranks(None if of_all else 'serial')
    if of_all and 'nb_worker' in arguments:  # its name before Keras 2
        arguments['workers'] = arguments.pop('nb_worker')
    arguments.update((name, fed(ranks, arguments[name])) for name in ('generator', 'validation_data')
                     if name in arguments)
    return dict(arguments, workers=0) if ranks.rank else arguments  # no thread asks for batches on other ranks


def _run_on_each_rank(model, run, callbacks, checkpoint, names):
    """Run a loop of a model, with arguments of some names, on every rank: by ``run(**changed)`` with changed arguments.
    """
    sync = RankSync()
    sync.share_random_states()
    quiet = {'verbose': 0} if sync.ranks.rank and 'verbose' in names else {}
    try:
        with failing_together(sync.ranks):
            if 'callbacks' in names:
                returned = run(callbacks=[LoopCallbacks(callbacks, checkpoint, sync)], **quiet)
            else:
                returned = sync.run(model, run, **quiet)
    except Exception as error:
        if getattr(error, 'known_to_all', False):  # each rank is here: the script may go on
            if divided_model_of(model) is not None:
                divided_model_of(model).compare()
            sync.share_random_states()
        raise
    sync.share_random_states()
    return sync.results(returned)


class LoopCallbacks:
    """The callbacks of a loop as one callback: Keras calls its hooks, and these call each of them in turn.

    While a Checkpoint replays finished batches, the other callbacks are not called; their part of `logs` is there all
    the same. With several processes, callbacks that only write are called on rank 0, and the other ranks wait; but
    where the ranks have different names for a file, such as one in a temporary folder, each writes its own. So does a
    rank that alone has a callback.
    """

    def __init__(self, callbacks: list[keras_callbacks.Callback], checkpoint: Checkpoint | None = None,
                 sync: RankSync | None = None) -> None:
        self._checkpoint, self._sync, self._ranks = checkpoint, sync, sync and sync.ranks
        self._first = [callback for callback in (sync, checkpoint) if callback is not None]
        self._others = [callback for callback in callbacks if callback is not checkpoint]
        self._common = self._find_common() if sync else set()

    def _find_common(self):
        """Return the positions of the callbacks that only write, to files of the same names on all ranks."""
        own: dict[Any, int] = {}  # the position of each: of a class and texts, and a number among those that are alike
        for position, callback in enumerate(self._others, 1):
            if only_writes(callback):
                kind = (type(callback).__name__, *[os.path.abspath(value) for _, value in sorted(vars(callback).items())
                                                   if isinstance(value, (str, os.PathLike))])
                own[kind, sum(kind == other for other, _ in own)] = position
        of_ranks = all_gather_object(self._ranks, list(own))
        common = [key for key in of_ranks[0] if all(key in keys for keys in of_ranks)]
        if any([key for key in keys if key in common] != common for keys in of_ranks):
            raise RankError('the ranks have the same callbacks in different orders, %s on rank 0: give each rank the '
                            'same list' % ', '.join(kind for (kind, *_), _ in common))
        return {own[key] for key in common}

    def set_params(self, params: dict[str, Any]) -> None:
        for callback in self._first:
            getattr(callback, SET % 'params')(keras_versions.loop_params(params))
        for callback in self._others:
            getattr(callback, SET % 'params')(params)

    def set_model(self, model: Model) -> None:
        if self._checkpoint is not None:
            wait_until_needed()  # now the functions are compiled, and no callback has opened its file yet
        for callback in self._first + self._others:
            getattr(callback, SET % 'model')(model)

    _set_params, _set_model = set_params, set_model

    def _set_validation_data(self, value):
        for callback in self._first + self._others:
            callback.validation_data = value

    validation_data = property(fset=_set_validation_data)  # Keras sets it for each callback

    def __getattr__(self, name: str) -> Callable[..., None]:
        """Return a hook of Keras's, such as `on_batch_end`."""
        if not name.startswith('on_'):
            raise AttributeError(name)
        return functools.partial(self._call, name)

    def _call(self, hook, *args):
        for callback in self._first:
            getattr(callback, hook)(*args)
        for position, callback in enumerate(self._others, 1):
            if position in self._common:
                self._call_on_first_rank(position, callback, hook, args)
            else:
                self._call_unless_replaying(position, callback, hook, args)
        if hook == 'on_epoch_begin' and self._sync is not None:
            self._sync.share_random_states()  # now, as callbacks may have drawn numbers on some ranks only

    def _call_on_first_rank(self, position, callback, hook, args):
        """Call it on rank 0; at the end of an epoch or the training, other ranks wait until it has written."""
        def act():
            self._call_unless_replaying(position, callback, hook, args)
            return {name: value for name, value in vars(callback).items() if isinstance(value, (int, float, np.number))
                    or hook == 'on_train_end' and _is_plain(value)}
        if hook in ('on_epoch_end', 'on_train_end'):
            # A script may look at ModelCheckpoint.best, or at losses that a callback of its own keeps.
            vars(callback).update(on_rank_0(self._ranks, act))
        elif self._ranks.rank == 0:
            act()

    def _call_unless_replaying(self, position, callback, hook, args):
        begins_anew = isinstance(callback, getattr(keras_callbacks, 'CSVLogger', ())) and not callback.append
        may_replay = self._checkpoint and not begins_anew and hook not in ('on_train_begin', 'on_train_end')
        if may_replay and hook == 'on_epoch_end':
            self._checkpoint.end_epoch_of(callback, position, *args)
        elif not (may_replay and self._checkpoint.replaying):
            getattr(callback, hook)(*args)


def _is_plain(value):
    """Return whether a value is numbers, texts or arrays, in containers or not, which other ranks can have, too."""
    if isinstance(value, (list, tuple, set, dict)):
        return all(map(_is_plain, [*value, *value.values()] if isinstance(value, dict) else value))
    return isinstance(value, (int, float, str, bytes, np.number, np.ndarray, type(None)))


class RankSync(keras_callbacks.Callback):
    """A callback that keeps the loops of several processes in step."""

    def __init__(self) -> None:
        super().__init__()
        self.ranks = mpi_communicator()
        self._trained: Any = None
        self._tested: list[float] | None = None
        self._seen = 0  # samples of the epoch

    def run(self, model: Model, loop: Any, **changed: Any) -> Any:
        """Run a loop of tests or predictions that has no callbacks, as before Keras 2.3."""
        arrays = members(loop.keywords.get('x'))
        getattr(self, SET % 'model')(model)
        getattr(self, SET % 'params')({'samples': len(arrays[0]) if arrays else None})
        kind = 'test' if loop.func.__name__.startswith('evaluate') else 'predict'
        getattr(self, 'on_%s_begin' % kind)()
        returned = loop(**changed)
        getattr(self, 'on_%s_end' % kind)()
        return returned

    def share_random_states(self) -> None:
        """Give the other ranks the random numbers of rank 0, from which the order of samples is drawn.

        Rank 0 goes on as one process would: a thread of its generator may be drawing. So does each rank that has its
        own data.
        """
        if Flags.now().data == 'sharded':
            return
        states = broadcast_object(self.ranks, random_states())
        if self.ranks.rank:
            set_random_states(states)

    def _check_samples(self, logs: Any = None) -> None:
        """Raise a RankBatchError unless every rank was given as many samples, or they may differ."""
        if Flags.now().data != 'sharded':
            samples = all_gather_int(self.ranks, self.params.get('samples') or 0)
            check_lengths(self.ranks, self.model.name, np.array(samples))

    on_train_begin = on_predict_begin = _check_samples

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._trained, self._seen = None, 0
        self._on('train', ModelFunction.begin)
        if not keras_versions.tells_of_tests():
            self._tested = None
            self._on('test', ModelFunction.begin)

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        steps, samples = self.params.get('steps'), self.params.get('samples')
        self._seen += logs['size']
        if batch == steps - 1 if steps is not None else self._seen >= samples:
            self._join_training()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._join_training()
        if not keras_versions.tells_of_tests() and self.params.get('do_validation'):
            self.on_test_end()
        if self._trained:
            names = self.model.metrics_names
            logs.update(zip(names, self._trained))
            if self._tested and any(name.startswith('val_') for name in logs):
                logs.update(('val_' + name, value) for name, value in zip(names, self._tested))

    def on_test_begin(self, logs: Any = None) -> None:
        self._check_samples()
        self._tested = None
        self._on('test', ModelFunction.begin)

    def on_test_end(self, logs: Any = None) -> None:
        self._tested = self._on('test', ModelFunction.join)

    def on_train_end(self, logs: Any = None) -> None:
        self.ranks.consolidate()  # a script may save the model on rank 0 alone

    def on_predict_end(self, logs: Any = None) -> None:
        self._on('predict', ModelFunction.join)

    def results(self, returned: Any) -> Any:
        """Return the results of a loop: the loss and metrics of all the data, in place of this process's part."""
        if self._tested is None or isinstance(returned, keras_callbacks.History):
            return returned
        return self._tested if isinstance(returned, list) else self._tested[0]

    def _on(self, kind, act):
        """Act on the model's own function of a kind, if any: not on a user's in its place, or one that calls it."""
        function = divided_model_of(self.model).functions.get(kind)
        return None if function is None else act(function)

    def _join_training(self):
        if self._trained is None:
            self._trained = self._on('train', ModelFunction.join) or ()
