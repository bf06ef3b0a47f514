"""`Predictor`: prediction with one Keras model on several devices."""
from __future__ import annotations

import inspect
from typing import Any

import keras
import numpy as np
from keras import backend as K
from keras.models import Sequential
from scipy.sparse import issparse
from theano import Variable

from ...compat import keras_versions
from ...devices.asked_contexts import chosen_contexts
from ...predict import predictor
from .given_model import check_built


class Predictor(predictor.Predictor):
    """Prediction with a Keras model on several devices, each of which computes another batch.

    The model is compiled with its present weights; `refresh` takes over later ones. Use it in a ``with`` block, or
    `close` it, to free its memory.

    Parameters
    ----------
    model : keras.Model
        Compiled or not; a parallel model stands for its template.
    gpus : int, list of int or str, or None
        How many contexts to use, or which ones, as for `multi_gpu_model`; None for all.
    replicas_per_gpu : int
        It has no effect.

        .. deprecated:: 0.2.0
    prefetch : int
        0 keeps it from reading the next batches, one for each device, while devices compute.

    Raises
    ------
    ValueError
        If `gpus` asks for contexts that do not exist, or the model is not built, or is stateful.

    Notes
    -----
    Layers that draw random numbers in prediction draw new ones for each batch, the same for any number of devices.
    With several processes (`theano-mgpu launch`), rank 0 reads the batches and sends them to all.

    Examples
    --------
    >>> import numpy as np, theano_mgpu
    >>> contexts = theano_mgpu.init('dev0->cpu;dev1->cpu')
    >>> model = keras.Sequential([keras.layers.Dense(3, input_shape=(4,))])
    >>> with Predictor(model) as predictor:
    ...     predictor.predict(np.ones((70, 4))).shape
    ...     [outputs.shape for outputs in predictor.map(np.ones((n, 4)) for n in (5, 2))]
    (70, 3)
    [(5, 3), (2, 3)]
    """

    def __init__(self, model: keras.Model, gpus: Any = None, replicas_per_gpu: int = 1, prefetch: int = 2) -> None:
        self.model = model = getattr(model, 'template', model)
        check_built(model, 'Predictor')
        if model.stateful:
            raise ValueError('the model %s is stateful: what it predicts depends on the batch before, and a Predictor '
                             'computes several batches at a time. Use the model itself, or multi_gpu_model(model)'
                             % model.name)
        inner = keras_versions.inner(model)
        options = getattr(inner, '_function_kwargs', {})
        givens = dict(options.get('givens') or {})
        if isinstance(K.learning_phase(), Variable):
            givens[K.learning_phase()] = np.zeros((), K.learning_phase().dtype)
        outputs = inner.outputs if len(inner.outputs) > 1 else inner.outputs[0]
        super().__init__(keras_versions.feed_inputs(model), outputs,
                         chosen_contexts(gpus), replicas_per_gpu, prefetch, givens=givens, mode=options.get('mode'),
                         name='predict_function', allow_input_downcast=True)

    def predict(self, x: Any, batch_size: int | None = None, verbose: int = 0) -> Any:  # type: ignore[override]  # as in Keras
        """Predict the outputs of all samples, as `keras.Model.predict` does.

        Parameters
        ----------
        x : ndarray, list or dict of ndarray, or keras.utils.Sequence
            Arrays on disk (`numpy.memmap`, h5py) are read batch by batch. If a Sequence gives ``(x, y)``, x is used.
        batch_size : int, optional
            Samples that a device works on at a time, 32 by default; a Sequence has its own.
        verbose : {0, 1}
            1 shows a progress bar, with samples per second.

        Returns
        -------
        ndarray, or list of ndarray
            One row for each sample, in order; one array for each output of the model. An empty list if there are no
            samples, as in Keras. With several ranks, each gets all rows.

        Raises
        ------
        PredictionError
            If a batch fails; its ``index`` says which.
        ValueError
            If `x` is a generator, or is a Sequence and `batch_size` is given, or `batch_size` is not positive.
        """
        self._check_use()
        if keras_versions.is_sequence(x):
            if batch_size is not None:
                raise ValueError('batch_size=%r was given with a Sequence, whose items are the batches: leave it out'
                                 % (batch_size,))
            rows = self._rows(self._grouped(x[i] for i in range(len(x))), None, verbose, n_batches=len(x))
        elif inspect.isgenerator(x):
            raise ValueError('predict takes arrays, or a keras.utils.Sequence; the outputs of a generator come batch '
                             'by batch from map(generator)')
        else:
            batch_size = predictor.chosen_batch_size(batch_size)
            arrays = self._members(x)
            if not arrays[0].shape[0]:
                return []
            rows = self._rows_of(arrays, arrays[0].shape[0], batch_size, verbose)
        return rows[0] if len(rows) == 1 else rows

    def predict_proba(self, x: Any, batch_size: int | None = None, verbose: int = 0) -> Any:
        """Predict as `predict` does, for a model that is Sequential, as in Keras.

        Parameters
        ----------
        x, batch_size, verbose
            As for `predict`.

        Returns
        -------
        ndarray
            One row for each sample.

        Raises
        ------
        AttributeError
            If the model is not a `keras.Sequential`.
        """
        self._check_sequential('predict_proba')
        return self.predict(x, batch_size, verbose)

    def predict_classes(self, x: Any, batch_size: int | None = None, verbose: int = 0) -> Any:
        """Predict the class of each sample, for a model that is Sequential, as in Keras.

        Parameters
        ----------
        x, batch_size, verbose
            As for `predict`.

        Returns
        -------
        ndarray of int
            Of shape (samples,), the number of the largest output; if there is one output unit, of shape (samples, 1),
            1 where it is above 0.5.

        Raises
        ------
        AttributeError
            If the model is not a `keras.Sequential`.
        """
        self._check_sequential('predict_classes')
        probabilities = self.predict(x, batch_size, verbose)
        if not len(probabilities):
            return []
        if probabilities.shape[-1] > 1:
            return probabilities.argmax(axis=-1)
        return (probabilities > 0.5).astype('int32')

    def _check_sequential(self, method):
        if not isinstance(self.model, Sequential):
            raise AttributeError('%s is for a keras.Sequential, as in Keras; %s is a %s: use predict'
                                 % (method, self.model.name, type(self.model).__name__))

    def _members(self, batch):
        """List the arrays of a batch as Keras standardises them; a tuple ``(x, y)`` or ``(x, y, weights)`` gives x."""
        arrays = keras_versions.standardize(self.model, batch[0] if isinstance(batch, tuple) else batch)
        return [array.toarray() if issparse(array) and not K.is_sparse(fed) else array
                for array, fed in zip(arrays, keras_versions.feed_inputs(self.model))]
