"""Bugs that were found and fixed, each under its symptom: outputs and locks that are links, devices, or another's."""
import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import theano_mgpu as mgpu
from theano_mgpu.errors import MgpuError
from theano_mgpu.utils import files
from theano_mgpu.utils.owned import lock_file

import pytest


def write_whole(path, text='new'):
    with files.whole_file(path) as unfinished, open(unfinished, 'w') as file:
        file.write(text)


def write_text(path, text='new'):
    with files.whole_text(path) as file:
        file.write(text)


def write_timeline(path, text='new'):
    with mgpu.timeline(path):
        pass


WRITERS = [write_whole, write_text, write_timeline]


def read(path):
    with open(path) as file:
        return file.read()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkdir('real')
    return tmp_path


@pytest.mark.parametrize('write', WRITERS)
@pytest.mark.parametrize('old', [None, 'old'])
def test_a_link_stays_and_its_target_is_replaced_as_a_whole(write, old, folder):
    """The link was replaced, or its target was emptied before there was anything to write."""
    if old:
        with open('real/file.json', 'w') as file:
            file.write(old)
        os.link('real/file.json', 'real/second name')
    os.symlink('real/second.json', 'link.json')
    os.symlink(os.path.abspath('real/file.json'), 'real/second.json')
    write('link.json')
    assert os.path.islink('link.json') and os.path.islink('real/second.json') and not os.path.islink('real/file.json')
    assert read('real/file.json') not in ('', 'old') and sorted(os.listdir('.')) == ['link.json', 'real']
    assert sorted(os.listdir('real')) == ['file.json'] + ['second name'] * bool(old) + ['second.json']
    if old:
        assert read('real/second name') == 'old'


@pytest.mark.parametrize('write', WRITERS)
def test_an_error_leaves_the_target_as_it_was(write, folder):
    with open('real/file.json', 'w') as file:
        file.write('old')
    os.symlink('real/file.json', 'link.json')
    if write is write_timeline:
        with mgpu.timeline('link.json'):
            assert read('link.json') == 'old'  # until there is something to write
        assert json.loads(read('link.json'))
        return
    with pytest.raises(TypeError):
        write('link.json', 3)
    assert read('real/file.json') == 'old' and os.listdir('real') == ['file.json']


def in_the_way():
    os.symlink('loop', 'loop')
    os.symlink('loop_b', 'loop_a')
    os.symlink('loop_a', 'loop_b')
    os.symlink('real', 'folder_link')
    os.symlink('none/file', 'dangling')
    with open('file', 'w') as file:
        file.write('old')


@pytest.mark.parametrize('write', WRITERS)
@pytest.mark.parametrize('path,message', [
    ('loop', 'symbolic links'), ('loop_a', 'symbolic links'), ('real', 'a folder'), ('folder_link', 'a folder'),
    ('dangling', 'No such file'), ('none/file', 'No such file'), ('file/file', 'Not a directory'),
    ('a' * 250, 'too long'), ('a' * 300, 'too long'), ('', 'No such file')])
def test_a_path_where_no_file_can_be_is_named(write, path, message, folder):
    in_the_way()
    before = sorted(os.listdir('.'))
    with pytest.raises(OSError, match='%s could not be written, and is as it was before: .*%s' % (path, message)):
        write(path)
    assert sorted(os.listdir('.')) == before and read('file') == 'old'


def test_devices_and_pipes(folder):
    """A device was replaced by a file, if the user may do that."""
    os.symlink('/dev/null', 'null')
    os.mkfifo('pipe')
    for path in ('null', 'pipe', '/dev/null', '/dev/full'):
        with pytest.raises(OSError, match='%s could not be written.*a device or a pipe' % path):
            write_whole(path)
        with pytest.raises(OSError, match='a device or a pipe'):
            lock_file(path)
    write_text('null')  # a text may go there
    write_timeline('/dev/null')
    with pytest.raises(OSError, match='/dev/full could not be written.*No space left'):
        write_text('/dev/full')
    found = []
    reader = threading.Thread(target=lambda: found.append(read('pipe')))
    reader.start()
    write_text('pipe')
    reader.join()
    assert found == ['new'] and sorted(os.listdir('.')) == ['null', 'pipe', 'real']


@pytest.mark.slow
def test_a_text_for_a_stream_that_is_redirected(folder):
    code = "from theano_mgpu.utils.files import whole_text\nprint('before', flush=True)\n" \
        "with whole_text('/dev/stdout') as file:\n    file.write('text ')\nprint('after')"
    with open('out', 'w') as out:
        subprocess.run([sys.executable, '-c', code], stdout=out, check=True, cwd='real',
                       env=dict(os.environ, PYTHONPATH=str(Path(mgpu.__file__).parents[1]), THEANO_FLAGS='cxx='))
    assert read('out') == 'before\ntext after\n' and os.listdir('real') == []


