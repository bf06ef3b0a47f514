"""Bugs that were found and fixed, each under its symptom: checkpoints of training functions."""
import json
import os
import re
import resource
import subprocess
import sys

import theano_mgpu as mgpu
from theano_mgpu.runtime.state import state_file
from theano_mgpu.utils.flag_text import GONE

import numpy as np
import pytest
import theano
import theano.tensor as T
from support.checkpoint_files import earlier_file, rewrite
from support.small_models import data, dense_model, momentum

pytestmark = pytest.mark.verified
MODES = {'cpu': 'FAST_COMPILE', 'gpu': theano.Mode(optimizer='fast_compile')}  # quick to compile


@pytest.mark.parametrize('kind', ['cpu', pytest.param('gpu', marks=pytest.mark.slow)])
def test_a_step_that_failed_is_no_step_of_a_checkpoint(contexts, kind, tmp_path):
    """Calls were counted: after a retry and a crash, a batch was left out."""
    contexts(kind, 2)
    model, path = dense_model(), str(tmp_path / 'run.npz')
    step = mgpu.training_function(model.inputs, model.loss, model.params, momentum, check_finite=True,
                                  mode=theano.Mode(optimizer='fast_compile'))
    x, labels = data(6, 7)
    bad = np.where(x == x[3], np.nan, x).astype(x.dtype)
    assert step.checkpoint(path, every=2) == 0
    step(x, labels)
    with pytest.raises(mgpu.NonFiniteError):
        step(bad, labels)
    with pytest.raises(mgpu.BatchError):
        step(x, labels[:2])
    assert not os.path.exists(path)
    step(x, labels)
    after_two = model.params[0].get_value()
    step(x, labels)
    assert step.checkpoint(path, every=2) == 2
    np.testing.assert_array_equal(model.params[0].get_value(), after_two)
    step(x, labels)
    step(x, labels)
    assert step.checkpoint(path, every=2) == 4


def counting_step(start=0.0):
    """Return a quick step whose only variable, w, counts steps."""
    x, w = T.vector('x'), theano.shared(np.asarray(start, theano.config.floatX), name='w')
    return w, mgpu.training_function([x], (x * w).mean(), [w], lambda gradients: {w: w + 1 + 0 * gradients[0]},
                                     mode=theano.Mode(optimizer='fast_compile'))


def cut_short(path):
    os.truncate(path, os.path.getsize(path) - 40)


def change_a_byte(path):
    with open(path, 'r+b') as file:
        content = file.read()
        file.seek(content.index(b'\x93NUMPY') + 100)
        file.write(bytes([content[file.tell()] ^ 1]))


def make_empty(path):
    open(path, 'wb').close()


@pytest.mark.slow
@pytest.mark.parametrize('kind', ['cpu', 'gpu'])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_taken(contexts, kind, tmp_path):
    """No earlier file was kept, and messages were "File is not a zip file", "Bad CRC-32 for file 'value/0.npy'"."""
    contexts(kind, 2)
    path, batch = str(tmp_path / 'run.npz'), np.ones(4, theano.config.floatX)
    w, step = counting_step()
    step.checkpoint(path, every=2)
    for _ in range(5):
        step(batch)
    assert sorted(os.listdir(str(tmp_path))) == ['run.npz', 'run.npz.lock', 'run.npz.previous']
    for damage in (cut_short, change_a_byte, make_empty):
        damage(path)
        with pytest.warns(mgpu.MgpuWarning, match='run.npz is damaged .* taken, from .*run.npz.previous'):
            assert step.checkpoint(path, every=2) == w.get_value() == 2
        with pytest.warns(mgpu.MgpuWarning, match='damaged'):
            step.load(path)
    step(batch)
    step(batch)  # the damaged file takes no whole one's place
    for name, expected in (('run.npz', 4), ('run.npz.previous', 2)):
        step.load(str(tmp_path / name))
        assert w.get_value() == expected
    cut_short(path)
    cut_short(path + '.previous')
    with pytest.raises(ValueError, match='run.npz is damaged.*there is no intact .*run.npz.previous. Name another'):
        step.load(path)
    assert w.get_value() == 2
    os.remove(path)
    assert step.checkpoint(path, every=1) == 0
    step(batch)
    assert 'run.npz.previous' not in os.listdir(str(tmp_path)), 'a former run has left what is before'


