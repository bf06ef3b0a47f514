"""The examples run as their README says, on one device where nothing divides them; frameworks are optional."""
import importlib.util
import itertools
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from support.event_files import read, scalars
from support.processes import python

ROOT = Path(__file__).resolve().parents[2]
NEEDS = {'lasagne_mnist': 'lasagne', 'blocks_main_loop': None, 'pymc3_minibatch': 'pymc3', 'train': None}
PLACED = {'two_towers': (), 'two_towers_keras': ('--float64',)}  # with the option for float64
WATCHED = ['autoencoder', 'autoencoder_keras']  # in TensorBoard
SCRIPTS = ['mnist_cnn', 'theano_cnn', 'predict_batches', 'resume_after_kill']

INTERPRETED = 'contexts=dev0->cpu;dev1->cpu,floatX=float32,cxx=,optimizer=fast_compile'  # quicker than compiling
COMPILED = 'floatX=float32,optimizer=fast_compile'  # convolutions in Python would take minutes

WAYS = {'run': ['run'], 'one': ['run', '--one'], 'launch': ['launch', '-n', '2', '--gpus-per-process', '2', 'run']}
TWO = '--contexts dev0->cpu;dev1->cpu '
SMALL = TWO + '--filters 4 8 --epochs 1 --samples 130'
SHORT = {  # for each example short arguments, and flags
    'mnist_cnn': ('--epochs 1', COMPILED), 'theano_cnn': (TWO + '--epochs 2', COMPILED),
    'autoencoder': (SMALL, COMPILED), 'autoencoder_keras': (SMALL, COMPILED),
    'predict_batches': (TWO + '--samples 3000', INTERPRETED), 'resume_after_kill': (TWO, INTERPRETED),
    'two_towers': (TWO + '--steps 3', INTERPRETED.replace('32', '64')),
    'two_towers_keras': (TWO + '--steps 3 --float64', INTERPRETED.replace('32', '64')),
    'train': ('1', COMPILED), 'lasagne_mnist': ('mlp --epochs 1', INTERPRETED),
    'blocks_main_loop': ('--epochs 1', INTERPRETED),
    'pymc3_minibatch': ('--steps 100 --draws 5', 'floatX=float64,optimizer=fast_compile')}


def run(name, *args, folder, flags):
    """Return the standard output of an example that runs with Theano's flags."""
    if NEEDS[name] and importlib.util.find_spec(NEEDS[name]) is None:
        pytest.skip('%s is not installed: examples/README.md says how' % NEEDS[name])
    example = ROOT / 'examples' / (name + '.py')
    return python('-m', 'theano_mgpu', 'run', example, *args, folder=folder, flags=flags).stdout


def numbers(pattern, text):
    return [float(number) for number in re.findall(pattern + r' (-?\d+\.\d+)', text)]


def test_each_example_is_listed_and_is_a_script_of_its_framework():
    """Examples are as users have them: a script of a framework does not know of theano_mgpu."""
    found = {path.stem for path in (ROOT / 'examples').glob('*.py')}
    assert found == set(NEEDS) | set(PLACED) | set(WATCHED) | set(SCRIPTS)
    readme = (ROOT / 'examples' / 'README.md').read_text()
    for name in found:
        text = (ROOT / 'examples' / (name + '.py')).read_text()
        imports = name not in NEEDS
        command = ('python examples/%s.py' if imports else 'theano-mgpu run examples/%s.py') % name
        assert ('theano_mgpu' in text) == imports and command in text and command in readme


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.needs_compiler
@pytest.mark.parametrize('case', list(itertools.product(SHORT, WAYS)), ids='-'.join)
def test_each_example_runs_under_run(case, tmp_path):
    """Four of the five examples of Keras ended in a circular import. Then multi_gpu_model found too few contexts."""
    name, way = case
    if NEEDS.get(name) and importlib.util.find_spec(NEEDS[name]) is None:
        pytest.skip('%s is not installed: examples/README.md says how' % NEEDS[name])
    arguments, flags = SHORT[name]
    lacks_one = name in PLACED and way == 'one'
    done = python('-m', 'theano_mgpu', *WAYS[way], ROOT / 'examples' / (name + '.py'), *arguments.split(),
                  folder=tmp_path, flags=flags, expected=1 if lacks_one else 0)
    assert ('a process needs two contexts' in done.stderr) == lacks_one
    assert 'nothing was divided' not in done.stderr and 'did not work together' not in done.stderr, done.stderr


