"""The models that `theano-mgpu bench` trains, and synthetic data for them."""
from __future__ import annotations

import sys
import warnings
from typing import Any, Callable, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from ...errors import MgpuError, MgpuWarning

CLASSES = 10
DEEPEST = 10000  # Theano traverses graphs by recursion, and resnet50's is deeper than Python's limit of 1000

Shape = Tuple[int, ...]  # the shape of a sample


class Known(NamedTuple):
    """A model that has a name; `small` is the shape of its samples on devices other than GPUs."""

    shape: Shape
    batch_size: int
    layers: Callable[[Any, Any], Any]  # takes keras.layers and a shape; returns all layers after the input, or a model
    small: Optional[Shape] = None
    loss: str = 'categorical_crossentropy'


def _application(name: str, shape: Shape) -> Any:
    """Return a model of keras.applications, with random weights."""
    from keras import applications
    return getattr(applications, name)(weights=None, input_shape=shape)


MODELS = {
    'cnn': Known((28, 28, 1), 128, lambda layers, shape: [  # as in benchmarks/keras_overhead.py
        layers.Conv2D(32, 3, activation='relu'), layers.MaxPooling2D(), layers.Flatten(),
        layers.Dense(CLASSES, activation='softmax')]),
    'mlp': Known((784,), 128, lambda layers, shape: [  # many parameters, little computation
        layers.Dense(1024, activation='relu'), layers.Dense(1024, activation='relu'),
        layers.Dense(CLASSES, activation='softmax')]),
    'vgg16': Known((224, 224, 3), 16, lambda layers, shape: _application('VGG16', shape), (64, 64, 3)),
    'resnet50': Known((224, 224, 3), 16, lambda layers, shape: _application('ResNet50', shape), (64, 64, 3)),
    'lstm': Known((50, 32), 64, lambda layers, shape: [layers.LSTM(128), layers.Dense(CLASSES, activation='softmax')]),
    'autoencoder': Known((32, 32, 1), 64, lambda layers, shape: [
        layers.Conv2D(16, 3, strides=2, padding='same', activation='relu'),
        layers.Conv2D(32, 3, strides=2, padding='same', activation='relu'),
        layers.Conv2DTranspose(16, 3, strides=2, padding='same', activation='relu'),
        layers.Conv2DTranspose(shape[-1], 3, strides=2, padding='same', activation='sigmoid')], loss='mse'),
}


class Recipe:
    """The recipe of a measured model and its data, which makes a new one for each measurement.

    The name is one of `MODELS`, or a file that keras.Model.save wrote. The optimizer is for a model that is not
    compiled yet. Where it is not for GPUs, images are smaller, unless `input_shape`, without the samples, is given.
    """

    def __init__(self, name: str, input_shape: Sequence[int] | None = None, optimizer: str = 'adam',
                 gpu: bool = True) -> None:
        self.name, self.optimizer, self.known = name, optimizer, MODELS.get(name)
        if self.known and not input_shape:
            input_shape = not gpu and self.known.small or self.known.shape
        self.input_shape = tuple(input_shape) if input_shape else None
        self.batch_size = self.known.batch_size if self.known else 32

    def build(self) -> Any:
        """Return a new compiled keras.Model; raise a MgpuError if it cannot be made."""
        import keras
        sys.setrecursionlimit(max(DEEPEST, sys.getrecursionlimit()))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter('ignore', UserWarning)  # "saved without an optimizer"
                model = (self.known.layers(keras.layers, self.input_shape) if self.known else
                         keras.models.load_model(self.name))
                if isinstance(model, list):
                    model = keras.Sequential([keras.layers.InputLayer(self.input_shape), *model])
        except (OSError, ValueError, TypeError, LookupError, AttributeError, ImportError, AssertionError) as error:
            if self.known:
                raise MgpuError('the model %s cannot be made for inputs of shape %s: %s. Its usual shape: '
                                '--input-shape %s' % (self.name, self.input_shape, str(error).partition('\n')[0],
                                                      ' '.join(map(str, self.known.shape)))) from error
            raise MgpuError('Keras cannot load the model %s: %s: %s. A model with custom layers or losses '
                            'cannot be measured from its file: measure training in your script, where '
                            'parallel.train_function.function.timings.per_call() returns the phases of a step'
                            % (self.name, type(error).__name__, error)) from error
        if not model.optimizer:
            try:
                model.compile(self.optimizer, self.known.loss if self.known else 'mse')
            except ValueError as error:
                raise MgpuError('the model %s cannot be compiled: %s' % (self.name, error)) from error
        return model

    def replicate(self, gpus: int | Sequence[str]) -> Any:
        """Return a new parallel model over contexts; see `multi_gpu_model`."""
        from ...keras import multi_gpu_model
        with warnings.catch_warnings():
            warnings.simplefilter('ignore', MgpuWarning)  # exactness does not matter here
            return multi_gpu_model(self.build(), gpus)

    def data(self, model: Any, n: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Return inputs and targets of n samples of a compiled keras.Model; the same in every process."""
        rng = np.random.RandomState(0)
        inputs = []
        for tensor in model.inputs:
            shape, words = (n, *self._fed_shape(tensor)), words_of(tensor)
            inputs.append(rng.randint(0, words, shape) if words else rng.rand(*shape).astype('float32'))
        if self.known and self.known.loss == 'mse':
            return inputs, inputs
        losses = [getattr(each, '__name__', '') or getattr(each, 'name', '') for each in model.loss_functions]
        # Dimensions of an output that depend on the data are 1.
        return inputs, [targets_of(rng, n, tuple(size or 1 for size in tensor._keras_shape[1:]), loss)
                        for tensor, loss in zip(model.outputs, losses)]

    def _fed_shape(self, tensor: Any) -> Shape:
        """Return the shape of the samples that an input is given, without their number."""
        shape = tensor._keras_shape[1:]
        fed = self.input_shape or shape
        if len(fed) != len(shape) or any(size not in (None, asked) for size, asked in zip(shape, fed)):
            raise MgpuError('--input-shape %s does not fit the input %s of %s, which has shape %s without the samples'
                            % (' '.join(map(str, fed)), tensor.name, self.name, shape))
        if None in fed:
            raise MgpuError('the input %s of %s has shape %s without the samples, and None is unknown: give '
                            '--input-shape, e.g. --input-shape %s'
                            % (tensor.name, self.name, shape, ' '.join(str(size or 32) for size in shape)))
        return fed


def words_of(tensor: Any) -> int | None:
    """Return the number of words if an input goes to an Embedding; else None."""
    following = [node.outbound_layer for node in tensor._keras_history[0]._outbound_nodes]
    return min((layer.input_dim for layer in following if type(layer).__name__ == 'Embedding'), default=None)


def targets_of(rng: np.random.RandomState, n: int, shape: Shape, loss: str) -> np.ndarray:
    """Return random targets that suit a loss: class numbers, one-hot rows, or numbers between 0 and 1.

    Examples
    --------
    >>> rng = np.random.RandomState(0)
    >>> targets_of(rng, 3, (4,), 'sparse_categorical_crossentropy').shape
    (3, 1)
    >>> targets_of(rng, 3, (4,), 'categorical_crossentropy').sum(axis=1)
    array([1., 1., 1.], dtype=float32)
    """
    if 'sparse' in loss:
        return rng.randint(0, shape[-1], (n,) + shape[:-1] + (1,))
    if 'categorical' in loss:
        return np.eye(shape[-1], dtype='float32')[rng.randint(0, shape[-1], (n,) + shape[:-1])]
    return rng.rand(n, *shape).astype('float32')