@pytest.mark.parametrize('kind', ['cpu', pytest.param('gpu', marks=pytest.mark.slow)])
def test_values_that_are_not_finite_take_no_good_checkpoint_s_place(contexts, kind, tmp_path):
    contexts(kind, 2)
    path, batch = tmp_path / 'run.npz', np.ones(4, theano.config.floatX)
    w, step = counting_step()
    step.save(path)
    w.set_value(np.asarray(np.nan, theano.config.floatX))
    with pytest.warns(mgpu.MgpuWarning, match='w: not a number, or infinite. .*npz is not written') as warned:
        step.save(path)
        step.save(path)
        step.checkpoint(str(tmp_path / 'other.npz'), every=1)
        step(batch)
    assert len(warned) == 2 and not os.path.exists(str(tmp_path / 'other.npz'))
    step.load(path)
    assert w.get_value() == 0
    w.set_value(np.asarray(np.inf, theano.config.floatX))
    step.checkpoint(str(tmp_path / 'other.npz'), every=1, allow_nan=True)
    step(batch)
    w.set_value(np.asarray(0, theano.config.floatX))
    step.load(str(tmp_path / 'other.npz'))
    assert np.isinf(w.get_value())


def test_a_full_disk_leaves_the_old_checkpoint_and_the_message_names_it(tmp_path, cpu2):
    path = str(tmp_path / 'run.npz')
    w, step = counting_step(1)
    step.save(path)
    before, limit = open(path, 'rb').read(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limit[1]))
    try:
        with pytest.raises(OSError, match='run.npz could not be written, and is as it was before: File too large'):
            step.save(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert open(path, 'rb').read() == before and os.listdir(str(tmp_path)) == ['run.npz']
    with pytest.raises(FileNotFoundError, match='nowhere/run.npz could not be written'):
        step.save(str(tmp_path / 'nowhere' / 'run.npz'))


def test_files_that_dead_processes_left_unfinished_are_removed(tmp_path):
    from theano_mgpu.utils.files import whole_file
    path = str(tmp_path / 'run[1].npz')
    ended = subprocess.Popen(['true'])
    ended.wait()
    host = os.uname().nodename
    left = '%s.%s.%d.unfinished' % (path, host, ended.pid)
    others = ['%s.%s.%d.unfinished' % (path, host, os.getppid()), path + '.another-host.%d.unfinished' % ended.pid]
    for name in [left] + others:
        open(name, 'w').close()
    with whole_file(path) as unfinished:
        open(unfinished, 'w').close()
    assert sorted(os.listdir(str(tmp_path))) == sorted(map(os.path.basename, [path] + others))


def test_a_file_is_on_the_disk_before_it_takes_the_old_one_s_place_and_the_folder_after(tmp_path, monkeypatch):
    """A power failure left an empty file, or the old one."""
    from theano_mgpu.utils.files import whole_file
    path, done = str(tmp_path / 'run.npz'), []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, 'fsync', lambda fd: done.append(os.path.basename(os.readlink('/proc/self/fd/%d' % fd)))
                        or fsync(fd))
    monkeypatch.setattr(os, 'replace', lambda old, new: done.append('replace') or replace(old, new))
    with whole_file(path) as unfinished:
        open(unfinished, 'w').close()
    assert done == [os.path.basename(unfinished), 'replace', tmp_path.name]
    monkeypatch.setattr(os, 'link', lambda *names: (_ for _ in ()).throw(OSError('no hard links here')))
    with whole_file(path, path + '.previous') as unfinished:
        with open(unfinished, 'w') as file:
            file.write('new')
    assert open(path).read() == 'new' and open(path + '.previous').read() == ''


