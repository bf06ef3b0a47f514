#!/usr/bin/env python
"""Time of a step that does little but exchange gradients, for one checkout of the package or two in turns.

Each layer multiplies a part of the sample by a large matrix. A context has one sample, so that it computes two products
of a vector and a matrix, or less, for each matrix of gradients. The update is plain gradient descent. The gradients of
a group have 7.4 MB (three layers, as of an MLP for MNIST) or 100 MB (four layers). One context exchanges nothing: its
row has the time of the rest.

Each checkout has processes of its own for each row, which train a block of steps when it is their turn, and measure the
median step. With two checkouts, the ratio is the median over the rounds of the ratio within a round: below 1, the first
one is faster. With one, or none for this checkout, a row has the milliseconds of a step. Examples:

  python benchmarks/exchange.py
  git worktree add ../before HEAD~1
  python benchmarks/exchange.py --checkout . --checkout ../before --json ratios.json
  python tests/cuda_on_cpu run --devices 4 python benchmarks/exchange.py --contexts cuda --collectives host nccl
  python benchmarks/exchange.py --numbers 1 2
  python benchmarks/exchange.py --contexts cpu opencl --groups 7.4 --numbers 2 --orders any tree --owners all one
"""
import argparse
import itertools
import json
import os
import sys
import time

import numpy as np
from turns import Spread, make_parser, ratio, show, spread, take_turns, write_json

GROUPS = {'7.4': [(784, 1024), (1024, 1000), (1000, 10)], '100': [(2500, 2500)] * 4}  # by the megabytes in float32
OWNERS = {'all': 'device', 'one': 'sharded', 'host': 'host'}  # the keyword update_on
HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
WARM_UP = 3  # steps


