"""The ledger of a run: its lines, a run that is killed and resumed, and the comparison of two."""
import json
import os
import re
from pathlib import Path

import theano_mgpu as mgpu
from theano_mgpu.auto.choice import Way
from theano_mgpu.checks import ledger, ledger_file
from theano_mgpu.checks.ledger_file import first_difference
from theano_mgpu.cli import main

import numpy as np
import pytest
import theano
import theano.tensor as T
from support.launch import INTERPRETED, launch
from support.modes import PYTHON
from support.processes import python
from theano.configparser import change_flags

X = np.random.RandomState(0).randn(40, 7, 3).astype('float32')


@pytest.fixture
def recording(tmp_path):
    """Return a function that begins a run with a ledger, as a new process would, and returns the file."""
    with change_flags(**{'mgpu.ledger': '', 'mgpu.ledger_every': 1}):
        def begin(name, every=1):
            ledger._open.clear()
            theano.config.mgpu.ledger, theano.config.mgpu.ledger_every = str(tmp_path / name), every
            return str(tmp_path / name)
        yield begin
    ledger._open.clear()


def network(contexts=None):
    """Return a training function and its parameters; the moments have no names."""
    x = T.fmatrix('x')
    w, v = (theano.shared(X[0, :3, :size] / 2, name=name) for name, size in (('w', 3), ('v', 1)))
    loss = ((T.dot(T.tanh(T.dot(x, w)), v) - 1) ** 2).mean()

    def updates(gradients):
        moments = [theano.shared(0 * param.get_value()) for param in (w, v)]
        new = [T.cast(.9 * moment + gradient, 'float32') for moment, gradient in zip(moments, gradients)]
        return [*zip(moments, new), *((param, T.cast(param - .1 * step, 'float32'))
                                      for param, step in zip((w, v), new))]
    return mgpu.training_function([x], loss, [w, v], updates, contexts=contexts, mode=PYTHON, name='train'), w, v


def trained(steps=12, flipped=0, contexts=None, checkpoint=None):
    """Train; in one of the steps, a bit of a new weight flips."""
    step, _, v = network(contexts)
    compute, numbers = step.locked_step, iter(range(1, steps + 1))

    def computed(arguments):
        results = compute(arguments)
        if next(numbers) == flipped:
            value = v.get_value()
            value.view('uint32')[2, 0] ^= 1 << 16
            v.set_value(value)
        return results
    step.locked_step = computed
    for i in range(step.checkpoint(checkpoint, every=3) if checkpoint else 0, steps):
        step(X[i % len(X)])
    return step


def difference(one, other):
    one, other = ledger_file.read(one), ledger_file.read(other)
    return first_difference(one, other, [key for key in one.steps if key in other.steps])


@pytest.mark.slow_with('every0-137-136')
@pytest.mark.parametrize('every, step, equal', [((1, 1), 137, 136), ((2, 3), 138, 132)])
def test_a_flipped_bit_is_found(every, step, equal, recording, cpu2, capsys):
    """A ledger may have a line for each step, and the other one fewer; the runs may be of different lengths."""
    straight = recording('straight', every[0])
    trained(142)
    flipped = recording('flipped', every[1])
    trained(139, flipped=137)
    found = difference(straight, flipped)
    assert (found.of, found.step, found.equal, found.n_variables) == ('train', step, equal, 4)
    assert found.variables == ['v'] if step == 137 else len(found.variables) == 4
    assert main(['compare', straight, flipped]) == 1
    text = capsys.readouterr().out
    assert 'the runs part at step %d of train: %s is the first variable' % (step, found.variables[0]) in text
    assert 'step %d is equal' % equal in text and ('mgpu.ledger_every=1' in text) == (step == 138)


