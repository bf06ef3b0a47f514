#!/usr/bin/env python
"""What a step over contexts costs against a step without: two ratios, measured in one run.

  plain   one `cpu` context through mgpu, against the plain theano.function of the same step
  shared  the batch over two contexts that share one device's cores, against the batch on one of them

Both sides of a ratio take turns, a block of steps each; the ratio is the median over the rounds of the
ratio within a round. Examples:

  python benchmarks/step_overhead.py
  python benchmarks/step_overhead.py --device opencl0:0 --device opencl0:1 --models cnn --rounds 15
"""
import argparse
import json
import os
import sys
import time

if 'floatX' not in os.environ.get('THEANO_FLAGS', ''):
    os.environ['THEANO_FLAGS'] = 'floatX=float32,' + os.environ.get('THEANO_FLAGS', '')

import theano_mgpu as mgpu
from theano_mgpu import devices

import numpy as np
from models import adam, cnn, mlp, plain_step
from tqdm import tqdm

MODELS = {'cnn': (cnn, (1, 28, 28)), 'mlp': (mlp, (784,)), 'small': (lambda: mlp(sizes=(16, 16, 10)), (16,))}


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--models', nargs='+', choices=sorted(MODELS), default=['cnn', 'mlp'])
    parser.add_argument('--batch-size', type=int, default=128)
    parser.add_argument('--rounds', type=int, default=11, help='rounds that count (default %(default)s)')
    parser.add_argument('--block', type=float, default=1.0, metavar='SECONDS', help='length of one side of a round')
    parser.add_argument('--device', action='append', help='one of the two devices of "shared"; give it twice')
    parser.add_argument('--json', metavar='FILE')
    return parser.parse_args()


def step_on(make_model, contexts):
    """A training step over contexts; over none, the plain function."""
    model = make_model()
    if contexts is None:
        return plain_step(model)
    return mgpu.training_function(model.inputs, model.loss, model.params, adam, contexts=contexts)


def seconds(step, batch, repeats):
    start = time.perf_counter()
    for _ in range(repeats):
        step(*batch)
    return (time.perf_counter() - start) / repeats


def compare(ours, theirs, batch, arguments, title):
    """Ratio ours/theirs round by round; the order within a round alternates."""
    for step in (ours, theirs):
        seconds(step, batch, 3)
    repeats = max(1, int(arguments.block / seconds(theirs, batch, 3)))
    rounds = []
    for number in tqdm(range(arguments.rounds), desc=title, disable=None, leave=False):
        sides = [(0, ours), (1, theirs)][::1 if number % 2 else -1]
        times = {side: seconds(step, batch, repeats) for side, step in sides}
        rounds.append((times[0], times[1]))
    ratios = [a / b for a, b in rounds]
    return dict(title=title, ours=float(np.median([a for a, _ in rounds])),
                theirs=float(np.median([b for _, b in rounds])), ratio=float(np.median(ratios)),
                lowest=min(ratios), highest=max(ratios), rounds=len(rounds), steps_per_block=repeats)


def measure(arguments):
    rng = np.random.RandomState(0)
    shared = arguments.device or (devices.discover('cuda')[0] or devices.discover('opencl')[0])[:2]
    shared = (shared * 2)[:2]
    for name in arguments.models:
        make_model, shape = MODELS[name]
        batch = (rng.rand(arguments.batch_size, *shape).astype('float32'),
                 rng.randint(0, 10, arguments.batch_size).astype('int32'))
        mgpu.init('host->cpu')
        yield compare(step_on(make_model, ['host']), step_on(make_model, None), batch, arguments,
                      '%s: one cpu context / plain theano.function' % name)
        if shared:
            mgpu.init('dev0->%s;dev1->%s' % tuple(shared))
            yield compare(step_on(make_model, ['dev0', 'dev1']), step_on(make_model, ['dev0']), batch, arguments,
                          '%s: two contexts (%s, %s) / one' % ((name,) + tuple(shared)))


def main():
    arguments = parse_arguments()
    print('batch %d, %d rounds, median (lowest to highest)' % (arguments.batch_size, arguments.rounds))
    rows = []
    for row in measure(arguments):
        rows.append(row)
        print('%-58s %8.3f ms / %8.3f ms = %.3f (%.3f to %.3f)'
              % (row['title'], 1e3 * row['ours'], 1e3 * row['theirs'], row['ratio'], row['lowest'], row['highest']))
    if arguments.json:
        with open(arguments.json, 'w') as f:
            json.dump(rows, f, indent=1)
    return 0


if __name__ == '__main__':
    sys.exit(main())
