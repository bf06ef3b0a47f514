"""Bugs that were found and fixed, each under its symptom: files that `theano-mgpu predict` reads and writes."""
import errno
import json
import os
import shutil
import zipfile

import theano_mgpu as mgpu
from theano_mgpu.cli import array_output, main
from theano_mgpu.cli.array_input import open_inputs
from theano_mgpu.cli.array_output import TEXT, UnfinishedOutput
from theano_mgpu.cli.predict import rows_of
from theano_mgpu.errors import MgpuError
from theano_mgpu.utils import files as utils_files

import h5py
import numpy as np
import pytest
from cli_fixtures import own_contexts  # noqa: F401  restores the active contexts
from support import keras_equivalence  # noqa: F401  chooses Keras's backend first
from support import keras_zoo as zoo
from support.modes import LAZY

N = 20
X = zoo.noise(N, 6).astype('float32')


@pytest.fixture(scope='module')
def made(tmp_path_factory):
    """Return a folder with a model and its input; and the predictions of plain Keras."""
    folder = tmp_path_factory.mktemp('made')
    mgpu.init('cli_a->cpu')
    model = zoo.dense()
    model.save(str(folder / 'model.h5'))
    np.save(str(folder / 'x.npy'), X)
    return folder, model.predict(X)


@pytest.fixture
def files(made, tmp_path, monkeypatch):
    """Return a copy of that folder, where the command runs; and the predictions of plain Keras."""
    for name in ('model.h5', 'x.npy'):
        shutil.copy(str(made[0] / name), str(tmp_path / name))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv('THEANO_FLAGS', 'floatX=float32,contexts=cli_a->cpu')
    monkeypatch.setattr('theano.config.mode', LAZY)
    mgpu.init('cli_a->cpu')
    return made[1]


def predict(*arguments):
    return main(['predict'] + [str(argument) for argument in arguments])


def assert_refused(capfd, message, *arguments):
    """Check that the command ends with one sentence, and that all files stay as they were."""
    before = tree('.')
    capfd.readouterr()
    assert predict(*arguments) == 2
    error = capfd.readouterr().err
    notes, _, last = error.rpartition('theano-mgpu: error: ')
    assert message in last and last.count('\n') == 1 and 'Traceback' not in notes, error
    assert tree('.') == before


def tree(folder):
    """Return all files below a folder: their names, kinds and contents."""
    found = {}
    for path, folders, names in os.walk(folder):
        for name in folders + names:
            whole = os.path.join(path, name)
            found[whole] = os.readlink(whole) if os.path.islink(whole) else \
                open(whole, 'rb').read() if os.path.isfile(whole) else os.lstat(whole).st_mode
    return found


def assert_predicted(expected, *arguments):
    assert predict(*arguments) == 0
    np.testing.assert_allclose(np.load(arguments[2]), expected, rtol=1e-6, atol=1e-7)
    assert not os.path.lexists(os.path.realpath(arguments[2]) + '.unfinished')


# --- the file of the rows ------------------------------------------------------------------------

ROWS = 'y.npy.unfinished'


def interrupted(rows=5):
    """Leave the file of a run that was killed after some rows of zeros."""
    status = [os.stat('x.npy'), os.stat('model.h5')]
    identity = [[each.st_size, each.st_mtime_ns] for each in status]
    import keras
    names = keras.models.load_model('model.h5', compile=False).output_names
    with UnfinishedOutput('y.npy', names, N, {'input': identity[0], 'model': identity[1]}) as output:
        if rows:
            output.append([np.zeros((rows, 3), 'float32')])


def written(content, name=ROWS):
    with open(name, 'wb') as file:
        file.write(content)


def folder_of_the_user():
    os.mkdir(ROWS)
    written(b'x', ROWS + '/thesis.tex')


def link_to_folder():
    os.mkdir('victim')
    written(b'x', 'victim/precious')
    os.symlink('victim', ROWS)


def link_to_rows():
    interrupted()
    os.rename(ROWS, 'rows')
    os.symlink('rows', ROWS)


