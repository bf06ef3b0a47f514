"""The examples run as their README says, on one device where nothing divides them; frameworks are optional."""
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
NEEDS = {'lasagne_mnist': 'lasagne', 'blocks_main_loop': None, 'pymc3_minibatch': 'pymc3'}


INTERPRETED = 'contexts=dev0->cpu;dev1->cpu,floatX=float32,cxx=,optimizer=fast_compile'  # quicker than compiling


def run(name, *args, folder, flags):
    """Standard output of an example that runs with Theano's flags."""
    if NEEDS[name] and importlib.util.find_spec(NEEDS[name]) is None:
        pytest.skip('%s is not installed: examples/README.md says how' % NEEDS[name])
    path = os.pathsep.join([str(ROOT), os.environ.get('PYTHONPATH', '')])
    env = dict(os.environ, THEANO_FLAGS=flags, PYTHONPATH=path)
    done = subprocess.run([sys.executable, '-m', 'theano_mgpu', 'run', str(ROOT / 'examples' / (name + '.py')), *args],
                          cwd=folder, env=env, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def numbers(pattern, text):
    return [float(number) for number in re.findall(pattern + r' (-?\d+\.\d+)', text)]


def test_each_example_is_listed_and_is_a_script_of_its_framework():
    """As users have them: none knows of theano_mgpu."""
    found = {path.stem for path in (ROOT / 'examples').glob('*.py')}
    assert found == set(NEEDS)
    readme = (ROOT / 'examples' / 'README.md').read_text()
    for name in found:
        text = (ROOT / 'examples' / (name + '.py')).read_text()
        command = 'theano-mgpu run examples/%s.py' % name
        assert 'theano_mgpu' not in text and command in text and command in readme


def test_blocks(tmp_path):
    out = run('blocks_main_loop', '--epochs', '3', folder=tmp_path, flags=INTERPRETED)
    costs, errors = numbers('valid_cost', out), numbers('valid_error_rate', out)
    assert len(costs) == 4 and costs[-1] < costs[0] / 2 and errors[-1] < 0.3 < errors[0]
    assert len(numbers('train_gradient_norm', out)) == 3


@pytest.mark.needs_compiler  # which draws random numbers quickly, too
@pytest.mark.parametrize('model', ['mlp', 'cnn'])
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
