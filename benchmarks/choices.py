#!/usr/bin/env python
"""A comparison of the choices that theano_mgpu makes by itself with the alternatives, in turns.

  dispatch   a thread for each context, against one thread that launches on every context and then fetches
  transfers  gradients fetched one by one, or all through one flat array, against small ones through one array
  update     the update on the host, or divided among the contexts, against on each context (`update_on`)
  input      each batch prepared when it is needed, against sent while the previous one is computed

A ratio below 1 means that the first way of a pair is faster. Examples:

  python benchmarks/choices.py dispatch update
  THEANO_FLAGS='contexts=a->cuda0;b->cuda1' python benchmarks/choices.py
"""
import os
import sys

os.environ['THEANO_FLAGS'] = 'floatX=float32,' + os.environ.get('THEANO_FLAGS', '')

import theano_mgpu as mgpu
from theano_mgpu.comm.host_sum import describe
from theano_mgpu.devices import discovery, transfers
from theano_mgpu.devices.context_map import default_map
from theano_mgpu.devices.contexts import gpu_context
from theano_mgpu.exchange import layout
from theano_mgpu.exchange.memory import Memories
from theano_mgpu.utils import flag_text

import numpy as np
from models import Classifier, adam, mlp
from step_overhead import MODELS
from turns import compare, make_parser, show

CHOICES = {}


def choice(function):
    CHOICES[function.__name__] = function
    return function


def regression(seed=0, sizes=(784, 1024, 1024, 10)):
    """Return the MLP with a squared error: all its ops run on OpenCL, so that no launch waits for the device."""
    model = mlp(seed, sizes)
    model.loss = ((model.probabilities - 0.1) ** 2).mean() + 0 * model.inputs[1].sum()
    return model


def batch_of(shape, size, seed=0):
    rng = np.random.RandomState(seed)
    return rng.rand(size, *shape).astype('float32'), rng.randint(0, 10, size).astype('int32')


def training(make_model, **options):
    model = make_model()
    assert isinstance(model, Classifier)
    return mgpu.training_function(model.inputs, model.loss, model.params, adam, **options)


def waiting(step):
    """Return a step that waits for its new values: devices would compute them in the time of the other side."""
    def run(*batch):
        step(*batch)
        transfers.wait(copy.container.storage[0] for each in step.updated for copy in each.copies.values())
    return run


def pair(first, second, shape, arguments, title):
    batch = batch_of(shape, arguments.batch_size)
    show(compare(lambda: first(*batch), lambda: second(*batch), title, arguments.rounds, arguments.block))


@choice
def dispatch(arguments, maps):
    """Compare threads with serial."""
    models = dict(MODELS, regression=(regression, (784,)))
    for mapped in maps:
        contexts = mgpu.init(mapped)
        for name in ('small', 'mlp', 'regression', 'lstm', 'cnn'):
            make_model, shape = models[name]
            steps = [training(make_model, executor=name, update_on='device') for name in ('threads', 'serial')]
            waits = any(entry.op.__class__.__name__ == 'HostFromGpu' for entry in mgpu.audit(steps[0]))
            pair(*steps, shape, arguments, '%s on %s%s: threads / serial'
                 % (name, contexts[0].kind, ', blocks' if waits else ''))


@choice
def update(arguments, maps):
    """Compare an update on the host, or divided among the contexts, with one on each context."""
    for mapped in maps:
        contexts = mgpu.init(mapped)
        for name in ('mlp', 'cnn'):
            make_model, shape = MODELS[name]
            for where, title in [('host', 'on host')] + [('sharded', 'divided')] * (contexts[0].kind != 'cpu'):
                steps = [waiting(training(make_model, update_on=each)) for each in (where, 'device')]
                pair(*steps, shape, arguments, '%s on %s: update %s / device' % (name, contexts[0].kind, title))


SHAPES = {'4 small arrays': [(16, 16), (16,), (16, 10), (10,)], '40 arrays of 16 KB': [(64, 64)] * 40,
          "the MLP's 6, 7.6 MB": [(784, 1024), (1024,), (1024, 1024), (1024,), (1024, 10), (10,)],
          '8 arrays of 1 MB': [(512, 512)] * 8}


