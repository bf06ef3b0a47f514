#!/usr/bin/env python
"""Time of a training step with a ledger (mgpu.ledger), and with mgpu.check, in comparison with neither.

Both are measured at each step. At every k-th step they cost a k-th part, but for the look at the loss. The optimizer is
Adam, so that the weights and the state are three times the parameters. The sides take turns.

Examples:

  python benchmarks/checks.py
  python benchmarks/checks.py --contexts 'a->opencl0:0;b->opencl0:1' --models mlp
  theano-mgpu launch -n 2 benchmarks/checks.py --contexts 'a->cpu;b->cpu'
"""
import functools
import os
import tempfile

os.environ['THEANO_FLAGS'] = 'floatX=float32,mgpu.shares=equal,' + os.environ.get('THEANO_FLAGS', '')

import theano_mgpu as mgpu

import numpy as np
import theano
from models import adam, cnn, mlp
from turns import make_parser, ratio, seconds, spread, take_turns

SIZES = {'cnn': (1, 28, 28), 'mlp': (784,)}


def training(name, **flags):
    model = {'cnn': cnn, 'mlp': mlp}[name]()
    with theano.configparser.change_flags(**{'mgpu.' + flag: value for flag, value in flags.items()}):
        step = mgpu.training_function(model.inputs, model.loss, model.params, adam, name=name)
    return step


def main():
    parser = make_parser(__doc__, rounds=9)
    parser.add_argument('--contexts', default='a->cpu;b->cpu', help='default: %(default)s')
    parser.add_argument('--models', nargs='+', choices=sorted(SIZES), default=sorted(SIZES), help='default: all')
    parser.add_argument('--batch', type=int, default=128, help='samples of a batch (default: 128)')
    parser.add_argument('--steps', type=int, default=5, help='steps of a turn (default: 5)')
    args = parser.parse_args()
    mgpu.init(args.contexts)
    rng = np.random.RandomState(0)
    with tempfile.TemporaryDirectory() as folder:
        for name in args.models:
            batch = rng.rand(args.batch, *SIZES[name]).astype('float32'), rng.randint(0, 10, args.batch).astype('int32')
            sides = {'neither': training(name), 'check': training(name, check=1),
                     'ledger': training(name, ledger=os.path.join(folder, name), ledger_every=1)}
            calls = {side: functools.partial(step, *batch) for side, step in sides.items()}
            for call in calls.values():
                seconds(call, 3)
            times = take_turns({side: functools.partial(seconds, call, args.steps) for side, call in calls.items()},
                               args.rounds, name)
            state = sum(each.variable.get_value(borrow=True).nbytes for each in sides['neither'].variables())
            if mgpu.rank() == 0:
                print('%s, %.1f MB of weights and state: %.2f ms a step' % (
                    name, state / 1e6, 1e3 * spread(times['neither']).median))
                for side in ('ledger', 'check'):
                    extra = spread([1e3 * (one - other) for one, other in zip(times[side], times['neither'])])
                    print('  %-6s + %.2f ms, %s' % (side, extra.median, ratio(times[side], times['neither'])))


if __name__ == '__main__':
    main()
