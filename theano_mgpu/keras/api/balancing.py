"""`balance`: propose a cut of a Keras model over several devices, by memory."""
from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import numpy as np
from keras.layers import InputLayer
from keras.models import Model

from ...compat import keras_versions
from ...devices.context_map import describe
from ...devices.contexts import host_contexts
from ...errors import ContextError
from ...utils.tables import Printed, table
from ..models import members
from .given_model import check_built

# Arrays of the size of the weights that an optimizer keeps; 2 for others, and for a model that is not compiled.
STATES = {'SGD': 1, 'RMSprop': 1, 'Adagrad': 1, 'Adadelta': 2, 'Adam': 2, 'Adamax': 2, 'Nadam': 2}


class Cost(NamedTuple):
    """The bytes of memory that a layer takes, with its name."""

    layer: str
    bytes: int


class Balance(Printed, dict):
    """The device of each layer, by name, as `place` takes it. Print it.

    Parameters
    ----------
    costs : list of Cost
        In the order of the layers.
    devices : list of str
        The context of each layer.
    """

    def __init__(self, costs: list[Cost], devices: list[str]) -> None:
        super().__init__((cost.layer, device) for cost, device in zip(costs, devices))
        self.costs = costs

    def __str__(self):
        rows = [['LAYER', 'MB', 'DEVICE']]
        rows += [_row(cost.layer, [cost], self[cost.layer]) for cost in self.costs]
        for device in dict.fromkeys(self.values()):
            own = [cost for cost in self.costs if self[cost.layer] == device]
            rows.append(_row('sum of %d' % len(own), own, device))
        return table(rows, right={1})


def _row(name, costs, device):
    return [name, '%.2f' % (sum(cost.bytes for cost in costs) / 2 ** 20), device]


def balance(model: Model, n: int, batch_size: int = 32) -> Balance:
    """Propose a cut of a model over several devices, such that the fullest one has least.

    The layers, in their order, are cut into as many pieces as there are devices. Of all cuts, the best one is found.

    Parameters
    ----------
    model : keras.Model
        Built. It is meant for a chain of layers; of one with branches, the list ``model.layers`` is cut. A nested model
        is one layer. If it is compiled, the memory of its optimizer's state counts.
    n : int
        Devices: the first contexts.
    batch_size : int
        Samples of a batch.

    Returns
    -------
    Balance
        A dict that `place` takes; printed, a table of the layers and devices. Memory counts the weights, their
        gradients, the state of the optimizer, and the outputs of the layer for a batch; an axis whose length is not
        known counts once.

    Raises
    ------
    ContextError
        If there are fewer contexts.
    ValueError
        If the model has fewer layers than `n`.

    Notes
    -----
    The idea is from ``torchgpipe.balance.balance_by_size`` (Kim et al., 2020: torchgpipe, on-the-fly pipeline
    parallelism), which cuts by the block partitions of Bárány and Grinberg (2015). Here the cut is found by dynamic
    programming, which is exact and fast enough for any model.

    Examples
    --------
    >>> import theano_mgpu, keras
    >>> contexts = theano_mgpu.init('dev0->cpu;dev1->cpu')
    >>> model = keras.Sequential([keras.layers.Dense(3, input_shape=(4,), name='first'),
    ...                           keras.layers.Dense(2, name='second')])
    >>> balance(model, 2)
    {'first': 'dev0', 'second': 'dev1'}
    """
    model = getattr(model, 'template', model)
    check_built(model, 'balance')
    for name, value in (('number of devices', n), ('batch_size', batch_size)):
        if not isinstance(value, int) or value < 1:
            raise ValueError('balance takes a %s, at least 1, not %r' % (name, value))
    layers = [layer for layer in model.layers if not isinstance(layer, InputLayer)]
    there = host_contexts()  # where a process has fewer, the names stand for its own
    if n > len(there):
        raise ContextError('balance over %d devices needs as many contexts; there are %d: %s. Map more, or give a '
                           'smaller number' % (n, len(there), describe(there)))
    if n > len(layers):
        raise ValueError('the model %s has %d layers, which cannot be cut into %d pieces: give a smaller number'
                         % (model.name, len(layers), n))
    outputs = _bytes_of_outputs(model, batch_size)
    costs = [Cost(layer.name, outputs[layer] + _bytes_of_weights(layer, model)) for layer in layers]
    lengths = best_cut([cost.bytes for cost in costs], n)
    return Balance(costs, [context.name for context, length in zip(there, lengths) for _ in range(length)])


def best_cut(costs: list[float], n: int) -> list[int]:
    """Cut costs into `n` contiguous pieces, such that the largest sum of a piece is smallest; return their lengths.

    >>> best_cut([1, 1, 1, 5, 1, 2], 3)
    [3, 1, 2]
    """
    sums = np.concatenate([[0], np.cumsum(costs)])
    # best[stop]: of the best cut of costs[:stop] into k pieces, the largest sum, and where the pieces begin, last first
    best: Any = [(total, [0]) for total in sums]
    for k in range(2, n + 1):
        best = [min((max(best[start][0], sums[stop] - sums[start]), [start] + best[start][1])
                    for start in range(k - 1, stop)) if stop >= k else None for stop in range(len(sums))]
    return np.diff(best[-1][1][::-1] + [len(costs)]).tolist()


def _bytes_of_outputs(model, batch_size):
    """Return the bytes of the outputs of each layer in all its calls, for a batch."""
    sizes: Any = Counter()
    for calls in keras_versions.calls_by_depth(model).values():
        for call in calls:
            sizes[call.outbound_layer] += sum(
                batch_size * int(np.prod([size or 1 for size in tensor._keras_shape[1:]], dtype='int64')) *
                np.dtype(tensor.dtype).itemsize for tensor in call.output_tensors)
    return sizes


def _bytes_of_weights(layer, model):
    states = STATES.get(type(model.optimizer).__name__, 2) if keras_versions.is_compiled(model) else 2
    trained = set(layer.trainable_weights)
    return sum(w.get_value(borrow=True, return_internal_type=True).size * np.dtype(w.dtype).itemsize *
               (2 + states if w in trained else 1) for w in members(layer.weights))
