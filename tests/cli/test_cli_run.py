"""`theano-mgpu run`: a script runs as under python, and its Keras models run on the contexts."""
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import zipfile

import theano_mgpu
from theano_mgpu.cli import main

import pytest
import theano
from support.search_path import search_path

TWO = ['--contexts', 'left->cpu;right->cpu']
TITLE = r'theano-mgpu: \d+ of \d+ functions?'  # of the summary
QUICK = 'floatX=float32,cxx=,optimizer=fast_compile'  # interpreted: compiling takes longer than training


def start(words, folder, flags='', backend='theano'):
    env = dict(os.environ, PYTHONPATH=search_path(), THEANO_FLAGS=flags, KERAS_BACKEND=backend)
    # Background processes of a shell ignore Ctrl-C, and their children inherit that.
    return subprocess.Popen([sys.executable] + words, cwd=str(folder), env=env, text=True, stdin=subprocess.PIPE,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))


def finish(process, stdin=''):
    """Return (exit code, stdout, stderr) of a process."""
    out, err = process.communicate(stdin, timeout=300)
    return process.returncode, out, err


def run(*args, folder, flags=QUICK):
    return finish(start(['-m', 'theano_mgpu', 'run'] + list(args), folder, flags, backend='cntk'))


def alike(words, folder, stdin=''):
    """Run a program under python and by `run`, and compare; without a compiler, importing Theano warns."""
    plain, ours = start(words, folder), start(['-m', 'theano_mgpu', 'run', '--quiet'] + words, folder)
    (code, out, err), (our_code, our_out, our_err) = [
        [re.sub('0x[0-9a-f]+', '0x', str(part)) for part in finish(process, stdin)] for process in (plain, ours)]
    assert (our_code, our_out) == (code, out), words
    assert our_err == err if theano.config.cxx else our_err.endswith(err), words


def write(path, text):
    path.write_text(textwrap.dedent(text))
    return path.name


# --- As under python -----------------------------------------------------------------------------

LOOK = '''
    """A script that looks around."""
    import os, sys, threading
    print(__name__, __file__, __doc__, __package__, __spec__, sorted(globals()))
    print(sys.argv, os.path.realpath(sys.path[0]), os.getcwd(), sys.modules['__main__'].__dict__ is globals())
    print(repr(sys.stdin.read()), 'keras' in sys.modules)
    threading.Timer(0.1, print, ['a thread ends']).start()
    import atexit
    atexit.register(print, 'goodbye')
'''
RAISES = '''
    def fail():
        try:
            {}['missing']
        except KeyError as error:
            raise ValueError('wrong') from error
    fail()
'''
OWN_HOOK = '''
    import sys, traceback
    sys.excepthook = lambda kind, error, trace: print(''.join(traceback.format_exception(kind, error, trace)))
    1 / 0
'''
SCRIPTS = {
    'looks around': LOOK,
    'exits 3': 'import sys; print("some"); sys.exit(3)',
    'exits with a text': 'raise SystemExit("the reason")',
    'exits with nothing': 'import sys; sys.exit()',
    'raises': RAISES,
    'has an excepthook': OWN_HOOK,
    'is no python': 'x = (',
    'is interrupted': 'raise KeyboardInterrupt',
    'ends a pipe': 'raise BrokenPipeError("of its own")',
    'fails at exit': 'import atexit; atexit.register(lambda: 1 / 0)',
    'closes its output': 'import sys; print("x"); sys.stdout.close()',
    'spawns a process': '''
        import multiprocessing, os
        def work(x):
            return x * 2
        if __name__ == '__main__':
            with multiprocessing.get_context('spawn').Pool(1) as pool:
                print(pool.map(work, [1, 2]))
    ''',
}


@pytest.mark.slow_but_with('raises')
@pytest.mark.parametrize('name', SCRIPTS)
def test_a_script_without_keras_runs_as_under_python(name, tmp_path):
    (tmp_path / 'folder').mkdir()
    write(tmp_path / 'folder' / 'script.py', SCRIPTS[name])
    alike([os.path.join('folder', 'script.py'), 'one', '--two', '-q', '--gpus'], tmp_path, 'typed\n')


