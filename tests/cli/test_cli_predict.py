"""`theano-mgpu predict`: files of any size, outputs that are complete or absent, and resuming after a kill."""
import fcntl
import os
import pty
import re
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time

import theano_mgpu as mgpu
from theano_mgpu.cli import main
from theano_mgpu.cli.array_output import TEXT, UnfinishedOutput

import h5py
import numpy as np
import pytest
from cli_fixtures import own_contexts  # noqa: F401  restores the active contexts
from support import keras_equivalence  # noqa: F401  chooses Keras's backend first
from support import keras_zoo as zoo
from support.devices import context_map
from support.processes import python

N = 300
X = zoo.noise(N, 6).astype('float32')


@pytest.fixture(scope='module')
def saved_model(tmp_path_factory):
    """Return a file with a model, and the predictions of plain Keras."""
    path, model = tmp_path_factory.mktemp('made') / 'model.h5', zoo.dense()
    model.save(str(path))
    return path, model.predict(X)


@pytest.fixture
def files(saved_model, tmp_path, monkeypatch):
    """Make a folder with the model and its input, where the command runs; return the predictions of plain Keras."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv('THEANO_FLAGS', 'floatX=float32,optimizer=fast_compile,contexts=cli_a->cpu;cli_b->cpu')
    mgpu.init('cli_a->cpu;cli_b->cpu')
    shutil.copy(str(saved_model[0]), 'model.h5')
    np.save('x.npy', X)
    return saved_model[1]


def predict(*arguments):
    return main(['predict', 'model.h5'] + [str(argument) for argument in arguments])


def assert_close(ours, theirs):
    assert ours.dtype == theirs.dtype
    np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-7)


def start(*arguments, stderr=subprocess.PIPE):
    """Start the command in a process of its own."""
    # Background processes of a shell ignore Ctrl-C, and their children inherit that.
    return subprocess.Popen([sys.executable, '-m', 'theano_mgpu', 'predict', 'model.h5'] + list(arguments),
                            stderr=stderr, text=True, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))


# --- the same answer -----------------------------------------------------------------------------

def test_npy(files, capfd):
    assert predict('x.npy', 'y.npy') == 0
    assert_close(np.load('y.npy', mmap_mode='r'), files)
    out, err = capfd.readouterr()
    assert not out
    assert re.fullmatch(r'theano-mgpu: note: y.npy: 300 samples on 2 contexts \(cli_a->cpu;cli_b->cpu\), in [\d.]+ s '
                        r'with the loading of the model\n', err)
    assert sorted(os.listdir('.')) == ['model.h5', 'x.npy', 'y.npy']
    assert predict('x.npy', 'y.npy', '--quiet', '--gpus', 'cli_b', '--batch-size', 7) == 0
    assert_close(np.load('y.npy'), files)
    assert capfd.readouterr() == ('', '')
    assert predict('x.npy', 'y.npy', '--replicas-per-gpu', 2) == 0
    assert 'note: --replicas-per-gpu has no effect any more' in capfd.readouterr().err


def test_an_output_that_exists_is_replaced_with_a_note(files, capfd):
    np.save('y.npy', X)
    assert predict('x.npy', 'y.npy') == 0
    assert_close(np.load('y.npy'), files)
    assert 'y.npy exists: it will be replaced when all samples are done' in capfd.readouterr().err


def test_gpus(files):
    mgpu.init(context_map('gpu', 2))
    assert predict('x.npy', 'y.npy') == 0
    np.testing.assert_allclose(np.load('y.npy'), files, rtol=1e-5, atol=1e-6)


@pytest.mark.slow_but_with('y.npz-fortran')
@pytest.mark.parametrize('made', ['x.h5', 'compressed', 'stored', 'fortran', 'fortran compressed'])
@pytest.mark.parametrize('output', ['y.npz', 'y.h5'])
def test_several_inputs_and_outputs(files, made, output):
    model = zoo.functional()
    model.save('model.h5')
    arrays = {name: zoo.noise(N, size, seed=size).astype('float32') for name, size in zip(model.input_names, (6, 4))}
    order = 'F' if 'fortran' in made else 'C'
    kept = dict({name: np.array(array, order=order) for name, array in arrays.items()}, another=np.zeros(3))
    name = made
    if made == 'x.h5':
        with h5py.File(made, 'w') as file:
            for key, array in kept.items():
                file[key] = array
    else:
        name = 'x.npz'
        (np.savez_compressed if 'compressed' in made else np.savez)(name, **kept)
    assert predict(name, output, '--quiet') == 0
    expected = dict(zip(model.output_names, model.predict([arrays[key] for key in model.input_names])))
    with (np.load(output) if output == 'y.npz' else h5py.File(output, 'r')) as file:
        assert set(file) == set(expected)
        for key, value in expected.items():
            assert_close(np.array(file[key]), value)


def test_no_samples(files):
    np.save('x.npy', X[:0])
    assert predict('x.npy', 'y.npy') == 0
    assert np.load('y.npy').shape == (0, 3)


# --- complete or absent --------------------------------------------------------------------------

def header_of_rows():
    """Return the two lines before the rows; nothing while they are not complete."""
    if not os.path.exists('y.npy.unfinished'):
        return b''
    with open('y.npy.unfinished', 'rb') as file:
        lines = file.readline() + file.readline()
    assert lines.startswith(TEXT) or TEXT.startswith(lines)
    return lines if lines.count(b'\n') == 2 else b''


def saved_rows():
    header = header_of_rows()
    return (os.path.getsize('y.npy.unfinished') - len(header)) // 12 if header else 0


def kill_in_the_middle(rows):
    """Kill the command once `rows` rows are saved; return the number of saved rows."""
    process = start('x.npy', 'y.npy', '--batch-size', '1')
    while saved_rows() < rows:
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not os.path.exists('y.npy')
    return saved_rows()


@pytest.mark.slow
@pytest.mark.parametrize('kills', [1, 3])
def test_kill_and_resume(files, kills, capfd):
    """Saved rows are not computed again: rows that are changed between two runs keep their values."""
    np.save('x.npy', np.tile(X, (100, 1)))
    saved = 0
    for _ in range(kills):
        saved, before = kill_in_the_middle(saved + 200), saved
        assert before + 200 <= saved < 100 * N
    with open('y.npy.unfinished', 'r+b') as rows:
        rows.seek(len(header_of_rows()))
        rows.write(np.full((saved, 3), 7, 'float32').tobytes())
        rows.seek(0, os.SEEK_END)
        rows.write(b'half a row'[:7])
    assert predict('x.npy', 'y.npy') == 0
    error = capfd.readouterr().err
    assert 'y.npy: resuming after %d of %d samples' % (saved, 100 * N) in error
    assert 'y.npy: 30,000 samples, {:,} of them by an earlier call, on 2 contexts'.format(saved) in error
    y = np.load('y.npy')
    assert (y[:saved] == 7).all() and not os.path.exists('y.npy.unfinished')
    assert_close(y[saved:], np.tile(files, (100, 1))[saved:])


@pytest.mark.slow
def test_ctrl_c(files):
    np.save('x.npy', np.tile(X, (1000, 1)))
    terminal, side = pty.openpty()
    fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack('HHHH', 24, 80, 0, 0))
    process = start('x.npy', 'y.npy', '--batch-size', '1', stderr=side)
    while saved_rows() < 100:
        assert process.poll() is None
        time.sleep(0.001)
    process.send_signal(signal.SIGINT)
    process.wait()
    error = os.read(terminal, 1 << 20).decode()
    assert process.returncode == 130 and 'Traceback' not in error
    assert re.search(r'/300k \[.* samples/s\]', error)
    assert re.search(r'interrupted. \d+ of 300000 samples are saved in \S+y.npy.unfinished: run the same', error)


def test_another_job_starts_again(files, capfd):
    for changed, change in (('input', lambda: np.save('x.npy', X[::-1])),
                            ('model', lambda: zoo.dense().save('model.h5'))):
        stat = [os.stat('x.npy'), os.stat('model.h5')]
        job = {'input': [stat[0].st_size, stat[0].st_mtime_ns], 'model': [stat[1].st_size, stat[1].st_mtime_ns]}
        with UnfinishedOutput('y.npy', zoo_names(), N, job) as output:
            output.append([np.zeros((5, 3), 'float32')])
        change()
        assert predict('x.npy', 'y.npy') == 0
        assert 'y.npy was begun with another %s' % changed in capfd.readouterr().err
        assert abs(np.load('y.npy')[:5]).min() > 0


def zoo_names():
    import keras
    return keras.models.load_model('model.h5', compile=False).output_names


def test_two_at_a_time(files, capfd):
    with UnfinishedOutput('y.npy', ['y'], N, {}):
        assert predict('x.npy', 'y.npy') == 2
    assert 'another process is writing y.npy' in capfd.readouterr().err


def test_a_bad_sample_in_the_middle(files, capfd, monkeypatch):
    """The error names the samples; earlier ones are saved, and the same command resumes after them."""
    from theano_mgpu.predict.inference import InferenceFunction
    compute = InferenceFunction.compute

    def failing(self, group, following):
        late = group.first + len(group.lengths) > 2
        return compute(self, group._replace(arrays=[array[:, :5] if late else array for array in group.arrays]),
                       following)

    monkeypatch.setattr(InferenceFunction, 'compute', failing)
    assert predict('x.npy', 'y.npy', '--quiet') == 1
    error = capfd.readouterr().err
    assert re.search(r'error: samples 64 to 95: batch 2 failed on context cli_a->cpu;cli_b->cpu: ', error)
    place = os.path.abspath('y.npy.unfinished')
    assert '64 of 300 samples are saved in %s' % place in error and not os.path.exists('y.npy')
    assert predict('x.npy', 'y.npy', '--quiet') == 1
    assert 'samples 128 to 159: batch 2 failed' in capfd.readouterr().err


@pytest.mark.mpi
@pytest.mark.slow
def test_ranks(files):
    """Rank 0 alone reads and writes where there are several processes."""
    done = python('-m', 'theano_mgpu', 'launch', '-n', '2', 'predict', 'model.h5', 'x.npy', 'y.npy')
    assert done.stderr.count('300 samples on 2 contexts of this host (cli_a->cpu;cli_b->cpu)') == 1
    assert_close(np.load('y.npy'), files)


# --- clear errors --------------------------------------------------------------------------------

@pytest.mark.parametrize('arguments,message', [
    (['x.txt', 'y.npy'], 'x.txt: the name of the input must end with one of .npy, .npz, .h5, .hdf5'),
    (['none.npy', 'y.npy'], 'there is no file none.npy'),
    (['x.npy', 'y.npy', '--gpus', '3'], "there are 2: .* map more: give --contexts 'cli_a->"),
    (['x.npy', 'y.npy', '--gpus', 'dev7'], "--gpus dev7: give a number, or names of cli_a, cli_b"),
    (['objects.npy', 'y.npy'], 'the input objects.npy cannot be read: .*Python objects'),
    (['objects.npz', 'y.npy'], 'Object arrays cannot be loaded'),
    (['wide.npy', 'y.npy'], r'samples 0 to 31: batch 0 failed: ValueError: Error when checking input.*shape \(6,\)'),
    (['two.npz', 'y.npy'], 'two.npz has the arrays a, b, but the model has the inputs dense_'),
])
def test_errors(files, arguments, message, capfd):
    """More of them are in tests/cli/test_predict_files.py."""
    np.save('wide.npy', np.ones((40, 9)))
    np.save('objects.npy', np.array([{}, []], dtype=object), allow_pickle=True)
    np.savez('objects.npz', x=np.array([{}, []], dtype=object))
    np.savez('two.npz', a=X, b=X)
    assert predict(*arguments) == 2
    error = capfd.readouterr().err
    assert re.search(message, error) and 'Traceback' not in error
    assert not [name for name in os.listdir('.') if name.startswith('y.npy')]


def test_files_in_another_order(files, capfd):
    assert main(['predict', 'x.npy', 'model.h5', 'y.npy']) == 2
    assert 'x.npy has arrays, and no model. The order is MODEL INPUT OUTPUT' in capfd.readouterr().err


def test_models_that_cannot_be_used(files, capfd):
    zoo.functional().save('model.h5')
    assert predict('x.npy', 'y.npy') == 2
    assert 'y.npy is one array, but the model has the outputs kind, place' in capfd.readouterr().err
    assert predict('x.npy', 'y.npz') == 2
    assert 'x.npy is one array, but the model has the inputs' in capfd.readouterr().err
    os.replace('x.npy', 'model.h5')
    np.save('x.npy', X)
    assert predict('x.npy', 'y.npz') == 2
    assert 'Keras cannot load the model model.h5: OSError' in capfd.readouterr().err
