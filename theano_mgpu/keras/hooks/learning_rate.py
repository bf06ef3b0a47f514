"""A learning rate that grows with the batch."""
from __future__ import annotations

from typing import Any

import keras
from keras import backend as K


class LearningRateWarmup(keras.callbacks.Callback):
    """A callback that raises the learning rate, batch by batch, from the optimizer's to a multiple of it.

    For a model that is trained with `factor` times larger batches than before, for instance because several devices
    have room for them. Contexts alone are no reason: they divide a batch, and results equal those on one device.

    Parameters
    ----------
    factor : float
        The multiple of the learning rate in the end: by the rule of linear scaling, how many times larger the
        batches are.
    epochs : int
        Epochs in which it grows, from the first one of the training (epoch 0) on.
    momentum_correction : bool
        Multiply the velocity of SGD with momentum by the same as the learning rate. Keras's velocity contains the
        learning rate, so that it would lag behind. Optimizers without a momentum need none.
    verbose : int
        1 prints the learning rate at the end of each of these epochs.

    Raises
    ------
    ValueError
        If `factor` or `epochs` is not positive. In `fit`, if the optimizer has no learning rate, or the number of
        batches of an epoch is not known: pass `steps_per_epoch` to `fit_generator`.

    Notes
    -----
    This is gradual warm-up of Goyal et al., Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour (2017,
    arXiv:1706.02677), sections 2.2 and 3: in batch t of n the learning rate is ``base * (1 + (factor - 1) * t / n)``.
    After it, the learning rate is left to other callbacks, and to you. A fit that begins with a later `initial_epoch`
    leaves it alone.

    Examples
    --------
    >>> LearningRateWarmup(8, epochs=5).at(0.1, batch=100, n_batches=200)
    0.45
    """

    def __init__(self, factor: float, epochs: int = 5, momentum_correction: bool = True, verbose: int = 0) -> None:
        super().__init__()
        if not factor > 0 or not epochs > 0:
            raise ValueError('factor=%r and epochs=%r have to be positive' % (factor, epochs))
        self.factor, self.epochs, self.momentum_correction, self.verbose = factor, epochs, momentum_correction, verbose
        self._base: Any = None  # learning rate and momentum of the optimizer, as the user has set them
        self._momentum: Any = None
        self._is_corrected = False
        self.first_batch = 0  # of the epoch

    @property
    def _corrects(self):
        return self.momentum_correction and hasattr(self.model.optimizer, 'momentum')

    def at(self, base: float, batch: int, n_batches: int) -> float:
        """Return the learning rate in a batch.

        Parameters
        ----------
        base : float
            The learning rate before it grows.
        batch : int
            Counted from 0.
        n_batches : int
            Batches in which it grows.

        Returns
        -------
        float
        """
        return base * (1 + (self.factor - 1) * min(1, batch / n_batches))

    def on_train_begin(self, logs: Any = None) -> None:
        optimizer = self.model.optimizer
        if not hasattr(optimizer, 'lr'):
            raise ValueError('%s has no learning rate "lr" that could grow' % type(optimizer).__name__)
        if self._base is None:
            self._base = float(K.get_value(optimizer.lr))
        steps, samples, size = (self.params.get(name) for name in ('steps', 'samples', 'batch_size'))
        if not steps and not (samples and size):
            raise ValueError('the number of batches of an epoch is not known: pass steps_per_epoch to fit')
        self._per_epoch = steps or -(-samples // size)
        if self._corrects:
            self._restore_momentum()  # a fit before this one may have been interrupted in a batch
            self._momentum = float(K.get_value(optimizer.momentum))
            self._is_corrected = True  # in the file of a Checkpoint, which saves before other callbacks end a batch

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.first_batch = epoch * self._per_epoch

    def on_batch_begin(self, batch: int, logs: Any = None) -> None:
        batch, n_batches = self.first_batch + batch, self.epochs * self._per_epoch
        if batch > n_batches:
            self._restore_momentum()
            return
        optimizer = self.model.optimizer
        before, now = float(K.get_value(optimizer.lr)), self.at(self._base, batch, n_batches)
        K.set_value(optimizer.lr, now)
        if self._corrects and batch:
            K.set_value(optimizer.momentum, self._momentum * now / before)
            self._is_corrected = True

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        self._restore_momentum()

    def _restore_momentum(self):
        if self._is_corrected:
            K.set_value(self.model.optimizer.momentum, self._momentum)
            self._is_corrected = False

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if logs is not None:
            logs['lr'] = float(K.get_value(self.model.optimizer.lr))
        if self.verbose and epoch < self.epochs:
            print('epoch %d: learning rate %g' % (epoch + 1, K.get_value(self.model.optimizer.lr)))