def test_temporary_files_that_the_package_did_not_make_stay(folder):
    unfinished = files._unfinished('file')
    ended = subprocess.Popen(['true'])
    ended.wait()
    with open('victim', 'w') as file:
        file.write('precious')
    for make in (lambda: os.symlink('victim', unfinished), lambda: os.mkdir(unfinished), lambda: os.mkfifo(unfinished)):
        make()
        with pytest.raises(OSError, match='file could not be written'):
            write_whole('file')
        assert os.path.lexists(unfinished) and read('victim') == 'precious'
        os.rmdir(unfinished) if os.path.isdir(unfinished) else os.remove(unfinished)
    names = [files._unfinished('file', pid) for pid in (ended.pid, 10 ** 30, 'mine')]
    os.mkdir(names[0])
    for name in names[1:]:
        open(name, 'w').close()
    write_whole('file')
    assert all(map(os.path.exists, names))


LOCKS = {
    'a link': lambda name: os.symlink('victim', name), 'a dangling link': lambda name: os.symlink('none', name),
    'a loop': lambda name: os.symlink(name, name), 'a folder': os.mkdir, 'a pipe': os.mkfifo,
    'a link to a lock': lambda name: (open('other', 'w').write('process 1 on host x'), os.symlink('other', name)),
    'a second name of a file': lambda name: os.link('victim', name),
    'a second name of an empty file': lambda name: (open('empty', 'w').close(), os.link('empty', name)),
    'a text': lambda name: open(name, 'w').write('my notes'),
    'bytes': lambda name: open(name, 'wb').write(b'\xff' * 5000),
    'a lock and a text': lambda name: open(name, 'w').write('process 1 on host x\nmy notes')}


@pytest.mark.parametrize('kind', LOCKS)
def test_a_lock_that_the_package_did_not_make_stays(kind, folder):
    """The target of a link was emptied, and "process 12 on host x" written there."""
    with open('victim', 'w') as file:
        file.write('precious')
    LOCKS[kind]('run.npz.lock')
    before = os.lstat('run.npz.lock')
    content = read('run.npz.lock') if kind in ('a text', 'a lock and a text') else None
    with pytest.raises(MgpuError, match=re.escape('run.npz.lock is no lock of theano_mgpu: move it, or name another')):
        lock_file('run.npz')
    after = os.lstat('run.npz.lock')
    assert (before.st_ino, before.st_size, before.st_mtime_ns) == (after.st_ino, after.st_size, after.st_mtime_ns)
    assert read('victim') == 'precious' and not os.path.exists('none')
    assert content in (None, read('run.npz.lock') if content else None)


def test_locks_that_a_job_left_behind_are_taken(folder):
    for content in ('', 'process 1 on host another'):
        with open('run.npz.lock', 'w') as file:
            file.write(content)
        lock = lock_file('run.npz')
        assert read('run.npz.lock').startswith('process %d on host' % os.getpid())
        lock.release()
        assert not os.path.exists('run.npz.lock')
        del lock


def test_a_checkpoint_through_a_link(folder, cpu2):
    """The lock, and the file before, are beside the target, so that two links to it are one checkpoint."""
    from theano_mgpu.comm.communicator import Communicator
    from theano_mgpu.runtime.replicas.replicated import replicated
    from theano_mgpu.runtime.state import training_state

    import theano
    w = theano.shared(1.0, name='w')
    os.symlink('real/run.npz', 'link.npz')
    lock = lock_file('link.npz')
    assert lock_file('real/run.npz') is lock
    for value in (1.0, 2.0, 3.0):
        w.set_value(value)
        training_state.save('link.npz', [replicated(w)], Communicator())
    assert os.path.islink('link.npz') and sorted(os.listdir('real')) == ['run.npz', 'run.npz.lock', 'run.npz.previous']
    with open('real/run.npz', 'wb'):
        pass
    with pytest.warns(mgpu.MgpuWarning, match='real/run.npz is damaged .* taken, from .*real/run.npz.previous'):
        training_state.read('link.npz', Communicator(), lambda _: None).give([replicated(w)])
    assert w.get_value() == 2 and sorted(os.listdir('.')) == ['link.npz', 'real']


def test_bench_does_not_write_its_figures_over_the_model(folder, capfd):
    from theano_mgpu.cli import main
    with open('m.h5', 'w') as file:
        file.write('a model')
    os.symlink('m.h5', 'out.json')
    for path in ('m.h5', 'out.json'):
        assert main(['bench', '--model', 'm.h5', '--json', path]) == 2
        assert 'is the model itself' in capfd.readouterr().err and read('m.h5') == 'a model'
