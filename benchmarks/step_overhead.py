#!/usr/bin/env python
"""The overhead of a step over contexts: some ratios, measured in one run.

  plain   one and two `cpu` contexts through mgpu, against the plain theano.function of the same step, and the calls of
          the compiled functions of mgpu alone, with the same arguments; with a GPU or OpenCL device, one and two
          contexts on it against one Theano function there
  shared  the batch over two contexts that share one device's cores, against the batch on one of them

Both sides of a ratio take turns, a block of steps each; the ratio is the median over the rounds of the
ratio within a round. Examples:

  python benchmarks/step_overhead.py
  python benchmarks/step_overhead.py --device opencl0:0 --device opencl0:1 --models cnn --rounds 15
"""
import os
import sys

os.environ['THEANO_FLAGS'] = 'floatX=float32,' + os.environ.get('THEANO_FLAGS', '')

import theano_mgpu as mgpu
from theano_mgpu.devices import discovery
from theano_mgpu.devices.transfers import DeviceBuffers
from theano_mgpu.graph import graph
from theano_mgpu.runtime import compiler
from theano_mgpu.runtime.replicas.replicated import copy_on

import numpy as np
import theano
from models import adam, cnn, lstm, mlp, plain_step
from turns import compare, make_parser, show_all

MODELS = {'cnn': (cnn, (1, 28, 28)), 'mlp': (mlp, (784,)), 'lstm': (lstm, (20, 32)),
          'small': (lambda: mlp(sizes=(16, 16, 10)), (16,))}


def parse_arguments():
    parser = make_parser(__doc__, rounds=11)
    parser.add_argument('--models', nargs='+', choices=sorted(MODELS), default=['cnn', 'mlp', 'lstm'])
    parser.add_argument('--batch-size', type=int, default=128)
    parser.add_argument('--block', type=float, default=1.0, metavar='SECONDS', help='length of one side of a round')
    parser.add_argument('--device', action='append', help='one of the two devices of "shared"; give it twice')
    parser.add_argument('--json', metavar='FILE')
    return parser.parse_args()


def step_on(make_model, contexts):
    """Return a training step over contexts; over none, the plain function."""
    model = make_model()
    if contexts is None:
        return plain_step(model)
    return mgpu.training_function(model.inputs, model.loss, model.params, adam, contexts=contexts)


def one_function_on(context, make_model):
    """Return a step as one Theano function on a device, as plain Theano computes it there."""
    model = make_model()
    updates = adam(theano.grad(model.loss, model.params), model.params)
    variables = graph.shared_variables([model.loss] + list(updates.values()))
    replicas = {variable: copy_on(context, variable, variable.get_value()) for variable in variables}
    function = compiler.compile_for(context, model.inputs, [model.loss], updates, replicas)
    buffers = DeviceBuffers(context)

    def step(*batch):
        given = [buffers.send(i, value) if takes else value
                 for i, (value, takes) in enumerate(zip(batch, function.mgpu_takes))]
        outputs = dict(zip(function.mgpu_order, function(*given)))
        loss, *values = [outputs[i] for i in range(len(outputs))]
        for variable, value in zip(updates, values):
            replicas[variable].container.storage[0] = value
        return np.asarray(loss)
    return step


def bare_calls(step, batch):
    """Return a function that calls the compiled functions of a step, with their arguments of one batch."""
    functions, calls = list(dict.fromkeys(step.functions)), []

    def noted(function):
        def call(*given):
            calls.append((original, given))
            return original(*given)
        original = function.mgpu_call
        return call
    own = [function.mgpu_call for function in functions]
    for function in functions:
        function.mgpu_call = noted(function)
    step(*batch)
    for function, call in zip(functions, own):
        function.mgpu_call = call
    return lambda *_: [function(*given) for function, given in calls]


def pair(ours, theirs, batch, arguments, title):
    return compare(lambda: ours(*batch), lambda: theirs(*batch), title, arguments.rounds, arguments.block)


def measure(arguments):
    rng = np.random.RandomState(0)
    shared = arguments.device or (discovery.discover('cuda')[0] or discovery.discover('opencl')[0])[:2]
    shared = (shared * 2)[:2]
    for name in arguments.models:
        make_model, shape = MODELS[name]
        batch = (rng.rand(arguments.batch_size, *shape).astype('float32'),
                 rng.randint(0, 10, arguments.batch_size).astype('int32'))
        for n, names in ((1, ['a']), (2, ['a', 'b'])):
            mgpu.init(';'.join(each + '->cpu' for each in names))
            step, title = step_on(make_model, names), '%s: %s%d cpu context%s / plain theano.function'
            for ours, what in ((step, ''), (bare_calls(step, batch), 'bare calls of ')):
                yield pair(ours, step_on(make_model, None), batch, arguments, title % (name, what, n, 's' * (n > 1)))
        if shared:
            contexts = mgpu.init('dev0->%s;dev1->%s' % tuple(shared))
            for n, names in ((1, ['dev0']), (2, ['dev0', 'dev1'])):
                row = pair(step_on(make_model, names), one_function_on(contexts[0], make_model), batch, arguments,
                           '%s: %d context%s (%s) / one function there' % (name, n, 's' * (n > 1), shared[0]))
                yield row
                if name == 'small':
                    print('%62s = %.0f microseconds a step and context more'
                          % ('', 1e6 * (row['ours'] / n - row['theirs'])))
            yield pair(step_on(make_model, ['dev0', 'dev1']), step_on(make_model, ['dev0']), batch, arguments,
                       '%s: two contexts (%s, %s) / one' % ((name,) + tuple(shared)))


def main():
    arguments = parse_arguments()
    print('batch %d, %d rounds, median (lowest to highest)' % (arguments.batch_size, arguments.rounds))
    show_all(measure(arguments), arguments.json)
    return 0


if __name__ == '__main__':
    sys.exit(main())
