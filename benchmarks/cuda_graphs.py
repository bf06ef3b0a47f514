#!/usr/bin/env python
"""A training step in one CUDA graph for each part, against the same step op by op, over one context or several.

Both sides take turns, a block of steps each; the ratio is the median over the rounds of the ratio within a round.
Examples:

  python benchmarks/cuda_graphs.py
  python benchmarks/cuda_graphs.py --contexts 1 2 4 8 --models mlp lstm --batch-size 32
  python tests/cuda_on_cpu run --devices 4 --set LAUNCH_US=6 .venv/bin/python benchmarks/cuda_graphs.py --models small
"""
import functools
import os
import sys

os.environ['THEANO_FLAGS'] = 'floatX=float32,' + os.environ.get('THEANO_FLAGS', '')

import theano_mgpu as mgpu
from theano_mgpu.runtime.graph_calls import GraphCalls

import numpy as np
from models import adam
from step_overhead import MODELS
from turns import compare, make_parser, show_all

WARM_UP = 30  # steps, after which all parts are recorded


def parse_arguments():
    parser = make_parser(__doc__, rounds=7)
    parser.add_argument('--models', nargs='+', choices=sorted(MODELS), default=['mlp', 'cnn', 'lstm'])
    parser.add_argument('--contexts', nargs='+', type=int, default=[1, 2], metavar='N')
    parser.add_argument('--batch-size', type=int, default=128, help='samples of each context (default %(default)s)')
    parser.add_argument('--block', type=float, default=1.0, metavar='SECONDS', help='length of one side of a round')
    parser.add_argument('--json', metavar='FILE')
    return parser.parse_args()


def step_of(make_model, contexts, by_graphs):
    """Return a training step, and whether each of its parts is launched as a graph, once it is warm."""
    model = make_model()
    step = mgpu.training_function(model.inputs, model.loss, model.params, adam, contexts=contexts)
    for function in step.functions:
        if not isinstance(function.mgpu_call, GraphCalls):
            raise SystemExit('%s has no CUDA graphs: see theano-mgpu devices, and mgpu.cuda_graphs' % contexts[0])
        if not by_graphs:
            function.mgpu_call = function.mgpu_call.op_by_op
    return step


def measure(arguments):
    rng = np.random.RandomState(0)
    for name in arguments.models:
        make_model, shape = MODELS[name]
        for n in arguments.contexts:
            contexts, samples = mgpu.init(n), n * arguments.batch_size
            batch = rng.rand(samples, *shape).astype('float32'), rng.randint(0, 10, samples).astype('int32')
            ours, theirs = [step_of(make_model, contexts, by_graphs) for by_graphs in (True, False)]
            for _ in range(WARM_UP):
                ours(*batch)
            for choice in ours.executable.changes():
                print('%s, %d: %s: %s' % (name, n, choice.chosen, choice.reason))
            yield compare(functools.partial(ours, *batch), functools.partial(theirs, *batch),
                          '%s: %d context%s, graphs / op by op' % (name, n, 's' * (n > 1)), arguments.rounds,
                          arguments.block)


def main():
    arguments = parse_arguments()
    print('batch of %d for each context, %d rounds, median (lowest to highest)'
          % (arguments.batch_size, arguments.rounds))
    show_all(measure(arguments), arguments.json)
    return 0


if __name__ == '__main__':
    sys.exit(main())