def test_equal_runs_and_their_settings(recording, contexts, capsys):
    """Micro-batches of one context round as two contexts do; the settings in which the runs differ are listed."""
    for name in ('two', 'again'):
        recording(name)
        contexts('cpu', 2)
        trained(5)
    recording('one')
    contexts('cpu', 1)
    with change_flags(**{'mgpu.micro_batches': '2'}):
        trained(5)
    folder = os.path.dirname(theano.config.mgpu.ledger)
    assert main(['compare', folder + '/two', folder + '/again']) == 0
    text = capsys.readouterr().out
    assert 'equal: 5 steps of both have the same bits' in text and 'SETTING' not in text
    assert main(['compare', '--json', folder + '/two', folder + '/one']) == 0
    found = json.loads(capsys.readouterr().out)
    assert found['equal']
    assert {name for name, _, _ in found['settings']} == {'devices: host1', 'flags: mgpu.micro_batches'}
    start, = ledger_file.read(folder + '/two').starts
    assert start['versions']['numpy'] == np.__version__ and start['ranks'] == 1 and 'host1' in start['devices']


def test_a_resumed_run(recording, cpu2, tmp_path, capsys):
    """A run that is killed amid a line goes on from its checkpoint; the steps that it repeats have the same bits."""
    whole = recording('whole')
    trained()
    parts = recording('parts')
    trained(8, checkpoint=str(tmp_path / 'state.npz'))  # which is of step 6
    with open(parts, 'ab') as file:
        file.write(b'{"of": "train", "step": 9, "values": {' + b'"name": "digest", ' * 1000)
    read = ledger_file.read(parts)
    assert read.is_cut and [step for _, step in read.steps] == list(range(9))
    recording('parts')
    trained(checkpoint=str(tmp_path / 'state.npz'))
    read = ledger_file.read(parts)
    assert not read.is_cut and len(read.starts) == 2 and read.repeated == [('train', [6, 7, 8], [])]
    assert difference(whole, parts) is None and read.steps.keys() == ledger_file.read(whole).steps.keys()
    assert main(['compare', whole, parts]) == 0
    assert 'repeated by train: 6, 7, 8, which came out the same' in capsys.readouterr().out


def test_the_ledger_of_a_checkpoint(recording, cpu2, tmp_path):
    """It has a line for each checkpoint, and for some steps before the first; no function can write it more often."""
    step, path = network()[0], str(tmp_path / 'own')
    for i in range(step.checkpoint(str(tmp_path / 'state.npz'), every=3, ledger=path), 7):
        step(X[i])
    assert list(ledger_file.read(path).steps) == [('train', step) for step in (0, 1, 2, 3, 6)]
    with pytest.raises(mgpu.MgpuError, match='has a line every 3 steps in this process, not every 4'):
        step.checkpoint(str(tmp_path / 'state.npz'), every=4, ledger=path)


def test_a_run_that_begins_anew_replaces_its_lines(recording, cpu2, capsys):
    path = recording('a')
    trained(6, flipped=3)
    recording('a')
    trained(4)
    read = ledger_file.read(path)
    assert [step for _, step in read.steps] == list(range(5)) and read.repeated == [('train', [0, 1, 2, 3, 4], [3, 4])]


def test_a_changed_folder_changes_no_ledger(tmp_path):
    """The functions that were made after os.chdir wrote to a second file."""
    (tmp_path / 'other').mkdir()
    python('-c', """
import os, theano_mgpu as mgpu, theano.tensor as T, theano
mgpu.init('a->cpu')
def run(name):
    x, w = T.dvector('x'), theano.shared(0., 'w')
    mgpu.function([x], x + w, updates=[(w, w + 1)], name=name)([1.])
os.chdir('other'), run('one'), os.chdir('..'), run('two')
""", folder=tmp_path, flags='mgpu.ledger=run.jsonl,mgpu.ledger_every=1,cxx=,optimizer=fast_compile')
    assert {of for of, _ in ledger_file.read(str(tmp_path / 'run.jsonl')).steps} == {'one', 'two'}
    assert not os.listdir(str(tmp_path / 'other'))