@pytest.mark.slow
def test_a_script_without_keras_or_theano_is_noted(tmp_path):
    """Such a script used to run on one device without a word; so did one that imports Keras without using it."""
    line = 'theano-mgpu: note: no Keras model ran, and no Theano function was compiled: nothing was divided\n'
    for script in ('print(1)', 'import keras; print(1)'):
        code, out, err = run(*TWO, write(tmp_path / 'script.py', script), folder=tmp_path)
        assert (code, out) == (0, '1\n') and err.endswith(line), err


@pytest.mark.slow
@pytest.mark.parametrize('options', [[], ['--always'], ['--always', '--verify']])
def test_a_model_that_fails_in_its_first_step_has_run(tmp_path, options):
    """Below the error of its replica stood "no Keras model ran", and then a table of what had not run."""
    script = write(tmp_path / 'script.py', '''
        import keras, numpy as np
        model = keras.models.Sequential([keras.layers.Embedding(3, 2, input_length=1), keras.layers.Flatten()])
        model.compile('sgd', 'mse')
        model.fit(np.full((8, 1), 7), np.ones((8, 2)), verbose=0)
    ''')
    code, out, err = run(*TWO, *options, script, folder=tmp_path)
    assert code == 1 and 'IndexError' in err and 'no Keras model ran' not in err
    assert not re.search(TITLE, err), err


@pytest.mark.slow
@pytest.mark.parametrize('options', [[], ['--always']])
def test_one_context_on_the_cpu_is_noted(tmp_path, options):
    """Models ran on it as under plain Keras, without a word; with --always, so did functions."""
    script = write(tmp_path / 'script.py', '''
        import keras, theano, theano.tensor as T
        x = T.matrix()
        for factor in (2, 3):
            theano.function([x], x * factor)
    ''')
    code, out, err = run(*options, script, folder=tmp_path, flags=QUICK + ',contexts=one->cpu')
    assert code == 0 and err.count('theano-mgpu: note: there is one context, on the CPU: nothing is divided.') == 1, err
    assert err.count('there is one context, on the CPU\n') == (0 if options else 2)  # in the summary
    assert 'nothing is divided.' not in run(*options, '--gpus', '1', script, folder=tmp_path)[2]  # it was asked for


@pytest.mark.slow_with('options1-True')
@pytest.mark.parametrize('options, compares', [([], False), (['--always'], True)])
def test_a_run_that_has_verified_nothing_says_so(options, compares, tmp_path):
    """A user took the silence of `--verify` for an equal answer."""
    script = write(tmp_path / 'script.py', """
        import numpy as np, theano, theano.tensor as T
        x = T.fmatrix('x')
        theano.function([x], T.tanh(x).sum(axis=1))(np.ones((4, 3), 'float32'))
        """)
    code, _, err = run(*TWO, '--verify', *options, script, folder=tmp_path)
    assert code == 0 and ('same answer' in err) == compares, err
    assert ('--verify has compared nothing' in err) != compares, err


def test_modules_folders_and_archives_run_as_under_python(tmp_path):
    package = tmp_path / 'package'
    package.mkdir()
    write(package / '__init__.py', 'print("package")')
    write(package / 'train.py', 'import sys; print(__name__, __package__, __spec__.name, sys.argv, sys.path[0]); 1 / 0')
    write(package / '__main__.py', 'import sys; print(__name__, sys.argv, sys.path[0])')
    with zipfile.ZipFile(str(tmp_path / 'app.zip'), 'w') as archive:
        archive.writestr('__main__.py', 'import sys; print(__name__, sys.argv, sys.path[0])')
    for words in (['-m', 'package.train', '-x', '1'], ['-m', 'package', 'y'], ['package', 'z'], ['app.zip'],
                  ['-m', 'no_such_module']):
        alike(words, tmp_path)