@pytest.mark.slow
@pytest.mark.needs_compiler  # convolutions
def test_the_demo_ends_with_three_lines():
    """It ended with a table of 14 columns, on devices that were slower together than one is."""
    environment = {**os.environ, 'THEANO_FLAGS': 'optimizer=fast_compile'}
    environment.pop('OMP_NUM_THREADS', None)  # every core
    done = subprocess.run([sys.executable, '.ci/demo', '--epochs', '2'], cwd=ROOT, stdout=subprocess.PIPE, text=True,
                          env=environment)
    time, answer, command = done.stdout.splitlines()[-3:]
    assert re.search(r'an epoch as it is, \S+ s (on all devices: \S+ times as fast|under run, kept .* WHY)$', time)
    same = 'answer  the same: a step differs by '
    assert answer.startswith(same if len(os.sched_getaffinity(0)) > 1 else 'answer  nothing to compare')
    assert command.endswith('theano-mgpu run your_script.py')
    losses = re.findall('loss (.*),', done.stdout)
    assert len(losses) == 4 and losses[:2] == losses[2:]
    assert all(len(line) <= 80 for line in done.stdout.splitlines() if 'note:' not in line and ' ms' not in line)


@pytest.mark.parametrize('summary, end', [
    ('1 of 1 function on 2 contexts (dev0->cpu;dev1->cpu)', 'on all devices: 2.0 times as fast'),
    ('1 of 1 function on 1 context (dev0->cuda0)', 'under run, kept on one device: see WHY'),
    ('0 of 1 function ran on several contexts', 'under run, kept on the host: see WHY')])
def test_the_demo_says_where_the_script_ran(summary, end):
    """It said "on all devices" of a script that stayed on the host."""
    line = runpy.run_path(str(ROOT / '.ci' / 'demo'))['speed'](10.5, 5.25, 'epoch 1\ntheano-mgpu: %s\n' % summary)
    assert line == '10.50 s an epoch as it is, 5.25 s ' + end and len('time    ' + line) <= 80


@pytest.mark.slow
def test_blocks(tmp_path):
    out = run('blocks_main_loop', '--epochs', '3', folder=tmp_path, flags=INTERPRETED)
    costs, errors = numbers('valid_cost', out), numbers('valid_error_rate', out)
    assert len(costs) == 4 and costs[-1] < costs[0] / 2 and errors[-1] < 0.3 < errors[0]
    assert len(numbers('train_gradient_norm', out)) == 3


@pytest.mark.needs_compiler  # which draws random numbers quickly, too
@pytest.mark.parametrize('model', [pytest.param('mlp', marks=pytest.mark.slow), 'cnn'])
def test_lasagne(model, tmp_path):
    out = run('lasagne_mnist', model, '--epochs', '3', folder=tmp_path, flags='floatX=float32')
    accuracies = numbers('validation accuracy', out)
    assert len(accuracies) == 3 and accuracies[-1] > 60 and numbers('test accuracy', out)[0] > 60


def test_pymc3(tmp_path):
    """ADVI on minibatches and NUTS find the weights that the data were made with."""
    out = run('pymc3_minibatch', folder=tmp_path, flags='floatX=float64')
    for method in ('ADVI', 'NUTS'):
        line = re.search('^%s: (.*)' % method, out, re.M).group(1)
        found = [float(number) for number in re.findall(r'-?\d+\.\d+', line)]
        assert found == pytest.approx([1, -2, 0.5, 0.7, 0.3], abs=0.1), line


