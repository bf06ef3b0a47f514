"""Bugs that were found and fixed, each under its symptom: checkpoints that are damaged, or no checkpoints."""
import io
import os
import shutil
import warnings
import zipfile
from types import SimpleNamespace

import theano_mgpu as mgpu
from theano_mgpu.comm.communicator import Communicator
from theano_mgpu.runtime.replicas.replicated import replicated
from theano_mgpu.runtime.state import state_file, training_state
from theano_mgpu.utils.owned import lock_file

import numpy as np
import pytest
import theano
from support.checkpoint_files import begin_again, rewrite

pytestmark = pytest.mark.verified


def variables(start=0.0):
    """Return two variables and a random stream that the contexts draw from; no function is compiled."""
    w = theano.shared(np.full((2, 3), start, 'float32'), name='w')
    v = theano.shared(np.full(2, start + 1), name='v')
    stream = theano.shared(np.random.RandomState(int(start)), name='stream')
    found = [replicated(w), replicated(v), replicated(stream)]
    for each in mgpu.contexts():
        found[2].on(each)
    return found


def values(found):
    return [str(training_state.to_array(variable.value()).tolist()) for variable in found]


def save(path, found, **options):
    training_state.save(str(path), found, Communicator(), **options)


def load(path, found, check=lambda saved: None):
    def check_all(saved):
        saved.check(found)
        check(saved)
    training_state.read(str(path), Communicator(), check_all).give(found)


@pytest.fixture
def two(cpu2, tmp_path):
    """Return a file, its content, and the variables as they were saved."""
    found, path = variables(3.0), tmp_path / 'run.npz'
    save(path, found, extra={'calls': np.array(7)})
    return path, path.read_bytes(), found


def assert_refused(path, content, found):
    """Check that a ValueError names the file and changes no variable, and that an intact file before it is loaded."""
    before, previous = values(found), path.with_name(path.name + '.previous')
    path.write_bytes(content)
    with pytest.raises(ValueError, match='run.npz') as caught:
        load(path, found)
    assert values(found) == before, caught.value
    save(path.with_name('good.npz'), found)
    os.replace(str(path.with_name('good.npz')), str(previous))
    with pytest.warns(mgpu.MgpuWarning, match='run.npz.*the state before it is taken, from .*run.npz.previous'):
        load(path, found)
    assert values(found) == before
    previous.unlink()


@pytest.fixture
def small(tmp_path):
    """Return a file of a few hundred bytes, and its content."""
    path = tmp_path / 'small.npz'
    with open(str(path), 'w+b') as file:
        state_file.write(file, {'names': np.array(['w']), 'value/0': np.arange(2.), 'extra/calls': np.array(3)})
    assert np.load(str(path))['extra/calls'] == state_file.read(str(path))['extra/calls'] == 3
    return str(path), path.read_bytes()


def test_each_flipped_bit_is_found(small):
    """12 of 741 flips, in the archive's directory, ended in a KeyError, and the file before was not used."""
    path, content = small
    with open(path, 'r+b', buffering=0) as file:
        for at, byte in enumerate(content):
            for other in [byte ^ 1 << at % 8, byte ^ 255, 0]:
                os.pwrite(file.fileno(), bytes([other]), at)
                if other != byte:
                    with pytest.raises(state_file.Damaged):
                        state_file.read(path)
            os.pwrite(file.fileno(), bytes([byte]), at)
    assert state_file.read(path)['extra/calls'] == 3


def test_each_truncation_is_found_and_so_is_what_is_added(small):
    path, content = small
    for other in (content + b'\0', content + content, b'\0' + content, content[:100] + content[101:]):
        with open(path, 'wb') as file:
            file.write(other)
        with pytest.raises(state_file.Damaged):
            state_file.read(path)
    with open(path, 'wb') as file:
        file.write(content)
    for length in reversed(range(len(content))):
        os.truncate(path, length)
        with pytest.raises(state_file.Damaged):
            state_file.read(path)