@pytest.mark.slow
def test_a_signal_ends_it_as_it_ends_python(tmp_path):
    script = write(tmp_path / 'script.py', 'import time; print("ready", flush=True); time.sleep(60)')
    for number in (signal.SIGINT, signal.SIGTERM):
        found = []
        for words in ([script], ['-m', 'theano_mgpu', 'run', '--quiet', script]):
            process = start(words, tmp_path)
            assert process.stdout.readline() == 'ready\n'
            process.send_signal(number)
            code, out, err = finish(process)
            # The traceback differs each time; without a compiler Theano prints a warning first.
            found.append((code, out, err.endswith('\nKeyboardInterrupt\n')))
            assert 'theano_mgpu' not in err
        assert found[0] == found[1] == (-number, '', number == signal.SIGINT)


@pytest.mark.parametrize('args,message', [
    ([], 'give the path of a Python script'), (['-m'], '-m needs the name of a module'),
    (['nowhere.py'], "can't open file 'nowhere.py'"), (['--gpus', '0', 'x.py'], "'0' is not a whole number"),
    (['--contexts', 'a->b', 'x.py'], "'b' in the context map 'a->b' is no device"),
    (['--contexts', 'a->cpu', '--gpus', '2', 'x.py'], 'not allowed with')])
def test_bad_arguments(args, message, capsys):
    with pytest.raises(SystemExit) as caught:
        main(['run'] + args)
    assert caught.value.code == 2 and message in capsys.readouterr().err


# --- With Keras ----------------------------------------------------------------------------------

TRAIN = '''
    import sys
    import keras
    import numpy as np
    from keras.layers import Dense
    np.random.seed(1)
    x, y = np.random.rand(50, 8), np.eye(3)[np.arange(50) % 3]
    model = keras.Sequential([Dense(4, activation='tanh', input_shape=(8,)), Dense(3, activation='softmax')])
    model.compile('adam', 'categorical_crossentropy', metrics=['accuracy'])
    model.fit(x, y, batch_size=16, epochs=2, verbose=2)
    print('%.5f' % model.evaluate(x, y, verbose=0)[0], model.predict(x[:3]).round(4).tolist())
    if 'fail' in sys.argv:
        model.fit(x[:, 1:], y)
'''
PLAIN = 'import theano_mgpu, runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name="__main__")'


def without_seconds(text):
    return re.sub(r' - \d+s - ', ' - ', text)


@pytest.mark.slow
def test_a_keras_script(tmp_path):
    """The output is the same on one device and on two; the summary of the models is on stderr."""
    script = write(tmp_path / 'train.py', TRAIN)
    plain = finish(start(['-c', PLAIN, script], tmp_path, QUICK))
    code, out, err = run(*TWO, '--always', script, folder=tmp_path)
    assert (code, without_seconds(out)) == (0, without_seconds(plain[1])) and plain[0] == 0
    title, header, row = err[re.search(TITLE, err).start():].splitlines()[:3]
    assert title == 'theano-mgpu: 3 of 3 functions on 2 contexts (left->cpu;right->cpu)' and 'SAMPLES/S' in header
    assert row.split()[:6] == ['sequential_1', 'train', 'left', 'right', '8', '100']
    code, out, err = run('--quiet', '--gpus', '1', script, folder=tmp_path, flags=QUICK + ',contexts=one->cpu;two->cpu')
    assert code == 0 and 'theano-mgpu' not in err


@pytest.mark.slow
def test_an_error_in_keras_has_the_traceback_of_python(tmp_path):
    script = write(tmp_path / 'train.py', TRAIN)
    code, _, err = run(*TWO, '--verify', script, 'fail', folder=tmp_path)
    assert code == 1 and 'same answer: the largest difference is' in err
    trace = err[err.index('Traceback'):]
    ours = os.path.dirname(theano_mgpu.__file__) + os.sep  # a checkout, with .venv in it, may have the same name
    assert trace.count('Traceback') == 1 and ours not in trace and 'runpy' not in trace
    files = re.findall(r'File "(.*?)", line (\d+)', trace)
    assert os.path.join(str(tmp_path), files[0][0]) == str(tmp_path / 'train.py')  # relative before Python 3.9
    assert all('keras' in name for name, _ in files[1:])
    assert 'expected dense_1_input to have shape (8,)' in trace


