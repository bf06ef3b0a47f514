"""Random trainings over each way to exchange sums, with faults in the middle: they end as on one device.

`check` trains one `Case`. Programs on the CUDA stand-in call it, too, as tests/exchange/test_combinations.py does.
"""
import collections
import contextlib
import ctypes
import functools
import warnings
from typing import NamedTuple

import theano_mgpu as mgpu
from theano_mgpu.errors import MgpuError, MgpuWarning
from theano_mgpu.plan import buckets
from theano_mgpu.utils.attributes import temporarily

import numpy as np
import theano
import theano.tensor as T
from hypothesis import strategies as st
from models import adam
from theano.configparser import change_flags

from .faulty_executor import faulty
from .modes import PYTHON
from .small_models import host_indexing, shared

N_CONTEXTS, SHARDS, ROWS = 4, 5, 7
met = collections.Counter()  # faults that have led to an error, and others, which their step had no place for


class Case(NamedTuple):
    """A training, and a fault in one of its steps.

    Attributes
    ----------
    order : {'any', 'tree'}
    owner : {'device', 'sharded', 'host'}
        The keyword `update_on`.
    channel : {'host', 'blocks', 'nccl', 'beside'}
        The host, also with blocks of a few kB; NCCL, also beside the next gradients, in pieces.
    contexts : int
        Contexts that divide each batch; 1 is a replica alone.
    placed : bool
        Whether the parts of the model are on two contexts in place of this: one replica alone.
    micro_batches : int
    executor : {'serial', 'threads'}
    sizes : list of int
        Samples of each batch.
    fault : {'none', 'op', 'interrupt', 'memory'}
        A sample that an op fails for, Ctrl-C in a task, or too little memory on a device.
    step : int
        The step with the fault.
    when : int
        The sample; the run of the executor, from the beginning of the step or its end; or the number of allocations
        before the one that fails.
    replica : int
        The one that has the fault, if there are as many.
    """

    order: str
    owner: str
    channel: str
    contexts: int
    placed: bool
    micro_batches: int
    executor: str
    sizes: list
    fault: str
    step: int
    when: int
    replica: int


@st.composite
def cases(draw, on_devices=False):
    """Draw a Case that can run in one process."""
    order = draw(st.sampled_from(['any', 'tree']))
    placed = draw(st.integers(0, 4)) == 4
    n = 1 if placed else draw(st.integers(1, N_CONTEXTS))
    sizes = draw(st.lists(st.integers(1, 11), min_size=3, max_size=5))
    fault = draw(st.sampled_from(['none', 'op', 'interrupt', 'memory']))
    when = draw(st.integers(0, 40) if fault == 'memory' and on_devices else st.integers(-4, 5))
    case = Case(order, draw(st.sampled_from(['device', 'sharded', 'host'])),
                draw(st.sampled_from(['host', 'blocks', 'nccl'])) if on_devices and n > 1 else 'host', n, placed,
                1 if order == 'tree' else draw(st.integers(1, 3)), draw(st.sampled_from(['serial', 'threads'])), sizes,
                fault, draw(st.integers(1, len(sizes) - 1)), when, draw(st.integers(0, n - 1)))
    is_beside = case.channel == 'nccl' and order == 'any' and draw(st.booleans())
    return case._replace(channel='beside') if is_beside else case


class Model:
    """A model with rows that are looked up, a mean over the batch in the middle, and a small and a large layer.

    Parameters
    ----------
    places : list of str, optional
        The contexts of its two parts.
    """

    def __init__(self, places=None):
        rng, self.variables = np.random.RandomState(0), []
        x, ids = T.matrix('x', dtype='float32'), T.ivector('ids')
        self.inputs = [x, ids]
        self.params = [shared(rng.randn(*shape) * .4, name) for name, shape in (
            ('rows', (ROWS, 6)), ('w1', (5, 6)), ('b', (6,)), ('w2', (6, 1500)))]
        rows, w1, b, w2 = self.params

        def on(i):
            return mgpu.device(places[i]) if places else contextlib.nullcontext()
        with on(0):
            h = T.tanh(T.dot(x, w1) + rows[ids])
        with on(1):
            h = T.tanh(T.dot(h - h.mean(axis=0) + b, w2))
            self.loss = T.sqr(h - x.sum(axis=1, keepdims=True)).mean(dtype='float32')

    def updates(self, gradients, params):
        found = adam(gradients, params, learning_rate=.01, epsilon=1e-3)
        self.variables = list(found)
        self.start = self.values()
        return found

    def values(self):
        return [variable.get_value() for variable in self.variables]

    def reset(self):
        for variable, value in zip(self.variables, self.start):
            variable.set_value(value)


def batch(number, size):
    rng = np.random.RandomState(number)
    return rng.randn(size, 5).astype('float32'), rng.randint(0, ROWS, size).astype('int32')