def test_functions_of_one_name(recording, cpu2):
    """Functions without updates have no lines."""
    path, x = recording('a'), T.fmatrix('x')
    total = theano.shared(np.float32(0), name='total')
    for _ in range(2):
        mgpu.function([x], x.sum(), updates={total: total + x.sum()}, mode=PYTHON, name='add')(X[0])
    mgpu.function([x], x.sum(), mode=PYTHON, name='none')(X[0])
    assert list(ledger_file.read(path).steps) == [('add', 0), ('add', 1), ('add (2)', 0), ('add (2)', 1)]


def test_enabled_functions(recording, contexts):
    """Functions of a script have the same lines on one device, on several, and where they are not divided at all."""
    files = []
    for number, always in ((1, False), (2, True), (2, False)):
        files.append(recording('%d %s' % (number, always)))
        contexts('cpu', number)
        mgpu.enable(always=always, tell=str)
        try:
            x, factor, w = T.fmatrix('x'), T.fscalar('factor'), theano.shared(np.ones(3, 'float32'))
            rate = theano.shared(np.float32(.5), name='rate')
            step = theano.function([x], T.dot(x, w).sum(), updates=[(w, T.cast(w + (x > 0).sum(axis=0), 'float32'))],
                                   mode=PYTHON, name='step')
            decay = theano.function([factor], updates=[(rate, rate * factor)], mode=PYTHON, name='decay')
            for i in range(4):
                step(X[i])
                decay(.5)
        finally:
            mgpu.disable()
        assert (step.mgpu_divided.last_way() is Way.HOST) == (number == 1)
        assert decay.mgpu_divided.last_way() is Way.HOST  # it has no batch
    one, two, chosen = map(ledger_file.read, files)
    assert list(one.steps)[:4] == [('step', 0), ('step', 1), ('decay', 0), ('decay', 1)] and len(one.steps) == 10
    assert list(one.steps['step', 1]['values']) == ['#0 of step']
    assert one.steps == two.steps == chosen.steps


@pytest.mark.parametrize('always', [True, False])
def test_copies_of_enabled_functions(always, recording, cpu2):
    """A copy with updates has lines, also over other variables; one without has none."""
    path = recording('a')
    mgpu.enable(always=always, tell=str)
    try:
        x, (v, w) = T.fmatrix('x'), [theano.shared(np.ones(3, 'float32'), name=name) for name in 'vw']
        step = theano.function([x], updates=[(w, T.cast(w + x.sum(axis=0), 'float32'))], mode=PYTHON, name='step')
        same, other = step.copy(name='same'), step.copy(name='other', swap={w: v})
        again, reading = other.copy(name='again'), step.copy(name='reading', delete_updates=True)
        for function in (step, same, other, again, reading):
            function(X[0])
    finally:
        mgpu.disable()
    steps = {key: line['values'] for key, line in ledger_file.read(path).steps.items()}
    assert [key for key in steps if key[1]] == [('step', 1), ('same', 1), ('other', 1), ('again', 1)]
    assert [list(values) for (_, number), values in steps.items() if number] == [['w'], ['w'], ['v'], ['v']]
    assert steps['same', 1]['w'] == steps['again', 1]['v'] != steps['step', 1]['w']


@pytest.mark.parametrize('by_flag', [True, False])
def test_a_copy_that_is_profiled(by_flag, recording, cpu2, monkeypatch):
    """It runs in plain Theano, says so in the summary, and has lines as other copies have."""
    monkeypatch.setenv('CUDA_LAUNCH_BLOCKING', '1')  # Theano asks for it where an earlier test has opened a GPU
    path = recording('a')
    report = mgpu.enable(always=True, tell=str)
    try:
        x, w = T.fmatrix('x'), theano.shared(np.ones(3, 'float32'), name='w')
        step = theano.function([x], updates=[(w, T.cast(w + x.sum(axis=0), 'float32'))], mode=PYTHON, name='step')
        monkeypatch.setattr(theano.config, 'profile', by_flag)
        copy = step.copy(name='copy', profile=None if by_flag else True)
        for function in (step, copy, copy):
            function(X[0])
    finally:
        mgpu.disable()
        theano.config.profile = False
    assert list(ledger_file.read(path).steps) == [('step', 0), ('step', 1), ('copy', 0), ('copy', 1), ('copy', 2)]
    assert [usage.why for usage in report.usages if usage.name == 'copy'] == ['it is profiled']
    assert copy.profile.fct_callcount == 2