def test_a_damaged_file_changes_nothing_and_the_one_before_it_is_taken(two):
    path, content, _ = two
    found = variables(5.0)
    directory = content.index(b'PK\1\2')
    for at in (0, 40, len(content) // 2, directory, directory + 33, directory + 28, len(content) - 30, -1):
        flipped = bytearray(content)
        flipped[at] ^= 128
        assert_refused(path, bytes(flipped), found)
        assert_refused(path, content[:at], found)


def rewritten(content, format):
    """Return the content of a file with the same arrays and a right checksum, but another format."""
    arrays, out = dict(np.load(io.BytesIO(content))), io.BytesIO()
    state_file.write(out, dict(arrays, format=np.array(format)))
    return out.getvalue()


def test_a_file_without_a_checksum_or_of_another_format_is_refused(two):
    """Variables before the malformed one had the file's values after the error."""
    path, content, _ = two
    out = io.BytesIO()
    np.savez(out, **np.load(io.BytesIO(content)))
    assert_refused(path, out.getvalue(), variables(5.0))
    assert_refused(path, rewritten(content, 'theano_mgpu training state 99'), variables(5.0))


def test_other_files_in_its_place(two, tmp_path):
    path, content, _ = two
    found = variables(5.0)
    for name, write in (('a.npy', lambda f: np.save(f, np.zeros(3))), ('a.npz', lambda f: np.savez(f, x=np.zeros(3))),
                        ('empty.zip', lambda f: zipfile.ZipFile(f, 'w').close())):
        with open(str(tmp_path / name), 'wb') as file:
            write(file)
        assert_refused(path, (tmp_path / name).read_bytes(), found)
    for other in (b'', b'text', b'\x89HDF\r\n\x1a\n' + bytes(200), bytes(5000), b'PK\5\6' + bytes(18)):
        assert_refused(path, other, found)
    path.unlink()
    path.mkdir()
    with pytest.raises(ValueError, match='run.npz is damaged.*it is a folder'):
        load(path, found)
    path.rmdir()
    os.mkfifo(str(path))  # reading it would wait
    with pytest.raises(ValueError, match='run.npz is damaged.*a pipe'):
        load(path, found)
    with pytest.raises(FileNotFoundError, match='none.npz'):
        load(tmp_path / 'none.npz', found)


def test_swapped_files_of_two_models(two, tmp_path):
    """An intact file of another model is an error that says so, whatever file is before it."""
    path, content, found = two
    other = [replicated(theano.shared(np.zeros(4), name='b'))]
    save(tmp_path / 'other.npz', other)
    swapped = (tmp_path / 'other.npz').read_bytes()
    path.write_bytes(swapped)
    for _ in range(2):
        with pytest.raises(ValueError, match='run.npz holds the variables b, but this function has w, v, stream'):
            load(path, found)
        (tmp_path / 'run.npz.previous').write_bytes(content)
    assert path.read_bytes() == swapped


def test_an_error_in_the_middle_puts_all_values_back(two, monkeypatch):
    """A device that is full, or Ctrl-C, left the variables before with the file's values."""
    path, _, _ = two
    found = variables(5.0)
    before = values(found)
    original, calls = training_state._set, []

    def failing(variable, *rest):
        calls.append(variable)
        original(variable, *rest)
        if len(calls) == 3:
            raise KeyboardInterrupt
    monkeypatch.setattr(training_state, '_set', failing)
    with pytest.raises(KeyboardInterrupt):
        load(path, found)
    assert values(found) == before and len(calls) == 6


def test_a_file_that_does_not_count_steps_changes_nothing(two, tmp_path):
    """The error of step.checkpoint came after it had set all variables."""
    import theano.tensor as T
    x, w = T.vector('x'), theano.shared(np.asarray(2, theano.config.floatX), name='w')
    step = mgpu.training_function([x], (x * w).mean(), [w], lambda gradients: {w: w + 1 + 0 * gradients[0]},
                                  mode=theano.Mode('py', 'fast_compile'))
    path = str(tmp_path / 'w.npz')
    step.save(path)
    begin_again()
    mgpu.Checkpoint(str(tmp_path), [step], every=1)
    step(np.ones(4, theano.config.floatX))
    begin_again()
    w.set_value(np.asarray(5, theano.config.floatX))
    for wrong in (path, str(tmp_path / 'checkpoint.npz')):  # the latter was taken for one after no step
        with pytest.raises(ValueError, match='npz does not say how many steps it comes after'):
            step.checkpoint(wrong, every=1)
    assert w.get_value() == 5


def test_a_file_before_that_another_program_wrote_stays(two, tmp_path):
    """The file was replaced; where run.npz was missing, it was removed."""
    path, content, found = two
    previous = tmp_path / 'run.npz.previous'
    for make in (lambda: previous.write_text('a thesis'), previous.mkdir, lambda: previous.symlink_to(tmp_path / 'x')):
        (tmp_path / 'x').write_text('a thesis')
        make()
        seen = os.lstat(str(previous))
        training_state._foreign.clear()
        with pytest.warns(mgpu.MgpuWarning, match='run.npz.previous was not written by theano_mgpu: it stays'):
            save(path, found)
        with warnings.catch_warnings():
            warnings.simplefilter('error')  # once is enough
            save(path, found)
            path.unlink()
            save(path, found)
        assert os.path.samestat(seen, os.lstat(str(previous))) and (tmp_path / 'x').read_text() == 'a thesis'
        load(path, found)
        previous.rmdir() if previous.is_dir() else previous.unlink()
    for damage in (lambda: previous.write_bytes(content[:len(content) // 2]), lambda: previous.write_bytes(b'')):
        damage()  # a file of the package is replaced, also if it is damaged
        save(path, found)
        assert state_file.read(str(previous))


def test_a_folder_that_is_removed_during_the_job(two, tmp_path):
    """A traceback at exit: the lock was gone."""
    folder = tmp_path / 'gone'
    folder.mkdir()
    lock = lock_file(str(folder / 'run.npz'))
    shutil.rmtree(str(folder))
    with pytest.raises(FileNotFoundError, match='gone/run.npz could not be written'):
        save(folder / 'run.npz', variables())
    folder.write_text('a file')
    lock.release()
    again = lock_file(str(folder.parent / 'run.npz'))
    os.remove(str(tmp_path / 'run.npz.lock'))
    (tmp_path / 'run.npz.lock').write_text('of another job')
    again.release()
    assert (tmp_path / 'run.npz.lock').read_text() == 'of another job'


def test_a_keras_checkpoint_with_a_damaged_record():
    """The data that a fit adds to the file are checked, too."""
    from theano_mgpu.keras.hooks.fit_record import FitRecord
    record = FitRecord({'epochs': 3}, SimpleNamespace(stop_training=True))
    record.epochs, record.lengths, record.batches = [{'0/loss': np.float32(2)}], [2], [[1.], [2.]]
    arrays = record.to_arrays()
    found = record.of_file('run.npz', arrays)
    assert (found.epochs, found.lengths, found.batches) == (record.epochs, record.lengths, record.batches)
    assert found.stopped and found.completed == 4
    for key in arrays:
        if key not in ('batches', 'results/0', 'having/0/loss'):
            with pytest.raises(state_file.Damaged):
                record.of_file('run.npz', {name: array for name, array in arrays.items() if name != key})
    for key, value in (('fit', '['), ('fit', '[]'), ('lengths', 'x'), ('keys', [1]), ('having/0/loss', [7])):
        with pytest.raises(state_file.Damaged):
            record.of_file('run.npz', dict(arrays, **{key: np.array(value)}))


@pytest.mark.parametrize('key, value', [('begin/numpy', '{}'), ('begin/numpy', [3]), ('begin/python', [1, 2]),
                                        ('begin/python', 'x'), ('now/numpy', '{}')])
def test_states_of_random_generators_that_are_damaged(key, value, tmp_path):
    """A KeyError of `mgpu.Checkpoint` named no file."""
    count = theano.shared(0)
    step = theano.function([], updates={count: count + 1}, mode='FAST_COMPILE')
    begin_again()
    mgpu.Checkpoint(str(tmp_path), [step], every=1)
    step()
    rewrite(str(tmp_path / 'checkpoint.npz'), {'extra/' + key: np.array(value)})
    begin_again()
    with pytest.raises(ValueError, match='checkpoint.npz is damaged.*the states? of .*random .* cannot be read'):
        mgpu.Checkpoint(str(tmp_path), [step])