@functools.lru_cache(maxsize=None)
def plain():
    """Return a model and its step of plain Theano."""
    model = Model()
    updates = model.updates(theano.grad(model.loss, model.params), model.params)
    return model, theano.function(model.inputs, model.loss, updates=list(updates.items()), mode=PYTHON)


@functools.lru_cache(maxsize=None)
def made(order, owner, channel, n, placed, micro_batches, executor):
    """Return a model, its step over contexts, and the executor that injects faults."""
    names = [context.name for context in mgpu.contexts()]
    on_cpu = mgpu.contexts()[0].kind == 'cpu'
    model = Model(names[:2] if placed else None)
    mode = PYTHON if on_cpu else host_indexing()
    with change_flags(**{'mgpu.logical_shards': SHARDS if order == 'tree' else 0, 'mgpu.shares': 'equal',
                         'mgpu.collectives': 'nccl' if channel in ('nccl', 'beside') else 'host',
                         'mgpu.overlap': str(channel == 'beside')}), \
            temporarily(buckets, 'LEAST', 1):
        step = mgpu.training_function(
            model.inputs, model.loss, model.params, model.updates, update_on=owner, executor=executor, mode=mode,
            contexts=None if placed else names[:n], micro_batches=micro_batches)  # 'auto' would take other ways
    assert not step.refused, step.refused
    assert step.plan.overlaps == (channel == 'beside') == (len(step.plan.stages[-1].parts) > 1 and not placed)
    if channel == 'blocks':
        for _, each in step.executable.exchanges.values():
            each._memories.block = 3000
    return model, step, faulty(step)


class Struck:
    """A fault that has been injected into the next call of a step."""

    def __init__(self, case, faults):
        self.case, self.faults, self.before = case, faults, faults.struck
        self.on_device = case.fault == 'memory' and mgpu.contexts()[0].kind != 'cpu'
        if self.on_device:
            _cuda().cudaOnCpuFailAllocAfter(case.replica, ctypes.c_long(case.when))
        elif case.fault != 'op':
            error = KeyboardInterrupt() if case.fault == 'interrupt' else MemoryError('no memory left')
            faults.inject(error, case.when, case.replica)

    def end(self):
        """End it; return whether the call has to fail."""
        if self.on_device:
            _cuda().cudaOnCpuFailAllocAfter(self.case.replica, ctypes.c_long(-1))
            return None
        if self.case.fault != 'op':
            self.faults.inject(None)
        return self.case.fault == 'op' or self.faults.struck > self.before


def _cuda():
    return ctypes.CDLL('libcuda.so')


EXPECTED = {'op': (IndexError, MgpuError), 'interrupt': (KeyboardInterrupt,), 'memory': (MemoryError, MgpuError)}


def check(case):
    """Train over contexts and on one device, and compare; after a fault all variables are as they were."""
    model, step, faults = made(*case[:7])
    reference, on_one = plain()
    model.reset(), reference.reset()
    for number, size in enumerate(case.sizes):
        good = batch(number, size)
        if number == case.step and case.fault != 'none':
            fails(case, model, step, faults, good)
        np.testing.assert_allclose(quietly(step, *good), on_one(*good), rtol=1e-4, atol=1e-6,
                                   err_msg='the loss of step %d' % number)
        compare(model, reference, 'step %d' % number)
    if case.order == 'tree' and not case.placed:
        in_bits(case, model)


def quietly(step, *args):
    with warnings.catch_warnings():
        warnings.simplefilter('ignore', MgpuWarning)  # of contexts without samples
        return step(*args)


def fails(case, model, step, faults, good):
    """Have a call fail, and check that it has changed nothing; undo a call that the fault has not met."""
    before, struck, x_and_ids = model.values(), Struck(case, faults), good
    if case.fault == 'op':
        ids = good[1].copy()
        ids[case.when % len(ids)] = ROWS
        x_and_ids = good[0], ids
    error = None
    try:
        quietly(step, *x_and_ids)
    except EXPECTED[case.fault] as raised:
        error = raised
    finally:
        expected = struck.end()
    assert expected is None or bool(error) == expected, 'fault %s, error %r' % (expected, error)
    met[case.fault if error else 'nothing'] += 1
    if error is None:
        for variable, value in zip(model.variables, before):
            variable.set_value(value)
        return
    for variable, old, new in zip(model.variables, before, model.values()):
        np.testing.assert_array_equal(new, old, err_msg='%s after %r' % (variable, error))


def compare(model, reference, where):
    for variable, ours, theirs in zip(model.variables, model.values(), reference.values()):
        np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=2e-6, err_msg='%s after %s' % (variable, where))


def in_bits(case, model):
    """Compare the bits of a training in the order of the tree with a training on one context, without faults."""
    alone, step, _ = made('tree', 'device', 'host', 1, False, 1, 'serial')
    found = model.values()
    alone.reset()
    for number, size in enumerate(case.sizes):
        step(*batch(number, size))
    for variable, ours, theirs in zip(alone.variables, found, alone.values()):
        np.testing.assert_array_equal(ours, theirs, err_msg='%s in the order of the tree' % variable)
