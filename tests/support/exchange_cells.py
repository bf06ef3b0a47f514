"""A training over each way to exchange sums: the cells of the table of tests/exchange, in any process.

A cell has three choices: the order of additions, the owner of each sum, and the channel that the parts take.
"""
import itertools
import os
import signal
import sys
import warnings
from typing import NamedTuple

TESTS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path[:0] = [path for path in (TESTS, os.path.join(os.path.dirname(TESTS), 'benchmarks')) if path not in sys.path]

import theano_mgpu as mgpu
from theano_mgpu.errors import MgpuWarning

import numpy as np
import theano
import theano.tensor as T
from models import adam
from theano.configparser import change_flags

SIZES = 9, 16, 13, 5, 2, 1  # at most two samples in a logical shard; the last batches leave contexts without samples
SHARDS = 8
RATE, DECAY = np.float32(2 ** -6), np.float32(.5)


class Cell(NamedTuple):
    """A way to exchange sums.

    Attributes
    ----------
    order : {'any', 'tree'}
    owner : {'all', 'one', 'host'}
        Who gets a sum that the update reads: all contexts, one of them (``update_on='sharded'``), or the host.
    channel : {'none', 'host', 'nccl'}
        ``'none'`` is one context alone.
    contexts : int
        Of this process.
    executor : str
    """

    order: str
    owner: str
    channel: str
    contexts: int
    executor: str = 'auto'

    def __str__(self):
        return '-'.join(map(str, self))

    def flags(self):
        """Return a block with the flags that choose the order and the channel."""
        return change_flags(**{'mgpu.logical_shards': SHARDS if self.order == 'tree' else 0, 'mgpu.shares': 'equal',
                               'mgpu.collectives': 'nccl' if self.channel == 'nccl' else 'host'})

    def options(self):
        """Return the keywords of `mgpu.training_function` that choose the owner."""
        where = {'all': 'device', 'one': 'sharded', 'host': 'host'}[self.owner]
        return dict(update_on=where, executor=self.executor)

    def check_plan(self, plan):
        """Raise an AssertionError if a plan has not this order, owner and channel."""
        chosen = {choice.what: choice.chosen for choice in plan.choices}
        by_nccl = {'any': 'NCCL', 'tree': 'NCCL by blocks'}[self.order]
        assert (self.order == 'tree') == ('logical shards' in chosen), plan
        assert chosen.get('collectives', 'the host') == (by_nccl if self.channel == 'nccl' else 'the host'), plan
        if self.channel != 'none':
            words = {'all': 'on each context', 'one': 'each parameter on one of the ', 'host': 'on the host'}
            assert chosen['update'].startswith(words[self.owner]), plan


def table(channels, numbers, owners=('all', 'one')):
    """Return the cells of some channels and numbers of contexts; one context alone has neither owner nor channel."""
    alone = [Cell(order, 'all', 'none', 1) for order in ('any', 'tree')]
    return alone + [Cell(order, owner, channel, n) for n, channel, order, owner in itertools.product(
        numbers, channels, ('any', 'tree'), owners)]


def shared(value, name):
    return theano.shared(np.asarray(value, 'float32'), name)