@pytest.mark.slow
def test_a_training_that_is_interrupted(tmp_path):
    script = write(tmp_path / 'train.py', TRAIN.replace('epochs=2, verbose=2', """epochs=10 ** 6, verbose=0, callbacks=[
        keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: epoch or print("trains", flush=True))]"""))
    process = start(['-m', 'theano_mgpu', 'run'] + TWO + [script], tmp_path, QUICK)
    assert process.stdout.readline() == 'trains\n'
    process.send_signal(signal.SIGINT)
    code, out, err = finish(process)
    trace, summary = re.split(TITLE, err[err.index('Traceback'):])
    assert (code, out) == (-signal.SIGINT, '') and trace.endswith('KeyboardInterrupt\n') and 'sequential_1' in summary
    assert 'train.py"' in trace.splitlines()[1]


def test_contexts_that_are_not_there_end_it(tmp_path):
    """A device is opened for the first model, not by the import of Keras: processes that are forked before can use it.
    """
    script = write(tmp_path / 'train.py', """
        import keras
        print("begins")
        keras.Sequential([keras.layers.Dense(1, input_shape=(1,))]).compile('sgd', 'mse')
        print("goes on")
    """)
    code, out, err = run('--gpus', '3', script, folder=tmp_path, flags='contexts=one->cpu;two->cpu')
    assert (code, out) == (2, '')
    assert 'theano-mgpu: error: 3 contexts were asked for; there are 2: one->cpu;two->cpu' in err
    code, out, err = run('--contexts', 'one->cuda99', script, folder=tmp_path)
    assert out == 'begins\n' and code > 0 and 'theano-mgpu: error: context one->cuda99' in err


@pytest.mark.mpi
def test_plans_are_explained(tmp_path):
    """Plans go to stderr for people, and to a file for programs; of two processes, the first one writes them."""
    script = write(tmp_path / 'train.py', '''
        import os; os.chdir('/')  # the file was then written there
        import numpy as np, theano, theano.tensor as T
        x, w = T.matrix('x'), theano.shared(np.ones((3, 2), 'float32'), 'w')
        step = theano.function([x], T.dot(x, w).sum(), updates=[(w, w + T.dot(x, w).mean())], name='step')
        for _ in range(2):
            step(np.ones((8, 3), 'float32'))
    ''')
    code, _, err = run(*TWO, '--always', '--explain', '--json', 'plans.json', script, folder=tmp_path)
    assert code == 0 and ' says which.\nstep: each batch in 2 parts; here on left->cpu | right->cpu' in err
    assert re.search('update +on the host +the contexts are on the CPU', err) and 'MEMORY' not in err
    lines = err[re.search(TITLE, err).start():].splitlines()
    assert len(lines) < 24 and max(map(len, lines)) < 100, err  # a screen
    plan, = json.loads((tmp_path / 'plans.json').read_text())
    assert plan['name'] == 'step' and plan['replicas'] == 2 and plan['memory'][0]['parameters'] == 0
    launched = [sys.executable, '-m', 'theano_mgpu', 'launch', '-n', '2', 'run', '--always', '--explain-all', script]
    code, _, err = finish(start(launched[1:], tmp_path, QUICK + ',contexts=left->cpu'))
    assert code == 0 and err.count('each batch in 2 parts of 2 processes') == 1 and 'all_reduce by MPI' in err
    assert '?' not in err.partition('MEMORY')[2]