FOREIGN = {
    "a text of the user's": lambda: written(b'my notes'), 'bytes': lambda: written(b'\xff' * 5000),
    'JSON': lambda: written(b'{"format": "PDF"}'), 'an array': lambda: shutil.copy('x.npy', ROWS),
    'a text that begins alike': lambda: written(TEXT[:20] + b'mine'),
    "a folder of the user's": folder_of_the_user, 'an empty folder': lambda: os.mkdir(ROWS),
    'a link to a folder': link_to_folder, 'a dangling link': lambda: os.symlink('none', ROWS),
    'a link to itself': lambda: os.symlink(ROWS, ROWS), 'a link to rows': link_to_rows,
    'a pipe': lambda: os.mkfifo(ROWS), 'a second name of rows': lambda: (interrupted(), os.link(ROWS, 'mine')),
    'a second name of an empty file': lambda: (written(b''), os.link(ROWS, 'mine'))}


@pytest.mark.slow_with('a link to itself')
@pytest.mark.parametrize('name', FOREIGN)
def test_nothing_is_removed_that_the_package_did_not_write(name, files, capfd):
    """OUTPUT.unfinished was emptied, through a link, too."""
    FOREIGN[name]()
    assert_refused(capfd, ROWS, 'model.h5', 'x.npy', 'y.npy', '--quiet')


def parts_of_rows():
    """Return the line of JSON, and the bytes of the rows."""
    with open(ROWS, 'rb') as file:
        assert file.readline() == TEXT
        return file.readline(), file.read()


@pytest.mark.slow_with('brackets', 'zeros', 'cut')
@pytest.mark.parametrize('content', [
    b'\n', b'{\n', b'{}\n', b'[]\n', b'null\n', b'[1, 2]\n', b'[{}, [["zz", [3]]]]\n', b'[{}, [["float32", [-3]]]]\n',
    b'\0\1', b'\xff', pytest.param(b'[' * 100000, id='brackets'),
    pytest.param(b'\0' * (3 << 20), id='zeros'), 'cut'])
def test_a_damaged_job_starts_again(content, files, capfd):
    """The command could not resume: a traceback from json."""
    interrupted()
    line, rows = parts_of_rows()
    written(TEXT + (line[:-2] if content == 'cut' else content + rows))
    assert_predicted(files, 'model.h5', 'x.npy', 'y.npy')
    assert 'starting again' in capfd.readouterr().err


@pytest.mark.slow_with('float64-shape0')
@pytest.mark.parametrize('dtype, shape', [('float64', [2]), ('float32', [3, 1]), ('float32', [])])
def test_rows_of_another_layout_are_the_user_s_to_give_up(dtype, shape, files, capfd):
    interrupted()
    line, rows = parts_of_rows()
    job, _ = json.loads(line)
    written(TEXT + json.dumps([job, [[dtype, shape]]]).encode() + b'\n' + rows[:33])
    assert_refused(capfd, '%s holds rows of shape (%s' % (ROWS, ', '.join(map(str, shape))),
                   'model.h5', 'x.npy', 'y.npy', '--quiet')


def test_rows_of_objects_are_not_read(files, capfd):
    """The bytes of the file were taken for addresses of objects."""
    interrupted()
    job, _ = json.loads(parts_of_rows()[0])
    for dtype in ('O', 'f4,O'):
        written(TEXT + json.dumps([job, [[dtype, [3]]]]).encode() + b'\n' + b'\1' * 24)
        assert_predicted(files, 'model.h5', 'x.npy', 'y.npy')
        assert 'starting again' in capfd.readouterr().err


@pytest.mark.slow
def test_rows_that_were_cut_or_are_too_many(files):
    interrupted()
    line, rows = parts_of_rows()
    zeros = np.zeros((N, 3), 'float32')
    for content, kept in ((rows[:-5], 4), (b'', 0), (rows + b'half', 5), (bytes(12 * N + 7), N), (bytes(24 * N), N)):
        written(TEXT + line + content)
        assert_predicted(np.concatenate([zeros[:kept], files[kept:]]), 'model.h5', 'x.npy', 'y.npy', '--quiet')


