"""`balance`: propose a cut of a Keras model over several devices, by measured time or by memory."""
from __future__ import annotations

import html
import itertools
import statistics
import time
from collections import Counter
from typing import Any, NamedTuple

import numpy as np
import theano.tensor as T
from keras import backend as K
from keras.layers import Embedding, InputLayer
from keras.models import Model
from theano import Variable
from theano.gradient import DisconnectedInputError, NullTypeGradError

from ...compat import keras_versions
from ...devices.context_map import describe
from ...devices.contexts import contexts as active_contexts
from ...errors import ContextError
from ...graph import graph
from ...runtime import compiler
from ...runtime.replicas.copies import copy_on
from ...runtime.replicas.transfers import Sender, fetch, wait
from ...utils import progress
from ...utils.tables import table
from ..models import members
from .arguments import check_built

WARM_UP, REPEATS = 2, 5
SAMPLES = 32     # of a random batch
# Arrays of the size of the weights that an optimizer keeps; 2 for others, and for a model that is not compiled.
STATES = {'SGD': 1, 'RMSprop': 1, 'Adagrad': 1, 'Adadelta': 2, 'Adam': 2, 'Adamax': 2, 'Nadam': 2}


class Cost(NamedTuple):
    """The cost of a layer: its name, seconds of a forward and a backward pass, and bytes of memory."""

    layer: str
    seconds: float
    bytes: float


class Balance(dict):
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

    def _rows(self):
        rows = [['LAYER', 'MS', 'MB', 'DEVICE']]
        rows += [_row(cost.layer, [cost], self[cost.layer]) for cost in self.costs]
        for device in dict.fromkeys(self.values()):
            own = [cost for cost in self.costs if self[cost.layer] == device]
            rows.append(_row('sum of %d' % len(own), own, device))
        return rows

    def __str__(self):
        return table(self._rows(), right={1, 2})

    def _repr_html_(self):
        rows = ['<tr>%s</tr>' % ''.join('<td>%s</td>' % html.escape(cell) for cell in row) for row in self._rows()]
        return '<table>%s</table>' % ''.join(rows)


def _row(name, costs, device):
    return [name, '%.2f' % (sum(cost.seconds for cost in costs) * 1e3),
            '%.2f' % (sum(cost.bytes for cost in costs) / 2 ** 20), device]


def balance(model: Model, n: int, x: Any = None, by: str = 'time') -> Balance:
    """Propose a cut of a model over several devices, such that the slowest one, or the fullest one, has least.

    Each layer is measured by itself on the first context: a forward and a backward pass over a batch, the median of
    several. The layers, in their order, are then cut into as many pieces as there are devices. Of all cuts, the best
    one is found. Copies between devices are not counted.

    Parameters
    ----------
    model : keras.Model
        Built. It is meant for a chain of layers; of one with branches, the list ``model.layers`` is cut. A nested model
        is one layer. If it is compiled, the memory of its optimizer's state counts.
    n : int
        Devices: the first contexts.
    x : ndarray or list of ndarray, optional
        A batch for the model, of the size that it will be given. By default 32 random samples; zeros for integers.
    by : {'time', 'memory'}
        The quantity in which the pieces are equal, as far as possible.

    Returns
    -------
    Balance
        A dict that `place` takes; printed, a table of the layers and devices. Memory counts the weights, their
        gradients, the state of the optimizer, and the outputs of the layer for the batch.

    Raises
    ------
    ContextError
        If there are fewer contexts.
    ValueError
        If the model has fewer layers than `n`, or an input whose shape is not known and no `x` is given.

    Notes
    -----
    The idea is from ``torchgpipe.balance`` (Kim et al., 2020: torchgpipe, on-the-fly pipeline parallelism), which
    measures in the same way, and cuts by the block partitions of Bárány and Grinberg (2015). Here the cut is found by
    dynamic programming, which is exact and fast enough for any model.

    Examples
    --------
    >>> import theano_mgpu, keras
    >>> contexts = theano_mgpu.init('dev0->cpu;dev1->cpu')
    >>> model = keras.Sequential([keras.layers.Dense(3, input_shape=(4,), name='first'),
    ...                           keras.layers.Dense(2, name='second')])
    >>> balance(model, 2, by='memory')
    {'first': 'dev0', 'second': 'dev1'}
    """
    model = getattr(model, 'template', model)
    check_built(model, 'balance')
    if by not in ('time', 'memory'):
        raise ValueError("by=%r is neither 'time' nor 'memory'" % (by,))
    if not isinstance(n, int) or n < 1:
        raise ValueError('balance takes a number of devices, at least 1, not %r' % (n,))
    layers = [layer for layer in model.layers if not isinstance(layer, InputLayer)]
    there = active_contexts()
    if n > len(there):
        raise ContextError('balance over %d devices needs as many contexts; there are %d: %s. Map more, or give a '
                           'smaller number' % (n, len(there), describe(there)))
    if n > len(layers):
        raise ValueError('the model %s has %d layers, which cannot be cut into %d pieces: give a smaller number'
                         % (model.name, len(layers), n))
    with progress.note_if_long(lambda: 'measuring the %d layers of %s takes a while' % (len(layers), model.name)):
        seconds, sizes = _measured(model, there[0], _values(model, x))
    costs = [Cost(layer.name, seconds[layer], sizes[layer] + _bytes_of_weights(layer, model)) for layer in layers]
    lengths = best_cut([cost.seconds if by == 'time' else cost.bytes for cost in costs], n)
    return Balance(costs, [context.name for context, length in zip(there, lengths) for _ in range(length)])