class Net:
    """A net whose sums need all that an exchange has: small and large ones, some in the middle of a step.

    The gradients of `exact` are the same bits on any device, as far as they are of one shard: an element is one
    subtraction for each sample, and powers of two; or the product of a sample and a power of two. Their sums depend on
    the order of additions alone. `exact` takes momentum, and the weights of the dense layers Adam.

    Parameters
    ----------
    dense : bool
        Whether there are dense layers, and a large sum: OpenCL on the CPU takes long for them.

    Attributes
    ----------
    exact, weights : list of SharedVariable
    variables : list of SharedVariable
        All that a step has changed, once it is compiled.
    """

    def __init__(self, dense=True):
        rng = np.random.RandomState(3)
        x, labels = T.matrix('x', dtype='float32'), T.ivector('labels')
        scale = scales(1500 if dense else 20)  # 36 kB are a message of their own
        self.exact = [shared(np.zeros(6), 'small'), shared(np.zeros((6, len(scale))), 'large')]
        self.product = shared(np.zeros((6, 6000)), 'product')  # large enough for shards on the host to be added as one
        self.weights = [shared(rng.randn(6, 40) * .3, 'w1'), shared(np.zeros(40), 'b1'),
                        shared(rng.randn(40, 250) * .1, 'w2'), shared(rng.randn(250, 3) * .1, 'w3')]
        targets = x, x.dimshuffle(0, 1, 'x') * scale
        self.loss = sum((T.sqr(value - target) * np.float32(.5)).sum() for value, target in zip(self.exact, targets))
        self.inputs, self.variables = [x, labels] if dense else [x], []
        if dense:
            self.exact.append(self.product)
            self.loss += self._dense_loss(x, labels) + (T.dot(x, self.product) * scales(6000)).sum()
        self.params = self.exact + self.weights * dense

    def _dense_loss(self, x, labels):
        w1, b1, w2, w3 = self.weights
        hidden = T.tanh(T.dot(x, w1) + b1)
        hidden = T.tanh(T.dot(hidden - hidden.mean(axis=0), w2))
        return T.nnet.categorical_crossentropy(T.nnet.softmax(T.dot(hidden, w3)), labels).mean()

    def updates(self, gradients, params):
        n, found = len(self.exact), {}
        for param, gradient in zip(params[:n], gradients[:n]):
            velocity = shared(param.get_value() * 0, 'velocity')
            found[velocity] = DECAY * velocity - RATE * gradient
            found[param] = param + found[velocity]
        if gradients[n:]:
            found.update(adam(gradients[n:], params[n:], learning_rate=.01, epsilon=1e-3))
        self.variables = list(found)
        return found

    def values(self):
        return [variable.get_value() for variable in self.variables]


def scales(n):
    """Return n powers of two."""
    return (2. ** (np.arange(n) % 7 - 3)).astype('float32')


def batch(number, size):
    rng = np.random.RandomState(100 + number)
    return rng.randn(size, 6).astype('float32'), rng.randint(0, 3, size).astype('int32')


def trained(step, net, fails=None):
    """Return the losses of all batches, and what they have made of the variables.

    Before a step, ``fails(step, net, number)`` may have it fail, which changes nothing.
    """
    losses = []
    with warnings.catch_warnings():
        warnings.simplefilter('error', MgpuWarning)  # after an error of NCCL, the host would add the sums
        for i, size in enumerate(SIZES):
            if fails:
                fails(step, net, i)
            losses.append(step(*batch(i, size)[:len(net.inputs)]))
    return [np.array(losses), *net.values()]


def over_contexts(cell, mode=None, dense=True, fails=None):
    """Return what `trained` does over the contexts of this process."""
    net = Net(dense)
    with cell.flags():
        step = mgpu.training_function(net.inputs, net.loss, net.params, net.updates, mode=mode, name=str(cell),
                                      **cell.options())
    cell.check_plan(step.plan)
    return trained(step, net, fails)


def on_one_device(mode=None, dense=True):
    """Return what `trained` does by plain Theano."""
    net = Net(dense)
    updates = net.updates(theano.grad(net.loss, net.params), net.params)
    return trained(theano.function(net.inputs, net.loss, updates=list(updates.items()), mode=mode), net)


