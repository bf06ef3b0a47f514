#!/usr/bin/env python
"""Time of a training step with a table of words, whose gradient is exchanged by rows, against the whole table.

The model looks words up in a table, and has the mean of their vectors and a softmax layer. The words are drawn at
random. The sides take turns: one step exchanges the rows or the table, by their bytes; the other exchanges the table.

Examples:

  theano-mgpu launch -n 2 benchmarks/tables.py
  theano-mgpu launch -n 2 benchmarks/tables.py --words 2000      a small table, which is exchanged whole
  theano-mgpu launch -n 2 benchmarks/tables.py --length 9000     a batch that touches most of the rows
  python benchmarks/tables.py --contexts 'dev0->cpu;dev1->cpu' --optimizer adam
"""
import os

os.environ['THEANO_FLAGS'] = 'floatX=float32,' + os.environ.get('THEANO_FLAGS', '')

import theano_mgpu as mgpu
from theano_mgpu.graph.analysis import touched_rows

import numpy as np
import theano.tensor as T
from models import adam, sgd, shared, uniform
from turns import make_parser, ratio, seconds, spread, take_turns


def training(args, large):
    """Return a training function; tables of at most `large` bytes are exchanged whole."""
    touched_rows.LARGE = large
    rng = np.random.RandomState(0)
    table = shared(uniform(rng, args.words, args.size), 'table')
    weights = shared(uniform(rng, args.size, 10), 'weights')
    words, labels = T.imatrix('words'), T.ivector('labels')
    rows = table[words.flatten()].reshape((words.shape[0], words.shape[1], args.size))
    loss = T.nnet.categorical_crossentropy(T.nnet.softmax(T.dot(rows.mean(axis=1), weights)), labels).mean()
    return mgpu.training_function([words, labels], loss, [table, weights], {'adam': adam, 'sgd': sgd}[args.optimizer])


def main():
    parser = make_parser(__doc__, rounds=9)
    parser.add_argument('--words', type=int, default=200000, help='rows of the table (default %(default)s)')
    parser.add_argument('--size', type=int, default=64, help='its columns (default %(default)s)')
    parser.add_argument('--batch', type=int, default=32, help='samples of a batch (default %(default)s)')
    parser.add_argument('--length', type=int, default=10, help='words of a sample (default %(default)s)')
    parser.add_argument('--optimizer', choices=['sgd', 'adam'], default='sgd', help='(default %(default)s)')
    parser.add_argument('--contexts', metavar='MAP', help='default: the contexts of THEANO_FLAGS, or one of the CPU')
    args = parser.parse_args()
    if args.contexts:
        mgpu.init(args.contexts)
    usual = touched_rows.LARGE
    steps = {'table': training(args, 1 << 62), 'by rows': training(args, usual)}
    rng = np.random.RandomState(1)
    batches = [(rng.randint(0, args.words, (args.batch, args.length)).astype('int32'),
                rng.randint(0, 10, args.batch).astype('int32')) for _ in range(3)]

    def turn(name):
        return seconds(lambda: [steps[name](*batch) for batch in batches]) / len(batches)
    sides = {name: lambda name=name: turn(name) for name in steps}
    take_turns(sides, 3)
    measured = take_turns(sides, args.rounds)
    if mgpu.rank() == 0:
        for name in steps:
            print('%-8s' % name, spread([1e3 * each for each in measured[name]]), 'ms a step')
        print('ratio    ' + str(ratio(measured['by rows'], measured['table'])))


if __name__ == '__main__':
    main()