@pytest.mark.slow
@pytest.mark.mpi
def test_a_plan_is_explained_at_exit_without_the_other_processes(tmp_path):
    """After a sharded update each process has a part of the state; at exit they exchange nothing any more."""
    script = write(tmp_path / 'train.py', '''
        import numpy as np, theano, theano.tensor as T, theano_mgpu as mgpu
        x = T.matrix('x')
        weights, speeds = [[theano.shared(np.ones((3, 3), 'float32')) for _ in range(2)] for _ in range(2)]
        def momentum(gradients):
            new = {speed: .5 * speed + gradient for speed, gradient in zip(speeds, gradients)}
            return {**new, **{w: w - .1 * new[speed] for w, speed in zip(weights, speeds)}}
        loss = T.sqr(T.dot(T.dot(x, weights[0]), weights[1])).mean()
        step = mgpu.training_function([x], loss, weights, momentum, update_on='sharded')
        for _ in range(2):
            step(np.ones((8, 3), 'float32'))
    ''')
    launched = ['-m', 'theano_mgpu', 'launch', '-n', '2', 'run', '--explain', script]
    code, _, err = finish(start(launched, tmp_path, QUICK + ',contexts=left->cpu'))
    assert code == 0 and 'update_on=sharded, as it was asked for' in err, err


def test_launch_runs_it_in_each_process(tmp_path):
    """Without the word run each process trains a model of its own, and notes say so: at the first model, not only at
    the end, and at the end.
    """
    script = write(tmp_path / 'train.py', TRAIN + """
    print('trained', file=sys.stderr)
    import theano, theano_mgpu
    theano.function([], [], updates=[(theano.shared(0, 'another'), 1)])
    """)
    apart, out, err = finish(start(['-m', 'theano_mgpu', 'launch', '-n', '2', script], tmp_path, QUICK))
    first = 'note: train_function is made by plain Theano or Keras: each of the 2 processes computes it whole, by'
    assert apart == 0 and first in err.partition('trained\n')[0] and err.count('made by plain Theano') == 1, err
    assert 'the 2 processes did not work together' in err and 'launch -n 2 run SCRIPT' in err, err
    code, one, _ = run(*TWO, script, folder=tmp_path)
    words = ['-m', 'theano_mgpu', 'launch', '-n', '2', 'run', '--contexts', 'host->cpu', script]
    launched, out, err = finish(start(words, tmp_path, QUICK))
    assert (code, launched) == (0, 0), err
    assert without_seconds(out) == without_seconds(one) and len(re.findall(TITLE, err)) == 1
    assert 'did not work together' not in err and 'nothing is divided' not in err and 'plain Theano' not in err
    code, out, err = finish(start(words[:6] + ['--verify'] + words[6:], tmp_path, QUICK))
    assert code == 2 and '--verify compares one device with the contexts of one process' in err


def test_flags_that_the_script_sets_itself(tmp_path):
    """Many scripts set flags before they import Keras; under `run` Theano has been imported already."""
    script = write(tmp_path / 'train.py', '''
        import os
        os.environ['THEANO_FLAGS'] = 'device=cuda0,floatX=float32,optimizer=fast_compile,gcc.cxxflags=-O1,no_such=1'
        import keras, theano
        import theano_mgpu as mgpu
        print(theano.config.optimizer, theano.config.gcc.cxxflags, theano.config.floatX)
        print(' '.join(context.name for context in mgpu.contexts()))
    ''')
    code, out, err = run(*TWO, script, folder=tmp_path)
    assert (code, out) == (0, 'fast_compile -O1 float32\nleft right\n'), err
    note = err[err.index('theano-mgpu: note: the script sets Theano flags too late: '):]
    assert 'device=cuda0 (' in note and 'no_such=1 (' in note and 'optimizer' not in note
    assert run(script, folder=tmp_path, flags=QUICK + ',contexts=one->cpu;two->cpu')[1].endswith('\none two\n')