@choice
def transfers_(arguments, maps):
    """Compare copies one by one, and all through one buffer, with small ones through one."""
    from pygpu import gpuarray
    for mapped in maps:
        context = mgpu.init(mapped)[0]
        if context.kind == 'cpu':
            continue
        there = gpu_context(context)
        for title, shapes in SHAPES.items():
            arrays = [gpuarray.array(np.ones(shape, 'float32'), dtype='float32', context=there) for shape in shapes]
            fetchers, usual = {}, layout.SMALL
            for small in (0, usual, 1 << 30):
                layout.SMALL = small
                fetchers[small] = fetcher_of(context, arrays)
            layout.SMALL = usual
            for small, way in ((0, 'one by one'), (1 << 30, 'all through one')):
                show(compare(lambda small=small, arrays=arrays, f=fetchers: fetched(f[small], arrays),
                             lambda arrays=arrays, f=fetchers[usual]: fetched(f, arrays),
                             'fetch %s on %s: %s / small ones' % (title, context.kind, way), arguments.rounds,
                             arguments.block))


def fetcher_of(context, arrays):
    """Return a fetcher of arrays from a context in one block."""
    memories, places = Memories(), layout.Layout(describe(arrays))
    here = places.allocated(lambda shape, dtype: memories.on_host(shape, dtype, [context]))
    return memories.fetcher(context, places, layout.blocks_of(places, 1 << 40), here)


def fetched(fetcher, arrays):
    """Return arrays of a device on the host."""
    fetcher.start(arrays)
    fetcher.arrive(0)
    return fetcher.here.views


CHOICES['transfers'] = CHOICES.pop('transfers_')


@choice
def input(arguments, maps):
    """Compare batches in turn and ahead: each batch is gathered from its rows, as Keras's fit does."""
    for mapped in maps:
        contexts = mgpu.init(mapped)
        for size in (84, 168):
            make_model, shape = regression_on(size), (size * size,)
            data = batch_of(shape, 8 * arguments.batch_size)
            order = np.random.RandomState(1).permutation(len(data[0])).reshape(8, -1)
            step = training(make_model)

            def batches(data=data, order=order):
                return ([part[rows] for part in data] for rows in order)
            show(compare(lambda step=step, batches=batches: [step(*batch) for batch in batches()],
                         lambda step=step, batches=batches: list(step.over(batches(), ahead=True)),
                         'input of %d KB a batch on %s: in turn / ahead'
                         % (data[0][0].nbytes * arguments.batch_size >> 10, contexts[0].kind),
                         arguments.rounds, arguments.block))


def regression_on(size):
    return lambda: regression(sizes=(size * size, 16, 10))


def parse_arguments():
    parser = make_parser(__doc__, rounds=9)
    parser.add_argument('choices', nargs='*', metavar='CHOICE', help='of: %s (default: all)' % ', '.join(CHOICES))
    parser.add_argument('--batch-size', type=int, default=128)
    parser.add_argument('--block', type=float, default=0.5, metavar='SECONDS', help='length of one side of a round')
    arguments = parser.parse_args()
    unknown = [name for name in arguments.choices if name not in CHOICES]
    if unknown:
        parser.error('%s: choose from %s' % (', '.join(unknown), ', '.join(CHOICES)))
    return arguments


def main():
    arguments = parse_arguments()
    devices = (discovery.discover('cuda')[0] or discovery.discover('opencl')[0])[:2]
    maps = ['host0->cpu;host1->cpu'] + ([default_map((devices * 2)[:2])] if devices else [])
    if flag_text.flag('contexts'):
        maps = [flag_text.flag('contexts')]
    print('batch %d, %d rounds, median (lowest to highest)' % (arguments.batch_size, arguments.rounds))
    for name in arguments.choices or CHOICES:
        CHOICES[name](arguments, maps)
    return 0


if __name__ == '__main__':
    sys.exit(main())