@pytest.mark.slow
@pytest.mark.parametrize('name', list(PLACED))
def test_placed_on_two_devices(name, tmp_path):
    """The examples compare with one device themselves."""
    out = script(name, '--contexts', 'dev0->cpu;dev1->cpu', *PLACED[name], folder=tmp_path,
                 flags=INTERPRETED.replace('float32', 'float64'))
    losses = numbers('loss', out)
    assert len(losses) == 20 and losses[-1] < losses[0] / 2
    differences = re.findall(r'^(\w+) +differ by (\S+) at most$', out, re.M)
    assert sorted(what for what, _ in differences) == ['gradients', 'losses', 'outputs', 'weights']
    assert all(float(largest) < 1e-9 for _, largest in differences)
    assert all(int(re.search(r'(\d+) on %s\b' % where, out).group(1)) > 20
               for where in ('dev0', 'dev1', 'the host'))


@pytest.mark.slow
@pytest.mark.needs_compiler  # convolutions
@pytest.mark.parametrize('name', WATCHED)
def test_autoencoders(name, tmp_path):
    """The autoencoders learn, and TensorBoard reads losses, six images, histograms and the graph."""
    out = script(name, '--contexts', 'dev0->cpu;dev1->cpu', '--filters', '4', '8', '--epochs', '2', '--samples', '330',
                 '--logs', 'logs', folder=tmp_path, flags='floatX=float32')
    assert '330 training and 297 test images' in out and 'dev0 on cpu, dev1 on cpu' in out
    events = read(tmp_path / 'logs')
    training, test = {'autoencoder': ('loss/training', 'loss/test'), 'autoencoder_keras': ('loss', 'val_loss')}[name]
    for each in (training, test):
        (_, first), (_, last) = scalars(events, each)
        assert last < first
    assert 'training %.2f, test %.2f' % (scalars(events, training)[-1][1], scalars(events, test)[-1][1]) in out
    assert all(len(events.Images('output/image/%d' % i)) == 2 for i in range(6)) and events.Tags()['graph']
    assert len(events.Tags()['histograms']) == 8


def script(name, *arguments, folder, flags):
    """Return the standard output of a script that imports theano_mgpu itself."""
    example = ROOT / 'examples' / (name + '.py')
    return python(example, *arguments, folder=folder, flags=flags, KERAS_BACKEND='theano').stdout


@pytest.mark.slow
@pytest.mark.needs_compiler
def test_mnist_cnn(tmp_path):
    out = script('mnist_cnn', '--epochs', '3', folder=tmp_path, flags='floatX=float32,contexts=a->cpu;b->cpu')
    assert numbers('Test accuracy:', out)[0] > 0.7 and 'trained on a (cpu), b (cpu)' in out


@pytest.mark.slow
@pytest.mark.needs_compiler
def test_theano_cnn_learns_the_same_on_two_contexts(tmp_path):
    """The runs use float64. In float32, one context with the samples in another order differs by as much."""
    out = script('theano_cnn', '--contexts', 'a->cpu;b->cpu', '--epochs', '3', folder=tmp_path, flags='floatX=float64')
    header, one, two = [line.split() for line in out.partition('\n\n')[2].splitlines()[:3]]
    one, two = dict(zip(header, one)), dict(zip(header, two))
    assert (one['contexts'], two['contexts']) == ('1', '2') and float(two['difference']) < 1e-12
    assert float(one['accuracy']) > 0.8 and abs(float(one['accuracy']) - float(two['accuracy'])) < 0.01


@pytest.mark.slow
def test_predictions_in_batches(tmp_path):
    """The script compares with Keras, and with the command."""
    out = script('predict_batches', '--samples', '3000', '--command', '--folder', str(tmp_path), folder=tmp_path,
                 flags=INTERPRETED)
    assert '3000 samples over dev0 (cpu), dev1 (cpu)' in out and "its file: at most" in out


@pytest.mark.slow
def test_a_killed_training_is_resumed(tmp_path):
    out = script('resume_after_kill', folder=tmp_path, flags=INTERPRETED)
    assert 'killed:      by signal 9 after 17 batches' in out and 'the weights differ by' in out
    computed = [int(number) for number in re.findall(r'(\d+) batches computed', out)]
    assert computed == [30, 15]