def parse_arguments():
    parser = make_parser(__doc__, rounds=11)
    parser.add_argument('--checkout', action='append', metavar='DIR',
                        help='a checkout to measure; give it twice to compare two (default: this one)')
    parser.add_argument('--groups', nargs='+', choices=sorted(GROUPS), default=['7.4', '100'],
                        help='megabytes of gradients (default: 7.4 100)')
    parser.add_argument('--contexts', nargs='+', choices=('cpu', 'cuda', 'opencl'), default=['cpu'],
                        help='kinds of contexts (default: cpu); OpenCL devices are taken in turn')
    parser.add_argument('--numbers', nargs='+', type=int, default=[2, 4], metavar='N',
                        help='of contexts (default: 2 4)')
    parser.add_argument('--orders', nargs='+', choices=('any', 'tree'), default=['any'],
                        help='of the additions; tree has a logical shard for each context (default: any)')
    parser.add_argument('--owners', nargs='+', choices=sorted(OWNERS), default=['all'],
                        help='of a sum: all contexts, one of them, or the host (default: all)')
    parser.add_argument('--collectives', nargs='+', choices=('host', 'nccl'), default=['host'],
                        help='what adds the sums of CUDA devices (default: host)')
    parser.add_argument('--block', type=float, default=.5, metavar='SECONDS', help='length of one side of a round')
    parser.add_argument('--starts', type=int, default=2, metavar='N',
                        help='new processes for each part of the rounds, whose memory lies elsewhere (default: 2)')
    parser.add_argument('--json', metavar='FILE')
    parser.add_argument('--worker', action='store_true', help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if len(arguments.checkout or ()) > 2:
        parser.error('--checkout: give one or two')
    return arguments


def layers(group):
    """Return a model: its input, its loss, its parameters, and a function that makes a batch of n samples."""
    import theano
    import theano.tensor as T
    rng, x, loss, params = np.random.RandomState(0), T.matrix('x', dtype='float32'), 0, []
    for n_in, n_out in GROUPS[group]:
        w = theano.shared((rng.randn(n_in, n_out) / n_in).astype('float32'), 'w')
        b = theano.shared(np.zeros(n_out, 'float32'), 'b')
        loss += T.sqr(T.dot(x[:, :n_in], w) + b).sum()
        params += [w, b]
    size = max(n_in for n_in, _ in GROUPS[group])
    return x, loss, params, lambda n: rng.rand(n, size).astype('float32')


def step_over(n, group, order='any', owner='all', collectives='host'):
    """Return a training step over n contexts, which are open, and a batch of one sample for each."""
    import theano_mgpu as mgpu

    import theano
    x, loss, params, batch = layers(group)
    with theano.configparser.change_flags(**{'mgpu.collectives': collectives, 'mgpu.shares': 'equal',
                                             'mgpu.logical_shards': n if order == 'tree' else 0}):
        step = mgpu.training_function([x], loss, params, lambda gradients: [
            (param, param - np.float32(1e-6) * gradient) for param, gradient in zip(params, gradients)],
            update_on=OWNERS[owner], micro_batches=1)
    return step, batch(n)


def context_map(kind, n):
    """Return the map of n contexts of a kind, one device each if there are as many."""
    devices = ['cpu']
    if kind != 'cpu':
        from theano_mgpu.devices import discovery
        devices, reason = discovery.discover(kind)
        if not devices:
            sys.exit('no device for --contexts %s: %s' % (kind, reason))
    return ';'.join('dev%d->%s' % (i, devices[i % len(devices)]) for i in range(n))


def work(arguments):
    """Train as many steps as each line of stdin says; print the median of their seconds."""
    (checkout,), (kind,), (n,), (group,) = arguments.checkout, arguments.contexts, arguments.numbers, arguments.groups
    sys.path[:0] = [checkout]
    os.environ['THEANO_FLAGS'] = 'floatX=float32,' + os.environ.get('THEANO_FLAGS', '')
    import theano_mgpu as mgpu
    assert mgpu.__file__.startswith(os.path.join(checkout, '')), mgpu.__file__
    mgpu.init(context_map(kind, n))
    step, batch = step_over(n, group, *arguments.orders, *arguments.owners, *arguments.collectives)
    for line in sys.stdin:
        times = []
        for _ in range(int(line)):
            began = time.perf_counter()
            step(batch)
            step.params[0].get_value(borrow=True)  # devices have ended the step
            times.append(time.perf_counter() - began)
        print(json.dumps(float(np.median(times))), flush=True)  # other programs slow down some steps, more or less


def worker(checkout, row, arguments):
    """Return the Worker of a checkout for a row."""
    from worker import Worker  # not above: a worker imports the package of its own checkout
    names = 'contexts', 'numbers', 'groups', 'orders', 'owners', 'collectives'
    options = [word for name, value in zip(names, row) for word in ('--' + name, str(value))]
    command = [sys.executable, os.path.abspath(__file__), '--worker', '--checkout', checkout] + options
    return Worker('the worker of %s' % checkout, command, dict(os.environ, PYTHONPATH=checkout))


def seconds(side, repeats):
    side.send(str(repeats))
    return float(side.answer(is_number))


def is_number(line):
    try:
        return float(line) > 0
    except ValueError:
        return False


def measure(row, checkouts, arguments):
    """Return a row of the table, as `turns.compare` does; with one checkout, without a ratio."""
    kind, n, group, order, owner, collectives = row
    contexts = '%d %s context%s' % (n, kind, 's' * (n > 1))
    title = '%s MB, %s, %s order, for %s, by %s' % (group, contexts, order, owner, collectives)
    measured = {checkout: [] for checkout in checkouts}
    for number in range(arguments.starts):
        rounds = arguments.rounds * (number + 1) // arguments.starts - arguments.rounds * number // arguments.starts
        for checkout, times in turns_of(row, checkouts, arguments, rounds, title).items():
            measured[checkout] += times
    found = dict(title=title, rounds=arguments.rounds, starts=arguments.starts, seconds=measured)
    ours, *theirs = [measured[checkout] for checkout in checkouts]
    found.update(ours=float(np.median(ours)))
    if theirs:
        ratios = ratio(ours, theirs[0])
        found.update(theirs=float(np.median(theirs[0])), ratio=ratios.median, lowest=ratios.lowest,
                     highest=ratios.highest)
        show(found)
    else:
        print('%-62s %s ms' % (title, Spread(*[1e3 * value for value in spread(ours)])), flush=True)
    return found


def turns_of(row, checkouts, arguments, rounds, title):
    """Return the seconds of each checkout in some rounds; their processes live as long."""
    sides = {}
    try:
        for checkout in checkouts:
            sides[checkout] = worker(checkout, row, arguments)
        for side in sides.values():
            seconds(side, WARM_UP)
        repeats = max(1, int(arguments.block / max(seconds(side, WARM_UP) for side in sides.values())))
        return take_turns({checkout: lambda side=side: seconds(side, repeats) for checkout, side in sides.items()},
                          rounds, title)
    finally:
        for side in sides.values():
            side.kill()


def main():
    arguments = parse_arguments()
    if arguments.worker:
        work(arguments)
        return 0
    checkouts = [os.path.abspath(checkout) for checkout in arguments.checkout or [HERE]]
    if len(set(checkouts)) < len(checkouts):
        checkouts[1] = os.path.join(checkouts[1], '')  # a checkout against itself shows the noise
    print('a step, %d rounds, median (lowest to highest)%s' % (
        arguments.rounds, ': %s / %s' % tuple(checkouts) if len(checkouts) == 2 else ''))
    rows = [measure(row, checkouts, arguments) for row in itertools.product(
        arguments.contexts, arguments.numbers, arguments.groups, arguments.orders, arguments.owners,
        arguments.collectives)]
    write_json(rows, arguments.json)
    return 0


if __name__ == '__main__':
    sys.exit(main())
