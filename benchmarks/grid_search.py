#!/usr/bin/env python
"""Seconds of scikit-learn's GridSearchCV over a Keras model, in one process and with a process for each device.

The script runs unchanged under `theano-mgpu run`; scores are compared. Theano's compiled code is kept from a first
run of each side, which does not count. Devices of the CUDA stand-in share the cores of this machine: with DELAY_US,
each operation takes time of its device alone, as on a GPU. Examples:

  python tests/cuda_on_cpu run --devices 4 --set DELAY_US=2000 python benchmarks/grid_search.py
  THEANO_FLAGS='contexts=dev0->cpu;dev1->cpu' python benchmarks/grid_search.py --jobs 2
"""
import functools
import json
import os
import subprocess
import sys
import tempfile

from turns import make_parser, ratio, spread, take_turns

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SCRIPT = '''
import json, sys, time
import numpy as np
from keras.layers import Dense
from keras.models import Sequential
from keras.wrappers.scikit_learn import KerasClassifier
from sklearn.model_selection import GridSearchCV

def build(units=4):
    np.random.seed(units)
    model = Sequential([Dense(units, activation='relu', input_shape=(8,)), Dense(2, activation='softmax')])
    model.compile('sgd', 'sparse_categorical_crossentropy', metrics=['accuracy'])
    return model

if __name__ == '__main__':
    rng = np.random.RandomState(0)
    x, y = rng.rand(240, 8).astype('float32'), np.arange(240) % 2
    search = GridSearchCV(KerasClassifier(build, epochs=8, batch_size=40, shuffle=False, verbose=0),
                          {'units': [4, 6, 8, 10]}, cv=2, n_jobs=int(sys.argv[1]), refit=False)
    began = time.perf_counter()
    search.fit(x, y)
    print(json.dumps([time.perf_counter() - began, search.cv_results_['mean_test_score'].tolist()]))
'''


def run(jobs, folder):
    """Return the seconds of the search, and its scores."""
    flags = os.environ.get('THEANO_FLAGS', 'floatX=float32') + ',base_compiledir=' + folder
    command = [sys.executable, '-m', 'theano_mgpu', 'run', '-q', os.path.join(folder, 'search.py'), str(jobs)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=HERE,
                          env=dict(os.environ, THEANO_FLAGS=flags, PYTHONPATH=HERE))
    return json.loads(done.stdout.splitlines()[-1])


def main():
    parser = make_parser(__doc__, rounds=7)
    parser.add_argument('--jobs', type=int, default=4, metavar='N', help='processes (default: %(default)s)')
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        with open(os.path.join(folder, 'search.py'), 'w') as file:
            file.write(SCRIPT)
        calls = {jobs: functools.partial(run, jobs, folder) for jobs in (1, arguments.jobs)}
        for call in calls.values():
            call()
        measured = take_turns(calls, arguments.rounds)
    one, several = ([seconds for seconds, _ in measured[jobs]] for jobs in calls)
    same = len({tuple(scores) for rounds in measured.values() for _, scores in rounds}) == 1
    print('n_jobs=1: %s s; n_jobs=%d: %s s; ratio %s; scores %s' % (
        spread(one), arguments.jobs, spread(several), ratio(several, one), 'the same' if same else 'DIFFER'))


if __name__ == '__main__':
    main()