def test_files_that_are_the_package_s_own(files):
    """A machine that stopped left such files."""
    for content in (b'', TEXT[:9], TEXT):
        written(content)
        assert_predicted(files, 'model.h5', 'x.npy', 'y.npy', '--quiet')


def test_a_file_that_appears_in_the_place_of_the_rows_stays(files, monkeypatch):
    finish = UnfinishedOutput.finish

    def replace(self):
        os.remove(ROWS)
        written(b'precious')
        finish(self)
    monkeypatch.setattr(UnfinishedOutput, 'finish', replace)
    assert predict('model.h5', 'x.npy', 'y.npy') == 0
    assert open(ROWS, 'rb').read() == b'precious'
    np.testing.assert_allclose(np.load('y.npy'), files, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize('path', ['y.npy', 'y.npz', 'y.h5'])
@pytest.mark.parametrize('length', [0, 7])
def test_parts_of_all_shapes_and_types(path, length, tmp_path, monkeypatch):
    """All arrays that a file can have, in blocks of one row for h5py."""
    monkeypatch.setattr(array_output, 'CHUNK', 1)
    arrays = {'file': np.arange(length * 6, dtype='float16').reshape(length, 2, 3), 'a/b': np.ones(length, 'int64'),
              'empty': np.ones((length, 0), 'float32'), 'flag': np.arange(length) % 2 == 0}
    if path == 'y.npy':
        arrays = {'file': arrays['file']}
    with UnfinishedOutput(str(tmp_path / path), list(arrays), length, {}) as output:
        for rows in np.array_split(np.arange(length), 3) if length else [slice(0)]:
            output.append([array[rows] for array in arrays.values()])
        output.finish()
    assert os.listdir(str(tmp_path)) == [path]
    if path == 'y.npy':
        loaded = {'file': np.load(str(tmp_path / path))}
    else:
        with h5py.File(str(tmp_path / path), 'r') if path == 'y.h5' else np.load(str(tmp_path / path)) as file:
            loaded = {name: np.array(file[name]) for name in arrays}
    for name, array in arrays.items():
        assert loaded[name].dtype == array.dtype
        np.testing.assert_array_equal(loaded[name], array)


def test_a_full_disk_names_the_output_once_and_keeps_the_rows(files, capfd, monkeypatch):
    def fail(path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(utils_files, 'flush_file', fail)
    assert predict('model.h5', 'x.npy', 'y.npy', '--quiet') == 2
    text = 'error: the output y.npy cannot be written: No space left on device. %d of %d samples are saved in '
    assert text % (N, N) in capfd.readouterr().err
    assert sorted(os.listdir('.')) == ['model.h5', 'x.npy', ROWS]


# --- the output ----------------------------------------------------------------------------------

def test_an_output_that_is_a_link_is_written_through(files):
    """The link was replaced."""
    os.makedirs('elsewhere/deep')
    for old in (None, b'old'):
        if old:
            with open('elsewhere/deep/y.npy', 'wb') as file:
                file.write(old)
            os.link('elsewhere/deep/y.npy', 'second name')
        if not os.path.lexists('y.npy'):
            os.symlink('elsewhere/link.npy', 'y.npy')
            os.symlink('deep/y.npy', 'elsewhere/link.npy')
        assert_predicted(files, 'model.h5', 'x.npy', 'y.npy', '--quiet')
        assert os.path.islink('y.npy') and os.path.islink('elsewhere/link.npy')
        assert sorted(os.listdir('elsewhere/deep')) == ['y.npy']
    assert open('second name', 'rb').read() == b'old'


def make_outputs():
    os.symlink('loop.npy', 'loop.npy')
    os.mkdir('folder.npy')
    os.symlink('folder.npy', 'folder_link.npy')
    os.symlink('none/y.npy', 'dangling.npy')
    os.symlink('/dev/null', 'null.npy')
    os.symlink('/dev/full', 'full.npy')
    os.mkfifo('pipe.npy')
    os.symlink('x.npy', 'x_link.npy')
    os.link('x.npy', 'x_second.npy')
    os.symlink('model.h5', 'model_link.h5')
    os.mkdir('y.npy.unfinished')
    os.symlink(os.getcwd(), 'cwd')


@pytest.mark.parametrize('output,message', [
    ('loop.npy', 'symbolic links'), ('folder.npy', 'it is a folder'), ('folder_link.npy', 'it is a folder'),
    ('dangling.npy', 'there is no folder'), ('null.npy', 'a device or a pipe'), ('full.npy', 'a device or a pipe'),
    ('pipe.npy', 'a device or a pipe'), ('x_link.npy', 'is the input'), ('x_second.npy', 'is the input'),
    ('model_link.h5', 'is the input or the model'), ('cwd/x.npy', 'is the input'), ('./x.npy', 'is the input'),
    ('a' * 246 + '.npy', 'File name too long'), ('a' * 300 + '.npy', 'File name too long'),
    ('none/y.npy', 'there is no folder'),
    ('x.npy/y.npy', 'Not a directory'), ('y', 'must end with one of'), ('', 'must end with'), ('.npy', 'must end')])
def test_outputs_that_cannot_be_written(output, message, files, capfd):
    make_outputs()
    assert_refused(capfd, message, 'model.h5', 'x.npy', output)


def test_the_model_is_in_the_place_of_the_rows(files, capfd):
    os.rename('model.h5', ROWS)
    assert_refused(capfd, '%s was not made by theano-mgpu' % ROWS, ROWS, 'x.npy', 'y.npy')


# --- the input -----------------------------------------------------------------------------------

def npy(shape, descr='<f4', data=b'', fortran=False):
    """Return an .npy file with any header."""
    import io
    out = io.BytesIO()
    np.lib.format.write_array_header_1_0(out, {'shape': shape, 'fortran_order': fortran, 'descr': descr})
    return out.getvalue() + data


def raw_header(text):
    text = text.encode() + b' ' * (117 - len(text)) + b'\n'
    return b'\x93NUMPY\1\0' + bytes([len(text), 0]) + text


GOOD = npy((N, 6), data=X.tobytes())
BAD_NPY = {
    'empty': b'', 'text': b'1,2,3\n', 'cut': GOOD[:-1], 'cut in the header': GOOD[:50], 'longer': GOOD + b'\0',
    'huge': npy((10 ** 30, 6)), 'huge rows': npy((N, 10 ** 18, 10 ** 18)), 'large': npy((2 ** 62, 6)),
    'negative': raw_header("{'descr': '<f4', 'fortran_order': False, 'shape': (-20, 6), }"),
    'nested': raw_header('(' * 100), 'no dict': raw_header('[1, 2]'), 'bad descr': raw_header(
        "{'descr': 'zz', 'fortran_order': False, 'shape': (20, 6), }"), 'version': b'\x93NUMPY\7\0' + GOOD[8:],
    'objects': npy((N, 6), '|O', X.tobytes() * 2), 'texts': npy((N, 6), '<U1', X.tobytes()),
    'complex': npy((N, 3), '<c8', X.tobytes()), 'records': npy((N,), [('a', '<f4', (6,))], X.tobytes()),
    'dates': npy((N, 3), '<M8[s]', X.tobytes()), '0-d': npy((), data=b'abcd'), '1-d': npy((120,), data=X.tobytes()),
    '3-d': npy((N, 3, 2), data=X.tobytes()), 'wide': npy((N // 2, 12), data=X.tobytes()), 'zip': b'PK\3\4' + bytes(90)}


@pytest.mark.parametrize('name', BAD_NPY)
def test_inputs_that_cannot_be_read(name, files, capfd):
    """OverflowErrors, RuntimeErrors and others ended in a traceback."""
    with open('bad.npy', 'wb') as file:
        file.write(BAD_NPY[name])
    np.save('y.npy', X)
    assert_refused(capfd, 'bad.npy', 'model.h5', 'bad.npy', 'y.npy', '--quiet')


@pytest.mark.slow
def test_other_inputs_that_cannot_be_read(files, capfd):
    os.mkdir('folder.npy')
    os.mkfifo('pipe.npy')
    os.symlink('loop.npy', 'loop.npy')
    with h5py.File('none.h5', 'w') as file:
        file['x'] = h5py.Empty('f4')
    with h5py.File('texts.h5', 'w') as file:
        file['x'] = ['a', 'b']
    with h5py.File('groups.h5', 'w') as file:
        file['x/y'] = X
    zipfile.ZipFile('empty.npz', 'w').close()
    with zipfile.ZipFile('short.npz', 'w') as archive:
        archive.writestr('x.npy', GOOD[:-4])
    with zipfile.ZipFile('text.npz', 'w') as archive:
        archive.writestr('x.npy', 'text')
    for path in ('folder.npy', 'pipe.npy', 'loop.npy', 'none.h5', 'texts.h5', 'groups.h5', 'empty.npz', 'short.npz',
                 'text.npz', 'a' * 300 + '.npy', 'x.csv', 'model.h5'):
        assert_refused(capfd, path, 'model.h5', path, 'y.npy', '--quiet')
    for name in ('copy.npz', 'copy.h5'):  # another format than the name says
        shutil.copy('x.npy', name)
        assert_refused(capfd, name, 'model.h5', name, 'y.npy', '--quiet')


def test_an_input_whose_end_is_damaged(files, capfd):
    """A truncated member of an archive was read for ever."""
    np.savez_compressed('x.npz', x=zoo.noise(3000, 6).astype('float32'))
    content = bytearray(open('x.npz', 'rb').read())
    content[len(content) // 2] ^= 1
    with open('x.npz', 'wb') as file:
        file.write(content)
    assert predict('model.h5', 'x.npz', 'y.npy', '--quiet') == 2
    error = capfd.readouterr().err
    assert 'the input x.npz cannot be read: ' in error
    assert not os.path.exists('y.npy')


def read_all(path):
    with open_inputs(path, ['x']) as (x,):
        return np.concatenate([rows_of([x], start, min(start + 7, N), path)[0] for start in range(0, N, 7)])


@pytest.mark.parametrize('name', ['stored', 'compressed', 'fortran stored', 'fortran compressed'])
def test_each_flipped_byte_of_an_archive_is_found_or_does_no_harm(name, tmp_path):
    """Uncompressed arrays were mapped into memory, without a look at their checksum."""
    path = str(tmp_path / 'x.npz')
    array = np.array(X[:, :2], order='F' if 'fortran' in name else 'C')
    (np.savez_compressed if 'compressed' in name else np.savez)(path, x=array)
    content = open(path, 'rb').read()
    for at in range(0, len(content), 3):
        for damaged in (content[:at] + bytes([content[at] ^ 1 << at % 8]) + content[at + 1:], content[:at]):
            with open(path, 'wb') as file:
                file.write(damaged)
            try:
                np.testing.assert_array_equal(read_all(path), X[:, :2])
            except MgpuError as error:
                assert path in str(error) and '\n' not in str(error)
            else:
                assert len(damaged) == len(content)


def test_other_orders_of_bytes_and_types(files):
    for dtype in ('>f4', '<f8', 'f2'):
        np.save('x.npy', X.astype(dtype))
        assert predict('model.h5', 'x.npy', 'y.npy', '--quiet') == 0
        np.testing.assert_allclose(np.load('y.npy'), files, rtol=1e-2)


# --- the model -----------------------------------------------------------------------------------

def test_models_that_cannot_be_loaded(files, capfd):
    import keras
    good = open('model.h5', 'rb').read()
    model = keras.models.load_model('model.h5', compile=False)
    model.save_weights('weights.h5')
    with open('text.h5', 'w') as file:
        file.write('no model')
    for at in (0, 100, 1000, len(good) // 2, len(good) - 1):
        with open('cut%d.h5' % at, 'wb') as file:
            file.write(good[:at])
    unknown = {'class_name': 'Sequential', 'config': {'name': 's', 'layers': [{'class_name': 'Mine', 'config': {}}]}}
    newer = {'module': 'keras', 'class_name': 'Functional', 'config': {}, 'registered_name': 'Functional'}
    for name, config in (('list', []), ('empty', {}), ('unknown', unknown), ('newer', newer), ('number', 3)):
        shutil.copy('model.h5', name + '.h5')
        with h5py.File(name + '.h5', 'r+') as file:
            file.attrs['model_config'] = json.dumps(config)
    shutil.copy('model.h5', 'fewer.h5')
    with h5py.File('fewer.h5', 'r+') as file:
        del file['model_weights'][list(file['model_weights'])[0]]
    os.mkdir('folder.h5')
    for path in sorted(name for name in os.listdir('.') if name.endswith('.h5') and name != 'model.h5') + ['x.npy']:
        assert_refused(capfd, path, path, 'x.npy', 'y.npy', '--quiet')


def test_a_file_at_which_libhdf5_ends_the_process(files, capfd, monkeypatch):
    """A flipped bit in an HDF5 file ended the command by a segmentation fault, or had it read for ever."""
    import signal

    from theano_mgpu.cli import hdf5_check
    np.save('y.npy', X)
    before = tree('.')
    # The bit that does so depends on the version of the library.
    monkeypatch.setattr(hdf5_check, '_visit', lambda *args: os.kill(os.getpid(), signal.SIGSEGV))
    assert_refused(capfd, 'cannot load the model model.h5: ValueError: libhdf5', 'model.h5', 'x.npy', 'y.npy')

    def for_ever(*args):
        while True:
            pass
    monkeypatch.setattr(hdf5_check, '_visit', for_ever)
    monkeypatch.setattr(hdf5_check, 'LONGEST', 0.1)
    assert_refused(capfd, 'by signal %d' % signal.SIGPROF, 'model.h5', 'x.npy', 'y.npy')
    assert tree('.') == before


def test_a_group_within_itself_is_read(files):
    with h5py.File('x.h5', 'w') as file:
        file['x'] = X
        file['group/again'] = file['/']
        file['soft'] = h5py.SoftLink('/none')
        file['outside'] = h5py.ExternalLink('none.h5', '/x')
    assert_predicted(files, 'model.h5', 'x.h5', 'y.npy', '--quiet')


def test_a_flip_far_within_an_uncompressed_array_is_found(tmp_path):
    """zipfile compares the checksum at the end of an array, which nobody read."""
    path = str(tmp_path / 'x.npz')
    np.savez(path, x=zoo.noise(5000, 6))
    with open(path, 'r+b') as file:
        file.seek(200000)
        file.write(b'\0\0')
    with pytest.raises(MgpuError, match='x.npz cannot be read: Bad CRC-32'), open_inputs(path, ['x']):
        pass


def test_an_array_that_is_shorter_than_the_archive_says(tmp_path):
    """Skipping rows that were there no more took for ever."""
    path = str(tmp_path / 'x.npz')
    short = npy((100, 6), data=bytes(50 * 24))
    with zipfile.ZipFile(path, 'w', zipfile.ZIP_DEFLATED) as archive:
        archive.writestr('x.npy', short)
    with open(path, 'rb') as file:
        content = file.read()
    lengths = [len(short).to_bytes(4, 'little'), (len(short) + 50 * 24).to_bytes(4, 'little')]
    assert content.count(lengths[0]) == 2
    with open(path, 'wb') as file:
        file.write(content.replace(*lengths))
    with pytest.raises(MgpuError, match='x.npz cannot be read: .*expected 2400 bytes got 1200'), \
            open_inputs(path, ['x']):
        pass
