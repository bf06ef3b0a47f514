#!/usr/bin/env python
"""Seconds from the start of a process to the end of its first batch, with nothing compiled before, in turns.

Compared are plain Keras with one module of C code compiled at a time, as Theano does it; plain Keras with one for each
core; and the same for a model over two contexts. Each process has a new folder of compiled code. With --imports,
processes that only import theano_mgpu are compared, with g++'s flags for the processor on disk and without. With
--entries, processes compile small functions into folders that hold other code already, as many modules as it says.
Examples:

  python benchmarks/startup.py
  python benchmarks/startup.py --models cnn --sides 'one at a time' 'two contexts'
  python benchmarks/startup.py --imports
  python benchmarks/startup.py --entries 500 5000 15000
"""
import functools
import glob
import json
import os
import subprocess
import sys
import tempfile
import time

from turns import make_parser, ratio, spread, take_turns

PROGRAM = '''
import sys
import theano_mgpu
import keras
import numpy as np
from keras import layers as L
layers = {'mlp': [L.Dense(64, activation='relu', input_shape=(20,))],
          'cnn': [L.Conv2D(8, 3, activation='relu', input_shape=(12, 12, 1)), L.BatchNormalization(), L.MaxPooling2D(),
                  L.Flatten(), L.Dropout(0.5)]}[sys.argv[1]]
model = keras.Sequential(layers + [L.Dense(10, activation='softmax')])
if sys.argv[2] == 'contexts':
    theano_mgpu.init('dev0->cpu;dev1->cpu')
    from theano_mgpu.keras import multi_gpu_model
    model = multi_gpu_model(model)
model.compile('adam', 'sparse_categorical_crossentropy', metrics=['accuracy'])
model.train_on_batch(np.ones((32,) + model.input_shape[1:]), np.zeros((32, 1)))
'''
# An op with code of its own.
NEW_OP = '''
import glob, json, os, pickle, random, shutil, sys, time
import theano_mgpu, theano, theano.tensor as T
from theano.gof import cmodule
from theano.tensor import elemwise

class New(elemwise.Elemwise):
    mark = 0
    def c_support_code(self):
        return '// %d' % self.mark
    def c_code_cache_version_apply(self, node):
        return (self.mark,)
'''
FEW_FUNCTIONS = NEW_OP + '''
run, compiler = cmodule.output_subprocess_Popen, []
def timed(*args, **kwargs):
    began = time.perf_counter()
    try:
        return run(*args, **kwargs)
    finally:
        compiler.append(time.perf_counter() - began)
cmodule.output_subprocess_Popen = timed

def seconds(outputs):
    compiler.clear()
    began = time.perf_counter()
    theano.function([x], outputs, mode=theano.Mode('vm', None))
    return (time.perf_counter() - began - sum(compiler)) / len(outputs)

x = T.dvector()
found = {'first function': seconds([x * 2.0]),
         'known module': seconds([f(x) for f in (T.exp, T.tanh, T.sin, T.cos, T.sqr, T.log, T.sqrt, T.ceil)])}
new = [New(theano.scalar.tanh) for _ in range(3)]
for op in new:
    op.mark = random.getrandbits(60)
found['new module'] = sum(seconds([op(x)]) for op in new) / len(new)
print(json.dumps([found, time.perf_counter()]))
'''
# Copies the compiled code, under other keys.
FILL = NEW_OP + '''
real = [(os.path.dirname(path), pickle.load(open(path, 'rb')))
        for path in glob.glob(os.path.join(theano.config.compiledir, 'tmp*', 'key.pkl'))]
for i in range(int(sys.argv[1]) - len(real)):
    source, data = real[i % len(real)]
    folder = os.path.join(theano.config.compiledir, 'tmp%08x' % random.getrandbits(32))
    shutil.copytree(source, folder, copy_function=os.link)
    os.remove(os.path.join(folder, 'key.pkl'))
    cmodule.KeyData({(version, rest + (i,)) for version, rest in data.keys}, '%064x' % random.getrandbits(256),
                    os.path.join(folder, 'key.pkl'), os.path.join(folder, os.path.basename(data.entry))).save_pkl()
'''
SIDES = {'one at a time': ('plain', 1), 'plain': ('plain', 0), 'two contexts': ('contexts', 0)}


