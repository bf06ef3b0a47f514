"""Keras's TensorBoard callback, which needs TensorFlow; here it writes through `Summary`."""
from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import MgpuError
from ..utils import progress
from .wrapping import arguments_of, wrap


def write_without_tensorflow(tensorboard: Any) -> None:
    """Write the scalars, histograms, images and graph of ``keras.callbacks.TensorBoard`` without TensorFlow.

    The class stays Keras's: its arguments, when it writes, and under which steps.
    """
    callback = tensorboard.TensorBoard
    backend = getattr(tensorboard.K, 'backend', str)()  # Keras 0.3 has no such function
    if backend != 'theano' or callback.__module__ != tensorboard.__name__:
        return
    callback.set_model = callback._set_model = _set_model  # the latter in Keras 1
    callback.on_epoch_end = _on_epoch_end
    callback._write_logs = _write_logs

    @wrap(callback)
    def __init__(original, self, *args, **kwargs):
        super(callback, self).__init__()
        arguments = arguments_of(original, self, *args, **kwargs)
        del arguments['self']
        _check(**arguments)
        frequency = arguments.get('update_freq', 'epoch')  # an argument since Keras 2.2.3
        vars(self).update(arguments, embeddings_metadata=arguments.get('embeddings_metadata') or {},
                          update_freq=1 if frequency == 'batch' else frequency,
                          write_images=arguments.get('write_images', False),  # an argument since Keras 1.1
                          samples_seen=0, samples_seen_at_last_write=0)


def _check(histogram_freq, write_grads=False, embeddings_freq=0, **others):
    if embeddings_freq:
        raise MgpuError('TensorBoard(embeddings_freq=%r): embeddings are not available on Theano; pass '
                        'embeddings_freq=0. tensorboardX.SummaryWriter.add_embedding writes an array that '
                        'model.predict returned' % (embeddings_freq,))
    if write_grads and histogram_freq:
        raise MgpuError('TensorBoard(write_grads=True): histograms of gradients are not available on Theano; pass '
                        'write_grads=False. Histograms of weights are written')
    if histogram_freq:
        progress.note("TensorBoard writes histograms of weights; those of the layers' outputs, which Keras adds on "
                          'TensorFlow, are not available on Theano')


def _set_model(self, model):
    from ..utils.tensorboard.event_file import Summary
    self.model = model
    self.writer = Summary(self.log_dir)
    if self.write_graph:
        loss = [model.total_loss] if getattr(model, 'total_loss', None) is not None else []
        self.writer.graph(model.outputs + loss, _layers(model) + [('loss', loss)])


def _layers(model):
    """Return the name of each layer, and its outputs that the model has."""
    from theano.gof.graph import ancestors
    own = set(ancestors(model.outputs))
    nodes = '_inbound_nodes' if hasattr(model.layers[0], '_inbound_nodes') else 'inbound_nodes'  # before Keras 2.1
    tensors = [(layer.name, sum((node.output_tensors for node in getattr(layer, nodes)), [])) for layer in model.layers]
    return [(name, [tensor for tensor in outputs if tensor in own]) for name, outputs in tensors]


def _on_epoch_end(self, epoch, logs=None):
    if self.histogram_freq and epoch % self.histogram_freq == 0:
        for layer in self.model.layers:
            for i, weight in enumerate(layer.weights):
                name = (weight.name or '%s/weight_%d' % (layer.name, i)).replace(':', '_')
                value = weight.get_value()
                self.writer.histogram(name, value, epoch)
                images = _images(value) if self.write_images else None
                if images is not None:
                    self.writer.image(name, images, epoch, max_images=3)
    self._write_logs(logs or {}, epoch if self.update_freq == 'epoch' else self.samples_seen)


def _images(weight):
    """Return a weight as images from 0 to 1 of shape (images, rows, columns), or None if it has too many dimensions.

    A matrix is lying, a bias is a column; of a kernel of shape (rows, columns, units) each unit is an image.
    """
    from keras import backend
    weight = np.squeeze(weight)
    if weight.ndim > 3:
        return None
    low, high = weight.min(), weight.max()
    weight = (weight - low) / (high - low if high > low else 1)
    if weight.ndim == 3:
        order = getattr(backend, 'image_data_format', None) or backend.image_dim_ordering
        return np.moveaxis(weight, -1, 0) if order() in ('channels_last', 'tf') else weight
    matrix = weight.reshape(len(weight), -1) if weight.ndim else weight.reshape(1, 1)
    return (matrix.T if weight.ndim == 2 and matrix.shape[0] > matrix.shape[1] else matrix)[None]


def _write_logs(self, logs, index):
    for name, value in logs.items():
        if name not in ('batch', 'size'):
            self.writer.scalar(name, value, index)
    self.writer.flush()