@pytest.mark.parametrize('kind', ['cpu', pytest.param('gpu', marks=pytest.mark.slow)])
def test_a_checkpoint_of_another_job_is_refused(kind, contexts, tmp_path):
    """Two jobs on one file went on from each other's state."""
    contexts(kind, 2)
    path, model = str(tmp_path / 'run.npz'), dense_model()
    code = "import sys; from theano_mgpu.utils.owned import lock_file; lock = lock_file(%r)\n" \
        "print('locked', flush=True); sys.stdin.read()" % path
    step = mgpu.training_function(model.inputs, model.loss, model.params, momentum, mode=MODES[kind])
    with subprocess.Popen([sys.executable, '-c', code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        with pytest.raises(mgpu.MgpuError, match='in use by another job, process %d on host' % other.pid):
            step.checkpoint(path, 1)
    assert step.checkpoint(path, 1) == 0


def step_with(**flags):
    """Return w and the quick step, made with some of the package's flags."""
    with theano.configparser.change_flags(**{'mgpu.' + name: value for name, value in flags.items()}):
        return counting_step()


def checkpoint_of(path, **flags):
    """Write a checkpoint after two steps of a function with some flags."""
    _, step = step_with(**flags)
    step.checkpoint(path, every=2)
    for _ in range(2):
        step(np.ones(4, theano.config.floatX))


@pytest.mark.slow_but_with('4-0')
@pytest.mark.parametrize('before, after', [(4, 8), (4, 0), (0, 4)])
def test_another_number_of_logical_shards_is_said(cpu2, tmp_path, before, after):
    """The training went on without a word, and had the bits of neither number."""
    path = str(tmp_path / 'run.npz')
    checkpoint_of(path, logical_shards=before)
    w, step = step_with(logical_shards=after)
    with pytest.raises(ValueError, match=r'run.npz was written with mgpu.logical_shards=%d, but this function has %d.* '
                       'Set the flag to that of the file to continue' % (before, after)):
        step.checkpoint(path, every=2)
    assert w.get_value() == 0
    with pytest.warns(mgpu.MgpuWarning, match=r'logical_shards=%d, but this function has %d' % (before, after)):
        step.load(path)
    assert w.get_value() == 2
    w, step = step_with(logical_shards=before)
    assert (step.checkpoint(path, every=2), w.get_value()) == (2, 2)


def test_other_settings_that_change_the_answer_are_said(cpu2, tmp_path):
    path = str(tmp_path / 'run.npz')
    checkpoint_of(path)
    with theano.configparser.change_flags(**{'mgpu.tf32': 'True'}):
        _, step = counting_step()
        with pytest.warns(mgpu.MgpuWarning, match='mgpu.tf32 was False and is True'):
            assert step.checkpoint(path, every=2) == 2


@pytest.mark.slow_but_with('update_on-device-host-0')
@pytest.mark.parametrize('name, before, after, shards', [
    ('update_on', 'device', 'host', 4), ('vector_math', 'auto', 'off', 4), ('update_on', 'device', 'host', 0),
    ('shares', 'equal', '3:1', 4), ('collectives', 'auto', 'host', 4)])
def test_settings_that_change_bits_are_said_where_bits_are_promised(cpu2, tmp_path, name, before, after, shards,
                                                                    recwarn):
    path = str(tmp_path / 'run.npz')
    flags = {'mgpu.logical_shards': shards}
    with theano.configparser.change_flags(**flags, **{'mgpu.' + name: before}):
        checkpoint_of(path)
    with theano.configparser.change_flags(**flags, **{'mgpu.' + name: after}):
        mgpu.init('other0->cpu')
        _, step = counting_step()
        assert step.checkpoint(path, every=2) == 2
    said = [str(each.message) for each in recwarn if 'other settings' in str(each.message)]
    if shards and name not in ('shares', 'collectives'):
        assert len(said) == 1 and 'mgpu.%s was %s and is %s. ' % (name, before, after) in said[0]
    else:
        assert said == []


@pytest.mark.slow_with('random-exact-4', 'batch_statistics-local-0')
@pytest.mark.parametrize('name, before, shards', [
    ('random', 'exact', 0), ('random', 'exact', 4), ('random', 'independent', 0), ('exchange', 'float16', 0),
    ('batch_statistics', 'local', 0), ('batch_statistics', 'exact', 0)])
def test_a_checkpoint_of_a_version_with_flags_that_changed_the_answer(cpu2, tmp_path, name, before, shards, recwarn):
    """Such a file has these flags, and the states of the streams that a replica drew from by itself."""
    path = str(tmp_path / 'run.npz')
    checkpoint_of(path, logical_shards=shards)
    flags = json.loads(str(state_file.read(path)['settings']))
    assert 'flags: mgpu.' + name not in flags
    states = {'stream/0/%d' % i: np.full((5, 6), i, 'int32') for i in range(2)} if before == 'independent' else {}
    rewrite(path, {'settings': np.array(json.dumps({**flags, 'flags: mgpu.' + name: before})), **states})
    w, step = step_with(logical_shards=shards)
    assert (step.checkpoint(path, every=2), w.get_value()) == (2, 2)
    said = [str(each.message) for each in recwarn if 'other settings' in str(each.message)]
    now = GONE['mgpu.' + name][0]
    assert ['mgpu.%s was %s and is %s. ' % (name, before, now) in each for each in said] == [True] * (before != now)


@pytest.mark.slow_with('4')
@pytest.mark.parametrize('shards', [0, 4])
def test_a_checkpoint_without_a_record_of_settings_is_continued(cpu2, tmp_path, shards, recwarn):
    """A version reads the files of every earlier one."""
    path = str(tmp_path / 'run.npz')
    checkpoint_of(path)
    rewrite(path, {}, without=['settings'])
    _, step = step_with(logical_shards=shards)
    assert step.checkpoint(path, every=2) == 2
    assert [str(each.message) for each in recwarn if 'it has no record' in str(each.message)] != [] or not shards


def test_a_checkpoint_of_an_earlier_version(cpu2, tmp_path):
    w, step = counting_step()
    assert step.checkpoint(earlier_file('steps.npz', tmp_path), every=2) == w.get_value() == 2


def test_a_changed_folder_changes_no_checkpoint(cpu2, tmp_path, monkeypatch):
    """The lock was in one folder, and the file in another one."""
    _, step = counting_step()
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'other').mkdir()
    step.checkpoint('run.npz', every=1)
    os.chdir('other')
    step(np.ones(4, theano.config.floatX))
    assert os.listdir('.') == [] and (tmp_path / 'run.npz').exists()


@pytest.mark.slow_with('0.1-2-0.5-')
@pytest.mark.parametrize('rate, power, value, text', [
    (.1, 2, .5, ''), (.2, 3, .6, 'output 0 of function 0 was ops .*factor was 0.5 and is 0.6')])
def test_a_training_function_that_has_changed_is_said(rate, power, value, text, contexts, tmp_path, recwarn):
    """The training went on, with another rate or loss, without a word. Other contexts are no change."""
    def made(n_contexts, rate, power, value):
        contexts('cpu', n_contexts)
        x, w, factor = T.dvector('x'), theano.shared(2., 'w'), theano.shared(value, 'factor')
        return mgpu.training_function([x], abs(x * w).__pow__(power).mean(), [w],
                                      lambda gradients: {w: w - rate * factor * gradients[0]}, mode='FAST_COMPILE')
    path = str(tmp_path / 'run.npz')
    step = made(2, .1, 2, .5)
    step.checkpoint(path, every=1)
    step(np.ones(4))
    step = made(3, rate, power, value)
    assert step.checkpoint(path, every=1) == 1
    said = [str(each.message) for each in recwarn if 'another script' in str(each.message)]
    assert len(said) == bool(text) and all(re.search('by another script: .*' + text, each) for each in said), said
    recwarn.clear()
    step.load(path)
    assert not [each for each in recwarn if 'another script' in str(each.message)], 'the user asks for another function'