@pytest.mark.parametrize('content, text', [
    (b'print(1)\n', 'is no ledger of theano_mgpu'), (b'print', 'is no ledger'),
    (b'{"ledger": 1, "every": 1}\n{"of": \n', 'damaged in line 2'),
    (b'{"ledger": 9, "every": 1}\n', 'has the format 9')])
def test_files_that_are_no_ledgers(content, text, recording, tmp_path, cpu2, capsys):
    """They stay as they are."""
    path = Path(recording('a'))
    path.write_bytes(content)
    with pytest.raises(mgpu.MgpuError, match=text):
        network()
    assert path.read_bytes() == content
    assert main(['compare', str(path), str(path)]) == 2 and text in capsys.readouterr().err


def test_files_that_cannot_be_compared(recording, tmp_path, cpu2, capsys):
    one = recording('a')
    trained(1)
    other = recording('b')
    x, w = T.fmatrix('x'), theano.shared(np.float32(0), name='w')
    mgpu.function([x], updates={w: x.sum()}, mode=PYTHON, name='set')(X[0])
    assert main(['compare', one, other]) == main(['compare', one, str(tmp_path / 'none')]) == 2
    text = capsys.readouterr().err
    assert 'have no step in common' in text and 'train up to step 1' in text and 'No such file' in text


def test_a_program_that_has_closed_all_files_gets_no_line_into_another_one(recording, tmp_path, cpu2):
    """A line of JSON was in the file that had got the number of the ledger's descriptor."""
    path, x, w = recording('a'), T.fmatrix('x'), theano.shared(np.float32(0), name='w')
    f = mgpu.function([x], updates={w: x.sum()}, mode=PYTHON)
    f(X[0])
    with open(str(tmp_path / 'own'), 'w') as own:
        os.dup2(own.fileno(), ledger._open[path]._file.fileno())
        with pytest.raises(mgpu.MgpuError, match='cannot be written any more: the program has closed it'):
            f(X[0])
    assert (tmp_path / 'own').read_text() == '' and len(ledger_file.read(path).steps) == 2


@pytest.mark.mpi
def test_a_ledger_that_cannot_be_written_is_an_error_of_all_ranks(tmp_path):
    """It comes with the same text on each rank, at the same step where the function is over the ranks."""
    launch(2, 'unwritten', tmp_path / 'errors', flags=INTERPRETED)
    first, other = [json.loads(Path('%s.%d' % (tmp_path / 'errors', rank)).read_text()) for rank in range(2)]
    found = {}
    for name, (step, kind, text, after) in first.items():
        assert other[name][:2] == [step + name.startswith('enabled'), kind] and kind == 'MgpuError'
        assert other[name][2].startswith(text) and other[name][3] == after
        found[name] = re.match(r'(?:the ledger )?\S+ (.*?)(?:\.| /)', text).group(1)
    assert found == {
        'trained, remove': 'cannot be written any more: the file was removed',
        'trained, limited': 'cannot be written any more: File too large',
        'enabled, remove': 'cannot be written any more: the file was removed',
        'enabled, limited': 'cannot be written any more: File too large',
        'no folder': 'cannot be written: there is no folder'}


@pytest.mark.slow
@pytest.mark.mpi
def test_a_function_that_is_not_divided_may_run_on_rank_0_alone(tmp_path):
    launch(2, 'recorded_on_rank_0', tmp_path / 'ledger', flags=INTERPRETED, options=['--timeout', '5'])
    assert list(ledger_file.read(str(tmp_path / 'ledger')).steps) == [('decay', number) for number in range(4)]