def seconds(model, side):
    """Return the seconds that one process takes; print them at once, since all processes together take minutes."""
    kind, jobs = SIDES[side]
    with tempfile.TemporaryDirectory() as folder:
        flags = 'floatX=float32,base_compiledir=%s,mgpu.compile_jobs=%d' % (folder, jobs)
        began = time.perf_counter()
        subprocess.run([sys.executable, '-c', PROGRAM, model, kind], check=True, stderr=subprocess.DEVNULL,
                       env=dict(os.environ, THEANO_FLAGS=flags, KERAS_BACKEND='theano'))
        took = time.perf_counter() - began
    print('%s: %s: %.1f s' % (model, side, took), flush=True)
    return took


def seconds_of_import(folder, kept):
    """Return the seconds of a process that imports theano_mgpu, with g++'s flags kept with compiled code or not."""
    if not kept:
        for path in glob.glob(os.path.join(folder, '*', 'processor_*.flags')):
            os.remove(path)
    began = time.perf_counter()
    subprocess.run([sys.executable, '-c', 'import theano_mgpu'], check=True,
                   env=dict(os.environ, THEANO_FLAGS='base_compiledir=' + folder))
    return time.perf_counter() - began


def compare_imports(rounds):
    with tempfile.TemporaryDirectory() as folder:
        sides = {'kept': functools.partial(seconds_of_import, folder, True),
                 'found': functools.partial(seconds_of_import, folder, False)}
        sides['found']()  # Theano compiles its own modules once
        measured = take_turns(sides, rounds)
    print('import theano_mgpu: g++\'s flags kept: %s s; found anew: %s s; kept / found: %s'
          % (spread(measured['kept']), spread(measured['found']), ratio(measured['kept'], measured['found'])))


def compare_entries(rounds, sizes):
    with tempfile.TemporaryDirectory() as folder:
        flags = {n: 'mgpu.compile_jobs=1,mgpu.keep_graphs=False,base_compiledir=%s/%d' % (folder, n) for n in sizes}

        def run(n, program, *words):
            return subprocess.run([sys.executable, '-c', program, *words], check=True, stdout=subprocess.PIPE,
                                  stderr=subprocess.DEVNULL, env=dict(os.environ, THEANO_FLAGS=flags[n])).stdout

        def measure(n):
            found, printed = json.loads(run(n, FEW_FUNCTIONS))
            return dict(found, exit=time.perf_counter() - printed)
        for n in sizes:
            run(n, FEW_FUNCTIONS)
            run(n, FILL, str(n))
            measure(n)  # the first process after that reads all keys
        measured = take_turns({n: functools.partial(measure, n) for n in sizes}, rounds)
    for what in measured[sizes[0]][0]:
        for n in sizes:
            print('%s, %d modules on disk: %s s' % (what, n, spread([each[what] for each in measured[n]])))


def main():
    parser = make_parser(__doc__, rounds=7)
    parser.add_argument('--models', nargs='+', choices=['mlp', 'cnn'], default=['mlp', 'cnn'])
    parser.add_argument('--sides', nargs='+', choices=list(SIDES), default=list(SIDES), help='(default: all)')
    parser.add_argument('--imports', action='store_true', help='time imports alone, with code on disk')
    parser.add_argument('--entries', type=int, nargs='+', help='time functions with so many modules on disk')
    arguments = parser.parse_args()
    if arguments.entries:
        compare_entries(arguments.rounds, arguments.entries)
        return
    if arguments.imports:
        compare_imports(arguments.rounds)
        return
    for model in arguments.models:
        measured = take_turns({side: functools.partial(seconds, model, side) for side in arguments.sides},
                           arguments.rounds)
        first = arguments.sides[0]
        for side in arguments.sides:
            print('%s: %s: %s s; / %s: %s' % (model, side, spread(measured[side]), first,
                                              ratio(measured[side], measured[first])))


if __name__ == '__main__':
    main()