@pytest.mark.slow_but_with('run')
@pytest.mark.parametrize('command', [['run'], ['launch', '-n', '2', 'run']], ids=' '.join)
def test_flags_of_theano_0_x_that_the_script_sets_itself(command, tmp_path):
    """They came too late, all: Theano is imported before the script. So floatX was float64, with no word of it."""
    script = write(tmp_path / 'train.py', '''
        import os
        os.environ['THEANO_FLAGS'] = 'device=gpu1,floatX=float32,lib.cnmem=0.5,nvcc.fastmath=True,optimizer=None'
        import theano.tensor as T
        import numpy as np, subprocess, sys, theano
        print(theano.config.floatX, theano.config.device, theano.config.gpuarray.preallocate, theano.config.optimizer)
        os.environ['THEANO_FLAGS'] = 'floatX=float64'    # after the import: too late in plain Theano
        x = T.matrix('x')
        f = theano.function([x], x * 2, mode='FAST_COMPILE')
        print(f(np.ones((4, 2), 'float32')).dtype, theano.config.floatX, theano is sys.modules['theano'])
        assert theano.tensor is T and theano.__spec__.loader.get_filename().endswith('__init__.py')
    ''')
    words = ['-m', 'theano_mgpu', *command, '--contexts', 'left->cpu;right->cpu', '--always', script]
    code, out, err = finish(start(words, tmp_path, 'cxx='))
    assert (code, out) == (0, 'float32 cpu 0.5 None\nfloat32 float32 True\n'), err
    assert err.count('old flags are read as what they mean today: device=gpu1 not at all (contexts '
                     'choose devices; contexts=dev0->cuda1 is this one); lib.cnmem=0.5 as gpuarray.preallocate') == 1
    assert 'too late' not in err and 'divided' in err


@pytest.mark.slow
def test_flags_of_theano_0_x_from_outside(tmp_path):
    """They ended in an error. A process that the script starts has the same, and says nothing more."""
    script = write(tmp_path / 'train.py', '''
        import os, subprocess, sys, theano
        print(theano.config.device, os.environ['THEANO_FLAGS'].partition(',')[0], flush=True)
        if len(sys.argv) == 1:
            subprocess.check_call([sys.executable, sys.argv[0], 'child'])
    ''')
    code, out, err = run(*TWO, script, folder=tmp_path, flags='device=gpu0,lib.cnmem=0,floatX=float32')
    assert (code, out) == (0, 'cpu floatX=float32\ncpu floatX=float32\n'), err
    assert err.count('are read as what they mean today') == 1


@pytest.mark.slow
@pytest.mark.parametrize('first', [True, False])
def test_a_script_that_chooses_its_own_contexts(first, tmp_path):
    """Either choice used to replace the other one, and functions that were made between asked for contexts that had
    gone. The options of the command count, then the choice of the script, then the flags.
    """
    choice = "mgpu.init('mine->cpu;other->cpu')"
    script = write(tmp_path / 'script.py', """
        import numpy as np, theano, theano.tensor as T, theano_mgpu as mgpu
        x, w = T.matrix('x'), theano.shared(np.ones(3, 'float32'), 'w')
        %s
        f = theano.function([x], 2 * x)
        step = mgpu.training_function([x], T.dot(x, w).mean(), [w], lambda gradients: {w: w - gradients[0]})
        %s
        f(np.ones((8, 3), 'float32'))
        step(np.ones((8, 3), 'float32'))
        theano.function([x], 3 * x)(np.ones((8, 3), 'float32'))
    """ % ((choice, '') if first else ('', choice)))
    code, _, err = run(*TWO, '--always', script, folder=tmp_path)
    note = 'the script chose the contexts mine->cpu;other->cpu; "theano-mgpu run" replaces them with ' + TWO[1]
    assert code == 0 and err.count(note) == 1 and err.count(' left right  ') == 2, err
    code, _, err = run('--always', script, folder=tmp_path, flags=QUICK + ',contexts=a->cpu;b->cpu')
    assert code == 0 and '"theano-mgpu run"' not in err and err.count(' mine other  ') == 2, err


ITSELF = """
    from theano_mgpu.keras import balance, multi_gpu_model, place
    import keras, sys, theano
    import numpy as np, theano_mgpu as mgpu
    mgpu.init('dev0->cpu;dev1->cpu')
    layers = [keras.layers.Dense(3, activation='tanh', input_shape=(4,)), keras.layers.Dense(2)]
    model = multi_gpu_model(keras.models.Sequential(layers), gpus=2)
    model.compile('sgd', 'mse')
    model.fit(np.ones((8, 4)), np.ones((8, 2)), verbose=0)
    if 'place' in sys.argv:
        place(model, balance(model, 2))
        model.fit(np.ones((8, 4)), np.ones((8, 2)), verbose=0)
        with mgpu.device('dev1'):
            pass
        x = theano.tensor.matrix('x')
        mgpu.function([x], x.sum(), contexts=['dev0', 'dev1'])(np.ones((8, 4), theano.config.floatX))
    print('trained on', ' '.join(sorted({context.name for context in model.contexts})))
"""


