"""The benchmarks run, and show the promised results."""
import json
import os
import re
import subprocess
import sys
import time
from types import SimpleNamespace

import matplotlib.pyplot as plt
import numpy as np
import pytest
import turns
from models import handwritten_digits
from placement import parts
from predict import Contender, contenders, difference, peak_memory, with_ratios
from worker import Worker, WorkerError

FOLDER = os.path.join(os.path.dirname(__file__), '..', '..', 'benchmarks')


def run(script, *arguments, flags=None, launcher=()):
    env = {key: value for key, value in os.environ.items() if key != 'THEANO_FLAGS'}
    if flags:
        env['THEANO_FLAGS'] = flags
    done = subprocess.run([sys.executable, *launcher, os.path.join(FOLDER, script)] + list(arguments),
                          capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_file_like_mnists_is_used(tmp_path):
    path = str(tmp_path / 'mnist.npz')
    rng = np.random.RandomState(0)
    images, labels = rng.randint(0, 256, (6, 28, 28)).astype('uint8'), rng.randint(0, 10, 6)
    np.savez(path, x_train=images[:4], y_train=labels[:4], x_test=images[4:], y_test=labels[4:])
    name, train, test = handwritten_digits(path)
    assert name.startswith(path) and train[0].shape == (4, 1, 28, 28) and test[1].dtype == 'int32'
    np.testing.assert_allclose(train[0][:, 0] * 255, images[:4], rtol=1e-5)


def test_scanned_digits_have_whole_grey_levels(monkeypatch):
    """Other levels would lead to ties up to rounding in max-pooling, so that float64 runs part company."""
    import models
    monkeypatch.setattr(models, 'MNIST_FILE', '/nowhere')
    levels = handwritten_digits()[1][0] * 255
    np.testing.assert_allclose(levels, np.rint(levels), atol=1e-3)


TWO = 'contexts=a->cpu;b->cpu'


@pytest.mark.slow
@pytest.mark.mpi
def test_recovery():
    text = run('recovery.py', '--models', 'tiny', '--kills', '1', '--steps', '100', '--pause', '0.3', '--spares', '1')
    assert 'the final state is the same to the bit' in text and 'imported 0.00, built 0.00' in text


@pytest.mark.slow
@pytest.mark.needs_compiler
def test_keras_autoencoder_draws(tmp_path):
    path = str(tmp_path / 'digits.png')
    text = run('keras_autoencoder.py', '--filters', '4', '8', '--epochs', '1', '--samples', '256', '--output', path,
               flags=TWO)
    assert 'picture: %s' % path in text
    assert plt.imread(path).shape[:2] == (390, 1500)


@pytest.mark.mpi
@pytest.mark.slow
def test_scaling_compares(tmp_path):
    json_path, plot_path = str(tmp_path / 's.json'), str(tmp_path / 's.png')
    text = run('scaling.py', '--quick', '--models', 'mlp', '--json', json_path, '--plot', plot_path)
    with open(json_path) as f:
        rows = json.load(f)['results']
    assert [(row['kind'], row['workers'], row['threads']) for row in rows] == [
        ('keras', 1, 1), ('keras', 1, 2), ('cores', 1, 2), ('mgpu', 1, 1), ('mgpu', 2, 1), ('sharded', 2, 1)]
    assert all(len(row['seconds']) == 2 and 0 < row['lowest'] <= row['median'] for row in rows)
    assert text.count('Keras on Theano ') == 2 and plt.imread(plot_path).shape[0] > 300


@pytest.mark.needs_compiler
@pytest.mark.slow
def test_choices_are_measured():
    text = run('choices.py', 'update', 'input', '--rounds', '1', '--block', '0.01', '--batch-size', '8', flags=TWO)
    assert text.count('update on host / device') == 2 and text.count('in turn / ahead') == 2


def placement(tmp_path, *arguments):
    path = str(tmp_path / 'placement.json')
    text = run('placement.py', '--rounds', '2', '--block', '0.01', '--batch-size', '8', '--units', '8', '--channels',
               '2', '--size', '8', '--json', path, *arguments, flags='optimizer=fast_compile')
    with open(path) as f:
        return text, json.load(f)


@pytest.mark.needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize('models', [['mlp'], ['cnn', 'unet']])
def test_placements_are_compared(tmp_path, models):
    text, rows = placement(tmp_path, '--models', *models, '--contexts', 'a->cpu;b->cpu', '--micro-batches', '1', '3')
    assert [(row['model'], row['devices'], row['micro_batches']) for row in rows] == [
        (model, *side) for model in models for side in ((1, 1), (2, 1), (2, 3))]
    assert [(row['bubble'], row['at_most']) for row in rows[:3]] == [(0, 1), (1 / 2, 1), (1 / 4, 3 / 2)]
    assert all(len(row['seconds']) == 2 and row['speed_up'][1] <= row['speed_up'][0] for row in rows)
    assert all(row['memory'] is None for row in rows) and text.count('speed-up') == 1


@pytest.mark.needs_compiler
@pytest.mark.slow
def test_placements_take_memory_on_each_device(tmp_path):
    _, rows = placement(tmp_path, '--models', 'mlp', '--micro-batches', '2', '--recompute', '--units', '64')
    weights = 8 * 64 * 64 * 4
    (one, other), both = (row['memory'] for row in rows)
    assert one > weights > other and min(both) > weights / 2


def test_a_model_is_cut_into_parts_of_about_equal_cost():
    assert parts([1] * 8, 4) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert parts([4, 1, 1, 1, 1], 2) == [0, 1, 1, 1, 1]


@pytest.mark.slow
def test_an_unknown_choice_is_refused():
    done = subprocess.run([sys.executable, os.path.join(FOLDER, 'choices.py'), 'speed'], capture_output=True, text=True)
    assert done.returncode == 2 and 'speed: choose from dispatch, update, ' in done.stderr


@pytest.mark.parametrize('sides', ['ab', 'abc', 'abcd'])
def test_each_side_has_one_turn_a_round_and_each_begins(sides):
    rounds = [turns.order(sides, number) for number in range(2 * len(sides))]
    assert all(sorted(order) == list(sides) for order in rounds)
    assert {order[0] for order in rounds} == {order[-1] for order in rounds} == set(sides)
    called = []
    found = turns.take_turns({side: lambda side=side: called.append(side) or side for side in sides}, len(rounds))
    assert ''.join(called) == ''.join(rounds)
    assert found == {side: [side] * len(rounds) for side in sides}


def test_a_comparison_takes_ratios_within_rounds():
    row = turns.compare(lambda: time.sleep(0.002), lambda: time.sleep(0.001), 'sleep', rounds=3, block=0.003)
    assert row['lowest'] <= row['ratio'] <= row['highest'] and row['ratio'] > 1 and row['rounds'] == 3
    assert row['ours'] >= 0.002 and row['theirs'] >= 0.001
    assert turns.ratio([2, 2, 9], [1, 2, 3]) == (2, 1, 3)


def test_a_worker_answers_or_its_end_is_an_error():
    script = 'import sys\nprint("news", flush=True)\nfor line in sys.stdin: print("got", line, flush=True)'
    with Worker('the worker', [sys.executable, '-c', script], dict(os.environ)) as worker:
        worker.send('go')
        assert worker.answer(lambda line: line.startswith('got')) == 'got go'
    for code, patience, message in (('raise SystemExit("reason")', None, 'without an answer, with exit code 1.*reason'),
                                    ('import time; time.sleep(60)', 0.2, r'did not answer within 0.2 s.*\(nothing\)')):
        with Worker('the worker', [sys.executable, '-c', code], dict(os.environ), patience) as worker:
            with pytest.raises(WorkerError, match='(?s)the worker ' + ('ended ' if not patience else '') + message):
                worker.answer(lambda line: line == 'ready')


def test_contenders_of_prediction():
    arguments = SimpleNamespace(threads=[1, 2], workers=[2])
    labels = [contender.label for contender in contenders(arguments, ['opencl0:0', 'opencl0:1'])]
    assert labels == ['plain Keras, 1 thread', 'plain Keras, 2 threads', 'Predictor, 1 context, 1 thread',
                      'Predictor, 1 context, 2 threads', 'Predictor, 2 contexts', 'Predictor, 2 ranks',
                      'multiprocessing.Pool(2)', 'Predictor, 1 OpenCL device', 'Predictor, 2 OpenCL devices']
    assert len(contenders(SimpleNamespace(threads=[1], workers=[1]), ['opencl0:0'])) == 3


def test_ratios_of_opencl_are_to_one_of_its_devices():
    rows = [dict(Contender(kind, devices, 1, 1)._asdict(), median=median) for kind, devices, median in (
        ('keras', (), 100.), ('pool', (), 150.), ('predictor', ('opencl0:0',), 10.),
        ('predictor', ('opencl0:0', 'opencl0:1'), 15.))]
    assert [row['ratio'] for row in with_ratios(rows)] == [1, 1.5, 1, 1.5]


def test_other_predictions_are_errors():
    wanted = np.array([[1., 2.]])
    assert difference(wanted + 1e-7, wanted, 1e-6, 'who') < 1e-7
    for outputs, message in ((wanted + 1e-5, 'largest difference'), (wanted * np.nan, 'largest difference'),
                             (wanted[0], 'shape')):
        with pytest.raises(WorkerError, match='"who" predicts.*' + message):
            difference(outputs, wanted, 1e-6, 'who')


def test_peak_memory_is_of_the_descendants_too():
    alone = peak_memory(os.getpid())
    code = 'import subprocess, sys; subprocess.run([sys.executable, "-c", sys.argv[1]])'
    grandchild = 'block = b"x" * 200_000_000; print("ready", flush=True); input()'
    with subprocess.Popen([sys.executable, '-c', code, grandchild], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                          text=True) as process:
        assert process.stdout.readline() == 'ready\n'
        assert peak_memory(process.pid) > 190 and peak_memory(os.getpid()) > alone + 190
        process.communicate('\n')


def test_batches_larger_than_the_samples_are_refused():
    done = subprocess.run([sys.executable, os.path.join(FOLDER, 'predict.py'), '--samples', '10'], capture_output=True,
                          text=True)
    assert done.returncode == 2 and '--batch-size 128: there are 10 samples' in done.stderr


@pytest.mark.mpi
@pytest.mark.slow
def test_predict_compares(tmp_path):
    json_path, plot_path = str(tmp_path / 'p.json'), str(tmp_path / 'p.png')
    text = run('predict.py', '--quick', '--models', 'mlp', '--samples', '70', '--batch-size', '32', '--no-opencl',
               '--json', json_path, '--plot', plot_path)
    with open(json_path) as f:
        rows = json.load(f)['results']
    assert len(rows) == 7 and rows[0]['ratio'] == 1 and all(row['difference'] <= 1e-6 for row in rows)
    assert all(len(row['seconds']) == 2 and 0 < row['lowest'] <= row['median'] for row in rows)
    assert all(row['first'] > 0 and row['memory'] > 50 for row in rows)
    assert all(row['label'] in text for row in rows) and plt.imread(plot_path).shape[0] > 300


@pytest.mark.needs_compiler
@pytest.mark.slow
def test_host_loops():
    lines = run('host_loops.py', '--loops', 'Adam', 'pooling', '--parameters', '1000', '--rounds', '1', '--block',
                '0.01').splitlines()
    assert [line.split()[0] for line in lines[-2:]] == ['Adam', 'pooling'] and 'bandwidth' in lines[-3]


@pytest.mark.needs_compiler
@pytest.mark.slow
def test_blas_kernels():
    text = run('blas_kernels.py', '--size', '50', '--rounds', '2')
    assert 'theano_mgpu has chosen' in text and text.count('GF/s') == 6


@pytest.mark.slow
@pytest.mark.needs_compiler
def test_vector_math():
    lines = run('vector_math.py', '--functions', 'tanh', 'pow', '--elements', '1000', '--rounds', '1', '--block',
                '0.001', '--batch-sizes', '2').splitlines()
    assert [line.split()[0] for line in lines[-4:]] == ['tanh', 'pow', 'STEP', 'LSTM,']
    assert all(line.split()[-2:] == ['0', '0'] for line in lines[-4:-2])  # no result that is not as promised


@pytest.mark.needs_compiler
@pytest.mark.slow
def test_startup():
    lines = run('startup.py', '--models', 'mlp', '--rounds', '1', '--sides', 'plain', 'two contexts').splitlines()
    assert len(lines) == 4 and '; / plain: ' in lines[-1]
    lines = run('startup.py', '--entries', '20', '40', '--rounds', '1').splitlines()
    assert [line.split(',')[0] for line in lines] == [
        each for each in ('first function', 'known module', 'new module', 'exit') for _ in range(2)]


@pytest.mark.needs_compiler
@pytest.mark.slow
def test_second_start():
    lines = run('second_start.py', 'fixes', 'run:a->cpu', '--rounds', '1', '--script',
                'tests/programs/theano_scripts/logistic_sgd.py').splitlines()
    assert len(lines) == 4 and '; / fixes: ' in lines[-1]


@pytest.mark.mpi
@pytest.mark.slow
def test_over_ranks():
    launcher = ['-m', 'theano_mgpu', 'launch', '-n', '2']
    lines = run('over_ranks.py', '--models', 'mlp', '--rounds', '1', '--repeats', '1', launcher=launcher).splitlines()
    assert lines[-1].split()[:3] == ['mlp', '15.9', '5']


@pytest.mark.needs_compiler
@pytest.mark.slow
def test_exchanges_of_two_checkouts_are_compared(tmp_path):
    path, root = str(tmp_path / 'rows.json'), os.path.join(FOLDER, '..')
    lines = run('exchange.py', '--checkout', root, '--checkout', root, '--groups', '7.4', '--orders', 'any', 'tree',
                '--owners', 'all', 'one', '--numbers', '2', '--rounds', '2', '--block', '.01', '--json', path)
    with open(path) as f:
        rows = json.load(f)
    assert len(lines.splitlines()) == 5 and lines.count(' = ') == 4
    assert all(0 < row['lowest'] <= row['ratio'] <= row['highest'] for row in rows)
    assert all(len(times) == 2 for row in rows for times in row['seconds'].values()) and len(rows) == 4


@pytest.mark.needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize('options', [[], ['--always']], ids=str)
def test_dispatch(options):
    lines = run('dispatch.py', '--batch-sizes', '1', '9', '--rounds', '1', *options).splitlines()
    assert [' '.join(line.split()[:2]) for line in lines[-4:]] == ['%s, %d' % (method, size) for method in (
        'predict_on_batch', 'train_on_batch') for size in (1, 9)]


QUICK = 'choices.py', 'dispatch.py', 'published.py'
OTHERS = ('step_overhead.py', 'keras_autoencoder.py', 'keras_overhead.py', 'scaling.py', 'predict.py',
          'compile_once.py', 'all_reduce.py', 'versions.py', 'devices.py', 'theano_script.py',
          'placement.py', 'host_loops.py', 'vector_math.py', 'startup.py', 'second_start.py', 'over_ranks.py',
          'predict_scaling.py', 'exchange.py')


@pytest.mark.slow_but_with('choices.py')
@pytest.mark.parametrize('script', [*QUICK, *OTHERS])
def test_help_teaches(script):
    assert 'Examples:' in run(script, '--help')


@pytest.mark.slow
@pytest.mark.mpi
def test_tables():
    """The step that exchanges rows is compared with the step that exchanges the table."""
    out = run('tables.py', '--words', '20000', '--size', '16', '--batch', '4', '--length', '2', '--rounds', '2',
              flags='cxx=,optimizer=fast_compile', launcher=['-m', 'theano_mgpu', 'launch', '-n', '2'])
    assert re.findall(r'^(\S+)', out, re.M) == ['table', 'by', 'ratio']
