"""A checkpoint file belongs to one job at a time."""
import errno
import fcntl
import gc
import os
import re
import subprocess
import sys

from theano_mgpu.checks.ledger import ledger_at
from theano_mgpu.comm.communicator import Communicator
from theano_mgpu.errors import MgpuError, MgpuWarning
from theano_mgpu.utils.owned import lock_file

import pytest

OTHER = """
import sys
from theano_mgpu.utils.owned import lock_file
lock = lock_file(sys.argv[1])
print('locked', flush=True)
sys.stdin.read()
"""


@pytest.fixture
def other(tmp_path):
    """Return another process that has the file."""
    process = subprocess.Popen([sys.executable, '-c', OTHER, str(tmp_path / 'run.npz')], stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdout.readline() == 'locked\n'
        yield process
        process.kill()


@pytest.mark.slow
def test_two_processes_cannot_have_one_file(other, tmp_path, cpu2):
    path = str(tmp_path / 'run.npz')
    text = '%s is in use by another job, process %d on host %s: end that job, or name another file for %%s' \
        % (path, other.pid, os.uname().nodename)
    with pytest.raises(MgpuError, match=re.escape(text % 'the checkpoints')):
        lock_file(path)
    with pytest.raises(MgpuError, match=re.escape(text % 'the ledger (mgpu.ledger, --ledger or ledger=)')):
        ledger_at(path, 1, Communicator())
    link = tmp_path / 'link'
    link.symlink_to(tmp_path)
    with pytest.raises(MgpuError, match='process %d on host' % other.pid):
        lock_file(str(link / 'run.npz'))
    lock_file(str(tmp_path / 'other.npz'))
    other.kill()
    other.wait()
    assert os.path.exists(path + '.lock')
    lock = lock_file(path)
    assert lock_file(path) is lock
    del lock
    gc.collect()
    assert not os.path.exists(path + '.lock')


def test_a_folder_that_is_not_there(tmp_path):
    """The error was one of a file with another name, the lock's."""
    with pytest.raises(MgpuError, match=re.escape('none/run.npz cannot be written: there is no folder')):
        lock_file(str(tmp_path / 'none' / 'run.npz'))


@pytest.mark.slow
def test_a_child_that_outlives_the_process_does_not_have_its_lock(tmp_path):
    path = str(tmp_path / 'run.npz')
    code = OTHER.replace("print('locked', flush=True)", """
import os, time
if os.fork() == 0:
    os.close(0), os.close(1), os.close(2)
    time.sleep(20)
    os._exit(0)
print('locked', flush=True)
os.kill(os.getpid(), 9)""")
    done = subprocess.run([sys.executable, '-c', code, path], stdout=subprocess.PIPE, text=True)
    assert done.stdout == 'locked\n'
    assert lock_file(path)


def test_a_file_system_without_locks(tmp_path, monkeypatch):
    """A warning says so, and the file of the lock does not stay."""
    def lockf(*args):
        raise OSError(errno.ENOLCK, 'No locks available')
    monkeypatch.setattr(fcntl, 'lockf', lockf)
    with pytest.warns(MgpuWarning, match='run.npz cannot be locked .*No locks available.*: make sure that no other'):
        lock = lock_file(str(tmp_path / 'run.npz'))
    lock.release()
    assert not os.listdir(str(tmp_path))