@pytest.mark.slow_but_with('command1-a b')
@pytest.mark.parametrize('command,out', [
    (['run'], 'dev0 dev1'), (['run', '--contexts', 'a->cpu;b->cpu'], 'a b'),
    (['run', '--gpus', '1'], 'dev0'), (['run', '--one'], 'dev'),
    pytest.param(['launch', '-n', '2', 'run'], 'dev0', marks=[pytest.mark.slow, pytest.mark.mpi])])
def test_a_script_of_the_add_on(command, out, tmp_path):
    """It ended in a circular import, since it imports theano_mgpu.keras before Keras. Then it asked for contexts that
    `run` had replaced, or for two where a process has one.
    """
    words = ['place'] if command in (['run'], ['run', '--one']) else []
    script = write(tmp_path / 'train.py', ITSELF)
    code, printed, err = finish(start(['-m', 'theano_mgpu', *command, script, *words], tmp_path, QUICK))
    assert code == 0 and printed.startswith('trained on ' + out), err
    assert 'sequential_1 train  ' in err and 'nothing was divided' not in err


OWN = {
    'enables': "report = mgpu.enable(always=True)\nf = theano.function([x], x.sum())\nf(rows)\nmgpu.disable()",
    'enables models': """
import theano_mgpu.keras, keras
theano_mgpu.keras.enable(always=True)
model = keras.models.Sequential([keras.layers.Dense(2, input_shape=(3,))])
model.compile('sgd', 'mse')
model.predict(rows)""",
    'function': "mgpu.function([x], x.sum(), name='total')(rows)",
    'predictor': "with mgpu.Predictor([x], x * 2) as predictor:\n    predictor.predict(rows)",
    'disables': "mgpu.disable()\ntheano.function([x], x.sum())(rows)",
    'fails': "raise ValueError('no data')",
    'fails in keras': "import keras\nkeras.models.Sequential([keras.layers.Dense(2)]).fit(rows, rows)",
    'exits': "import argparse\nargparse.ArgumentParser().parse_args(['--unknown'])"}


@pytest.mark.slow_but_with('exits', 'fails')
@pytest.mark.parametrize('name', OWN)
def test_what_is_said_of_a_script_without_functions_of_theano(name, tmp_path):
    """The last line was "no Keras model ran, and no Theano function was compiled: nothing was divided".

    That is untrue where the script divides by itself, and no help below a traceback.
    """
    (tmp_path / 'script.py').write_text("""import numpy as np, theano, theano.tensor as T, theano_mgpu as mgpu
x, rows = T.matrix('x'), np.ones((8, 3), 'float32')
%s
""" % OWN[name])
    code, _, err = run(*TWO, *['--explain'] * (name == 'fails'), 'script.py', folder=tmp_path)
    assert 'nothing was divided' not in err and 'no Theano function was compiled' not in err, err
    assert ('1 of 1 function on 2 contexts (left->cpu;right->cpu)' in err) == name.startswith('enables')
    assert code == {'fails': 1, 'fails in keras': 1, 'exits': 2}.get(name, 0), err
    if code:
        last = {'fails': 'ValueError: no data', 'exits': 'script.py: error: unrecognized arguments: --unknown'}
        assert err.splitlines()[-1].startswith(last.get(name, 'RuntimeError')), err


def test_models_of_another_backend_are_not_changed(tmp_path):
    (tmp_path / 'keras').mkdir()
    write(tmp_path / 'keras' / '__init__.py', '''
        class backend:
            backend = staticmethod(lambda: 'cntk')
    ''')
    script = write(tmp_path / 'train.py', 'import keras; print("done")')
    code, out, err = run(script, folder=tmp_path)
    assert (code, out) == (0, 'done\n') and 'uses Keras on cntk: its models are not changed' in err