def best_cut(costs: list[float], n: int) -> list[int]:
    """Cut a list of costs into contiguous pieces, such that the largest sum of a piece is smallest.

    Parameters
    ----------
    costs : list of float
        Not negative.
    n : int
        At most as many pieces as there are costs.

    Returns
    -------
    list of int
        The length of each piece, at least 1.

    Examples
    --------
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


def _values(model, x):
    """Return the values of a batch of inputs, by tensor."""
    if x is not None:
        return dict(zip(keras_versions.feed_inputs(model), keras_versions.standardize(model, x)))
    values, rng = {}, np.random.RandomState(0)
    for tensor in keras_versions.feed_inputs(model):
        shape = tensor._keras_shape
        if None in shape[1:]:
            raise ValueError('the input %s of %s has the shape %s, of which a part is not known: give a batch, x'
                             % (tensor, model.name, shape))
        is_real = K.dtype(tensor).startswith('float') and not _takes_integers(tensor, model)
        values[tensor] = is_real * rng.rand(*((shape[0] or SAMPLES,) + tuple(shape[1:])))
    return values


def _takes_integers(tensor, model):
    return any(tensor in call.input_tensors for layer in model.layers if isinstance(layer, Embedding)
               for call in keras_versions.calls_of(layer))


def _measured(model, context, values):
    """Return the seconds, and the bytes of the outputs, of each layer in all its calls."""
    seconds, sizes = Counter(), Counter()
    mode = getattr(model, '_function_kwargs', {}).get('mode')
    by_depth = sorted(keras_versions.calls_by_depth(model).items(), reverse=True)
    for call in itertools.chain(*(calls for _, calls in by_depth)):
        layer = call.outbound_layer
        if not isinstance(layer, InputLayer):
            duration, results = _measure(call, context, values, mode)
            values.update(results)
            seconds[layer] += duration
            sizes[layer] += sum(value.nbytes for value in results.values())
    return seconds, sizes


def _measure(call, context, values, mode):
    """Return the seconds of a call of a layer, and its results by tensor."""
    inputs = list(dict.fromkeys(tensor for tensor in call.input_tensors + call.input_masks if tensor is not None))
    results = [tensor for tensor in call.output_tensors + call.output_masks
               if isinstance(tensor, Variable) and tensor not in inputs]
    stand_ins = [tensor.type() for tensor in inputs]
    outputs = graph.substitute(results, dict(zip(inputs, stand_ins)))
    inner = [variable for variable, tensor in zip(stand_ins, inputs) if tensor.owner is not None]
    whole = outputs + _gradients(outputs, call.outbound_layer.trainable_weights + inner)
    phase = [v for v in graph.free_inputs(whole) if v not in stand_ins]  # the learning phase: training
    copies = {v: copy_on(context, v, v.get_value()) for v in graph.shared_variables(whole)}
    function = compiler.compile_for(context, stand_ins + phase, whole, {}, copies, mode, call.outbound_layer.name)
    arguments = [np.asarray(values[tensor], tensor.dtype) for tensor in inputs]
    arguments += [np.ones((), v.dtype) for v in phase]
    sender, seconds = Sender(function), []
    for _ in range(WARM_UP + REPEATS):
        sent = sender.send(arguments)
        began = time.perf_counter()
        on_device = function.unwatched_call(*sent)
        wait(on_device)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[WARM_UP:]), dict(zip(results, map(fetch, on_device)))


def _gradients(outputs, wrt):
    """Return the gradients of the sum of all outputs; none where an op has no gradient."""
    wrt = [variable for variable in wrt if variable.dtype.startswith('float')]
    terms = [output.sum() for output in outputs if output.dtype.startswith('float')]
    try:
        return T.grad(sum(terms), wrt, disconnected_inputs='ignore') if terms and wrt else []
    except (DisconnectedInputError, NotImplementedError, NullTypeGradError):
        return []


def _bytes_of_weights(layer, model):
    states = STATES.get(type(model.optimizer).__name__, 2) if keras_versions.is_compiled(model) else 2
    trained = set(layer.trainable_weights)
    return sum(w.get_value(borrow=True, return_internal_type=True).size * np.dtype(w.dtype).itemsize *
               (2 + states if w in trained else 1) for w in members(layer.weights))