def in_the_order_of_the_tree(dense=True):
    """Return the bits of `exact` and of its velocity, by NumPy: parts are added two by two, level by level.

    A part of an odd number stays for the next level. Logical shard k of n has the samples from ``size * k // n`` on.
    """
    found = []
    for number, columns in enumerate([None, 1500, 6000] if dense else [None, 20]):
        value = velocity = np.zeros((6, columns) if columns else 6, 'float32')
        for i, size in enumerate(SIZES):
            x, _ = batch(i, size)
            targets, n = x[:, :, None] * scales(columns) if columns else x, min(SHARDS, size)
            of_samples = targets if number == 2 else value - targets
            parts = [sum(of_samples[size * shard // n:size * (shard + 1) // n]) for shard in range(n)]
            while len(parts) > 1:
                parts = [sum(parts[k:k + 2]) for k in range(0, len(parts), 2)]
            velocity = DECAY * velocity - RATE * parts[0]
            value = value + velocity
        found += [velocity, value]
    return found


COLUMNS = 200000, 220000, 10, 750000  # of six rows in float32: 4.8, 5.3 and 18 MB are several messages, or pieces


def large_sums(cell):
    """Return parameters after three steps, in which sums are too large to be exchanged at once."""
    x, params = T.matrix('x', dtype='float32'), [shared(np.zeros((6, n)), 'w%d' % n) for n in COLUMNS]
    loss = sum((T.dot(x, param) * scales(n)).sum() for n, param in zip(COLUMNS, params))
    with cell.flags():
        step = mgpu.training_function([x], loss, params, lambda gradients: [
            (param, param - RATE * gradient) for param, gradient in zip(params, gradients)], **cell.options())
    cell.check_plan(step.plan)
    with warnings.catch_warnings():
        warnings.simplefilter('error', MgpuWarning)
        for i, size in enumerate((7, 2, 8)):
            step(batch(i, size)[0])
    return [param.get_value() for param in params]


def check_large_sums(cells):
    """Train in each cell, and compare with NumPy: to the bit in the order of the tree. A sample is a logical shard."""
    expected = np.zeros(6, 'float32')
    for i, size in enumerate((7, 2, 8)):
        parts = list(batch(i, size)[0])
        while len(parts) > 1:
            parts = [sum(parts[k:k + 2]) for k in range(0, len(parts), 2)]
        expected = expected - RATE * parts[0]  # powers of two change no bits
    for cell in cells:
        for n, found in zip(COLUMNS, large_sums(cell)):
            wanted = expected[:, None] * scales(n)
            if cell.order == 'tree':
                assert (found == wanted).all(), '%s, %d columns: not in the order of the tree' % (cell, n)
            np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6, err_msg=str(cell))


def save(path, cells, make=None, mode=None, fails=None):
    """Train in each cell, and have rank 0 write all results, or the text of a cell's error, to a file.

    Parameters
    ----------
    path : str
    cells : list of Cell
    make : callable, optional
        ``make(n)`` opens n contexts; `mgpu.init` by default.
    mode : theano.Mode, optional
    fails : callable, optional
        As for `trained`.
    """
    found = {}
    for n, group in itertools.groupby(sorted(cells, key=lambda cell: cell.contexts), lambda cell: cell.contexts):
        (make or mgpu.init)(n)
        for cell in group:
            for i, value in enumerate(over_contexts(cell, mode, fails=fails)):
                found['%s|%02d' % (cell, i)] = value
    if mgpu.rank() == 0:
        np.savez(str(path), **found)


def load(path):
    """Return the results that `save` has written: a dict of str to list of ndarray."""
    found = {}
    with np.load(str(path)) as file:
        for name in sorted(file.files):
            found.setdefault(name.partition('|')[0], []).append(file[name])
    return found


def of_ranks(path, *numbers, fails=None):
    """Train over some numbers of `cpu` contexts in each rank, through the host: a job of rank_jobs.py."""
    from support.modes import PYTHON
    cells = [cell for cell in table(['host'], map(int, numbers)) if cell.channel != 'none']
    save(path, cells, lambda n: mgpu.init(';'.join('host%d->cpu' % i for i in range(n))), PYTHON, fails)


def failing_ranks(path, *numbers):
    """Train as `of_ranks` does; in some steps the last rank fails, at their beginning or end, which all ranks see."""
    of_ranks(path, *numbers, fails=fails_on_the_last_rank)


def fails_on_the_last_rank(step, net, number):
    from support.faulty_executor import FaultyExecutor, faulty
    executor = step.executable.launcher.executor
    faults = executor if isinstance(executor, FaultyExecutor) else faulty(step)
    run = {1: 0, 2: -1, 3: 0}.get(number)
    if run is None:
        return
    before = net.values()
    if mgpu.rank() == mgpu.size() - 1:
        faults.inject(MemoryError('no memory left'), run)
    try:
        step(*batch(number, SIZES[number]))
    except Exception as error:
        assert type(error) is MemoryError, error
    else:
        raise AssertionError('the step has not failed')
    faults.inject(None)
    for old, new in zip(before, net.values()):
        np.testing.assert_array_equal(new, old)


def killed(path, order, owner):
    """Train in one cell; the last rank is killed in its third step, when it begins to compute the update.

    Files beside the path with the endings .struck and .ended say how far the job has come.
    """
    def kill(step, net, number):
        from support.faulty_executor import faulty
        if mgpu.rank() == mgpu.size() - 1 and number == 1:
            kill.faults = faulty(step)
        if mgpu.rank() == mgpu.size() - 1 and number == 2:
            open(path + '.struck', 'w').close()
            kill.faults.inject(lambda: os.kill(os.getpid(), signal.SIGKILL), -1)
    mgpu.init('host0->cpu;host1->cpu')
    from support.modes import PYTHON
    over_contexts(Cell(order, owner, 'host', 2), PYTHON, fails=kill)
    open(path + '.ended', 'w').close()
