"""`--ledger` of `theano-mgpu run` and `launch`, and `theano-mgpu compare` of the ledgers of two commands."""
import json
import textwrap

from theano_mgpu.checks import ledger_file
from theano_mgpu.cli import main

import pytest
from support.launch import INTERPRETED
from support.processes import python

TWO = 'a->cpu;b->cpu'
SCRIPT = textwrap.dedent('''
    """Train, with a checkpoint; `python train.py KILLED`: rank 1 is killed at a step, if the run was not killed before.
    """
    import os, signal, sys
    import theano_mgpu as mgpu, numpy as np, theano, theano.tensor as T
    x = T.fmatrix('x')
    w, m = theano.shared(np.ones((3, 1), 'f'), name='w'), theano.shared(np.zeros((3, 1), 'f'), name='m')
    loss = ((T.tanh(T.dot(x, w)) - 1) ** 2).mean()
    step = mgpu.training_function([x], loss, [w], lambda g: [(m, .5 * m + g[0]), (w, w - .1 * (.5 * m + g[0]))])
    killed = int(sys.argv[1]) if sys.argv[1:] else 0
    rng = np.random.RandomState(0)
    batches = [rng.rand(8, 3).astype('f') for _ in range(12)]
    for i in range(step.checkpoint('state.npz', every=3) if killed else 0, 12):
        if i + 1 == killed and mgpu.rank() == 1 and not os.path.exists('killed'):
            open('killed', 'w').close()
            os.kill(os.getpid(), signal.SIGKILL)
        step(batches[i])
''')


@pytest.fixture
def command(tmp_path):
    """Return a function that runs a command in a folder with the script."""
    (tmp_path / 'train.py').write_text(SCRIPT)

    def run(*words, flags='', expected=0):
        every = [INTERPRETED, 'contexts=' + TWO, 'mgpu.ledger_every=1', 'mgpu.shares=equal'] + [flags] * bool(flags)
        return python('-m', 'theano_mgpu', *words, folder=tmp_path, flags=','.join(every), expected=expected)
    return run


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.parametrize('update_on', ['auto', 'sharded'])
def test_one_process_and_two(update_on, command, tmp_path, capsys):
    """Two contexts and two processes have the same bits; a state of which each process has a part counts, too."""
    one, two = str(tmp_path / 'one.jsonl'), str(tmp_path / 'with space.jsonl')
    command('run', '-q', '--ledger', 'one.jsonl', 'train.py')
    command('launch', '-n', '2', '--ledger', 'with space.jsonl', 'train.py', flags='mgpu.update_on=' + update_on)
    assert main(['compare', one, two]) == 0, capsys.readouterr().out
    assert 'equal: 12 steps of both have the same bits' in capsys.readouterr().out
    starts = [ledger_file.read(path).starts[0] for path in (one, two)]
    assert [start['ranks'] for start in starts] == [1, 2] and list(starts[0]['devices']) == ['a', 'b']
    assert not list(tmp_path.glob('*.lock'))


@pytest.mark.mpi
@pytest.mark.slow
def test_a_killed_job(command, tmp_path):
    """A job that is killed and starts again has the bits of one that was not killed."""
    for name, killed in (('whole', '99'), ('parts', '8')):
        command('launch', '-n', '2', '--restarts', '1', '--ledger', name, 'train.py', killed)
        (tmp_path / 'state.npz').unlink()
    whole, parts = (ledger_file.read(str(tmp_path / name)) for name in ('whole', 'parts'))
    assert parts.steps == whole.steps and [len(each.starts) for each in (whole, parts)] == [1, 2]
    assert parts.repeated == [('a function', [6, 7], [])] and (tmp_path / 'killed').exists()


def test_a_file_that_cannot_be_written(command, tmp_path):
    """The error comes before the script begins."""
    (tmp_path / 'other').write_text('text')
    done = command('run', '--ledger', 'other', 'train.py', expected=2)
    assert 'other is no ledger of theano_mgpu' in done.stderr
    done = command('run', '--ledger', 'none/a', 'train.py', expected=2)
    assert 'none/a cannot be written' in done.stderr and 'Traceback' not in done.stderr
    done = command('launch', '-n', '2', 'train.py', flags='mgpu.ledger=none/a', expected=2)
    assert 'theano-mgpu: error: none/a cannot be written: there is no' in done.stderr


def test_the_options_of_launch(command):
    done = command('launch', '-n', '2', '--ledger', 'a', '--dry-run', 'run', 'train.py')
    assert "mgpu.ledger=" in done.stdout


def write(path, *lines, every=1, **start):
    """Write a ledger: its starts and steps, each a number or, of other functions, a pair of name and number."""
    with open(str(path), 'w') as file:
        for line in [dict(start, ledger=1, every=every), *lines]:
            print(json.dumps(line), file=file)
    return str(path)


def line(step, of='train', **values):
    return {'of': of, 'step': step, 'digest': str(sorted(values.items())), 'values': values}


def test_names_that_are_counted_up(tmp_path, capsys):
    """Keras counts the names of layers up from model to model; other variables may be in one run only."""
    one, other = [
        write(tmp_path / name, line(1, **{'dense_%d/w' % i: 'x', 'dense_%d/w' % (i + 1): 'y'}),
              line(2, w='x', **{name: 'z'}), blas={'x': str(i)}) for name, i in (('v', 1), ('u', 3))]
    assert main(['compare', one, other]) == 1
    text = capsys.readouterr().out
    assert 'part at step 2 of train: v is the first variable that differs' in text and '2 of 3 variables differ' in text
    assert 'blas: x  1  3' in text


def test_what_was_not_compared(tmp_path, capsys):
    """Runs of which nothing but the initial values was compared counted as equal."""
    begun = write(tmp_path / 'begun', line(0, w='x'), line(0, 'other', v='x'))
    long = write(tmp_path / 'long', line(0, w='x'), line(4, w='y'), line(8, w='z'), line(0, 'other', v='x'))
    short = write(tmp_path / 'short', line(0, w='x'), line(4, w='y'))
    for one, other in ((begun, long), (long, begun), (begun, begun)):
        assert main(['compare', one, other]) == 2
        assert 'only the values before the first step are in both ledgers' in capsys.readouterr().err
    assert main(['compare', long, short]) == 0
    text = capsys.readouterr().out
    assert 'equal: 1 step of both have' in text
    assert 'not compared, since it is in %s alone: train after step 4, other' % long in text
    assert main(['compare', short, short]) == 0
    assert 'not compared' not in capsys.readouterr().out


def test_the_function_that_parts_first(tmp_path, capsys):
    one = write(tmp_path / 'a', line(1, w='x'), line(1, 'other', v='x'), line(2, w='x'), line(2, 'other', v='x'))
    other = write(tmp_path / 'b', line(1, w='x'), line(1, 'other', v='y'), line(2, w='y'), line(2, 'other', v='y'))
    assert main(['compare', '--json', one, other]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found['difference'] == {'of': 'other', 'step': 1, 'equal': None, 'variables': ['v'], 'n_variables': 1}
    assert main(['compare', one, other]) == 1
    assert 'no earlier step is in both ledgers' in capsys.readouterr().out
