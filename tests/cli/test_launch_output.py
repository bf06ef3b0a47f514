"""Bugs that were found and fixed, each under its symptom: theano-mgpu launch, its output, and leftovers of a kill."""
import os
import re
import select
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

from theano_mgpu.cli import job_folders
from theano_mgpu.utils import mpi_environment

import pytest
from support.launch import launch
from support.processes import python

pytestmark = pytest.mark.verified
RULE = b'-' * 74 + b'\n'
# Texts that a script may print, also if they look like messages of Open MPI, MPICH or Slurm.
PRINTED = [
    b'-' * 40 + b'\n', RULE, b'-' * 20, b'-' * 5, b'=' * 20 + b'\n', RULE + b'MPI_ABORT was invoked on rank 1\n' + RULE,
    RULE + b'Primary job  terminated normally, but 1 process returned\na non-zero exit code.\n' + RULE,
    b'[host:7] ORTE_ERROR_LOG: Error in file x.c\n', b'srun: Job step aborted: Waiting up to 7 seconds\n',
    b'slurmstepd: error: *** STEP 5.0 ON n1 CANCELLED AT 2026-01-02T03:04:05 ***\n',
    b'application called MPI_Abort(MPI_COMM_WORLD, 1) - process 0\n', b'theano-mgpu: rank 0 of 2 failed\n',
    b' 10%|#   | 1/10\r', b'no newline', b'\0', b'\0theano_mgpu: a step', b'\0theano_mgpu: a step is done\0',
    b'\0theano_mgpu: a step of job 0 is done\0', b'\xff\xfe\x00\x1b[31m', b'x' * 300000, '\u2588'.encode() * 9, b'\n']
PRINTS = '''
import os, sys
for text in eval(open(sys.argv[1]).read()):
    for target in (2, 1):
        data = memoryview(text)
        while data:
            data = data[os.write(target, data):]
        assert os.read(0, 1)
'''


@pytest.fixture
def fake_mpirun(tmp_path, monkeypatch):
    """Return a function that puts an mpirun on PATH that executes a command."""
    def make(command):
        program = tmp_path / 'bin' / 'mpirun'
        program.parent.mkdir()
        program.write_text('#!/bin/sh\n[ "$1" = --version ] && echo "mpirun (Open MPI) 4.1.4" && exit\n%s\n' % command)
        program.chmod(0o755)
        monkeypatch.setenv('PATH', '%s:%s' % (program.parent, os.environ['PATH']))
    return make


@pytest.fixture
def launched(tmp_path):
    """Return a function that starts a job of two ranks, as a Popen; the real mpirun runs a script with a text."""
    started = []

    def start(*options, text='', arguments=(), **settings):
        script = tmp_path / 'script.py'
        script.write_text(text)
        command = [sys.executable, '-m', 'theano_mgpu', 'launch', '-n', '2', *options, str(script), *arguments]
        pipes = dict.fromkeys(('stdin', 'stdout', 'stderr'), subprocess.PIPE)
        started.append(subprocess.Popen(command, **{**pipes, **settings}))
        return started[-1]
    yield start
    for process in started:
        process.terminate()
        process.wait(60)
        for pipe in filter(None, (process.stdin, process.stdout, process.stderr)):
            pipe.close()


def read(stream, n, seconds=60):
    """Return the next n bytes of a pipe, or fewer if no more come within some seconds."""
    data, end = b'', time.monotonic() + seconds
    while len(data) < n and select.select([stream], [], [], max(0, end - time.monotonic()))[0]:
        part = os.read(stream.fileno(), n - len(data))
        if not part:
            break
        data += part
    return data


def test_what_a_job_prints_is_passed_on_at_once_whatever_it_looks_like(fake_mpirun, launched, tmp_path):
    """A line of 20 dashes withheld stderr until the job ended; a line like Open MPI's messages was left out."""
    (tmp_path / 'printed').write_text(repr(PRINTED))
    fake_mpirun('exec %s -c %s %s' % (sys.executable, shlex.quote(PRINTS), tmp_path / 'printed'))
    process = launched()
    for text in PRINTED:
        for stream in (process.stderr, process.stdout):
            assert read(stream, len(text)) == text
            process.stdin.write(b'.')
            process.stdin.flush()
    assert [part[-500:] for part in process.communicate()] == [b'', b''] and process.returncode == 0


@pytest.mark.slow
def test_what_is_printed_before_the_end_arrives_if_the_reader_is_slow(fake_mpirun, launched, tmp_path):
    fake_mpirun('yes | head -c 100000; printf end >&2')
    process = launched()
    assert read(process.stderr, 3) == b'end'
    time.sleep(1)
    assert process.communicate() == (b'y\n' * 50000, b'') and process.returncode == 0


@pytest.mark.slow_with('stdout')
@pytest.mark.parametrize('stream', ['stdout', 'stderr'])
def test_a_reader_that_has_enough_ends_a_job_quietly(stream, fake_mpirun, launched, tmp_path):
    """When ``launch | head -1`` had its line, mpirun crashed, and the job was started again."""
    fake_mpirun('echo x >> %s; exec yes >&%d' % (tmp_path / 'runs', 1 + (stream == 'stderr')))
    process = launched('--restarts', '3')
    closed, other = [getattr(process, name) for name in ('stdout', 'stderr')][::1 if stream == 'stdout' else -1]
    assert read(closed, 2) == b'y\n'
    closed.close()
    assert process.wait(60) == 128 + signal.SIGPIPE and other.read() == b''
    assert (tmp_path / 'runs').read_text() == 'x\n'


def test_a_full_disk_ends_a_job_with_an_error(fake_mpirun, launched, tmp_path):
    fake_mpirun('echo x >> %s; exec yes' % (tmp_path / 'runs'))
    with open('/dev/full', 'wb') as full:
        process = launched('--restarts', '3', stdout=full)
    assert process.wait(60) == 1 and (tmp_path / 'runs').read_text() == 'x\n'
    assert re.fullmatch(b'theano-mgpu: error: the output of the job cannot be written: .*No space left.*\n',
                        process.stderr.read())


@pytest.mark.slow_with('SIGUSR2')
@pytest.mark.parametrize('number', [signal.SIGUSR1, signal.SIGUSR2])
def test_a_signal_for_the_ranks_is_passed_on(number, fake_mpirun, launched, tmp_path):
    """The signal ended the launcher, and left its folders."""
    fake_mpirun('trap "echo caught; exit 4" %d; echo ready; while :; do sleep 0.1; done' % number)
    process = launched()
    assert read(process.stdout, 6) == b'ready\n'
    process.send_signal(number)
    assert process.communicate(timeout=60)[0] == b'caught\n' and process.returncode == 4


WAITS = '''
import os, signal, sys, time
signal.signal(signal.SIGUSR1, lambda *given: os.write(1, b'caught\\n'))
processes = [os.getpid()]
if sys.argv[1:] == ['mpi']:  # rank 0 prints for both: a later rank that has imported theano_mgpu prints nothing
    from mpi4py import MPI
    processes = MPI.COMM_WORLD.gather(os.getpid()) or []
for process in processes:
    os.write(1, b'%7d\\n' % process)  # Open MPI 5 ends lines itself
while True:
    time.sleep(1)
'''


def is_alive(pid):
    try:
        with open('/proc/%d/stat' % pid) as file:
            return file.read().rpartition(')')[2].split()[0] not in 'ZX'
    except FileNotFoundError:
        return False


def folders_of(*processes):
    """Return the folders of jobs, for temporary files and for shared memory."""
    marks = {job_folders.MARK + b'%d\n' % process.pid for process in processes}
    return {path.parent for parent in (tempfile.gettempdir(), job_folders.MEMORY)
            for path in Path(parent).glob('mgpu.*/' + job_folders.LOCK) if path.read_bytes() in marks}


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.parametrize('killed, has_imported', [
    ('launcher', False), ('launcher', True), ('mpirun', False), ('mpirun', True)])
def test_a_kill_leaves_neither_ranks_nor_files_of_shared_memory(killed, has_imported, launched, monkeypatch):
    """Ranks went on for ever, also ones that had not imported theano_mgpu; 4 MB a rank stayed in shared memory."""
    if not has_imported:
        monkeypatch.setenv('MGPU_IMPORTED', '1')
    process = launched(text='import theano_mgpu\n' * has_imported + WAITS, arguments=['mpi'])
    ranks = list(map(int, read(process.stdout, 16).split()))
    other = launched(text=WAITS)  # a live job: nothing of it may be touched
    others = list(map(int, read(other.stdout, 16).split()))
    assert len(ranks) == len(others) == 2
    used, used_by_other = folders_of(process), folders_of(other)
    assert len(used) == len(used_by_other) == 2 and all(len(list(folder.iterdir())) > 1 for folder in used)
    with open('/proc/%d/task/%d/children' % (process.pid, process.pid)) as file:
        mpirun = int(file.read())
    os.kill(process.pid if killed == 'launcher' else mpirun, signal.SIGKILL)
    process.communicate(timeout=60)
    end = time.monotonic() + 60
    while any(map(is_alive, ranks + [mpirun])) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(map(is_alive, ranks + [mpirun])) and all(map(is_alive, others))
    assert launched(text='').wait(60) == 0
    assert not any(folder.exists() for folder in used) and folders_of(other) == used_by_other
    other.send_signal(signal.SIGUSR1)
    assert read(other.stdout, 14) == b'caught\ncaught\n' and all(map(is_alive, others))


@pytest.mark.slow_with('SIGABRT', 'SIGQUIT')
@pytest.mark.parametrize('number', [signal.SIGQUIT, signal.SIGABRT, signal.SIGTERM])
def test_a_signal_that_ends_a_job_leaves_no_folder(number, fake_mpirun, launched):
    """SIGQUIT and SIGABRT ended the launcher alone."""
    fake_mpirun('echo ready; exec sleep 60')
    process = launched(preexec_fn=lambda: signal.signal(number, signal.SIG_DFL))
    assert read(process.stdout, 6) == b'ready\n' and len(folders_of(process)) == 2
    process.send_signal(number)
    assert process.wait(60) == 128 + number and not folders_of(process)


def test_only_folders_of_killed_jobs_are_removed(tmp_path):
    """A folder of the same name that another program made, one in use, and a link to one all stay."""
    names = ('abandoned', 'foreign', 'empty', 'used')
    abandoned, foreign, empty, used = [tmp_path / ('mgpu.' + name) for name in names]
    for folder in (abandoned, foreign, empty):
        folder.mkdir()
        (folder / 'data').write_text('mine')
    (abandoned / job_folders.LOCK).write_bytes(job_folders.MARK)
    (foreign / job_folders.LOCK).write_text('something else')
    with job_folders.locked_folder(str(tmp_path)) as (folder, _):
        os.rename(folder, used)
        (tmp_path / 'mgpu.link').symlink_to(used)
        (tmp_path / 'mgpu.file').write_text('mine')
        job_folders.remove_abandoned(str(tmp_path))
        assert sorted(path.name for path in tmp_path.iterdir()) == [
            'mgpu.empty', 'mgpu.file', 'mgpu.foreign', 'mgpu.link', 'mgpu.used']
    job_folders.remove_abandoned(str(tmp_path / 'nowhere'))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        'mgpu.empty', 'mgpu.file', 'mgpu.foreign', 'mgpu.link', 'mgpu.used']


def test_folders_that_the_user_has_named_stay(tmp_path):
    chosen = {'OMPI_MCA_orte_local_tmpdir_base': '/scratch', 'OMPI_MCA_btl_vader_backing_directory': '/scratch'}
    with job_folders.job_folders(chosen) as (environment, locks):
        assert environment == {**chosen, mpi_environment.REPORTS: environment[mpi_environment.REPORTS]}
        assert len(locks) == 1


LOOKS = '''
import argparse, os, pickle, sys
class Own:
    pass
print(sys.path[0], sys.argv, __file__, __name__, os.getcwd() in sys.path, '' in sys.path, argparse.__file__)
os.chdir('/')
print(type(pickle.loads(pickle.dumps(Own()))) is Own, sys.modules['__main__'].Own is Own)
'''


@pytest.mark.slow_but_with('command0')
@pytest.mark.skipif(sys.version_info < (3, 10), reason='Python 3.8 and 3.9 do not show which module -m runs')
@pytest.mark.parametrize('command', [
    ['run', '-q'], pytest.param(['launch', '-n', '1'], marks=pytest.mark.mpi),
    pytest.param(['launch', '-n', '1', 'run', '-q'], marks=pytest.mark.mpi)])
def test_no_module_of_the_current_folder_is_imported(command, tmp_path):
    """``launch ... run`` executed a file argparse.py of the current folder, before the script."""
    (tmp_path / 'real').mkdir()
    (tmp_path / 'real' / 'script.py').write_text(LOOKS)
    (tmp_path / 'folder').mkdir()
    (tmp_path / 'folder' / 'linked.py').symlink_to(tmp_path / 'real' / 'script.py')
    for name in ('argparse', 'shlex', 'tempfile', 'runpy', 'theano', 'numpy', 'config'):
        (tmp_path / (name + '.py')).write_text('raise SystemExit("imported from the current folder")')
    words = [os.path.join('folder', 'linked.py'), '-n', '7']
    plain, ours = [python(*start, *words, folder=tmp_path, flags='cxx=').stdout
                   for start in ([], ['-m', 'theano_mgpu'] + command)]
    assert ours == plain and 'True True' in plain


@pytest.mark.skipif(sys.version_info < (3, 11), reason='option -P is new in Python 3.11')
def test_a_folder_or_script_under_a_safe_path(tmp_path):
    """A folder or an archive with a ``__main__.py`` could not be run with PYTHONSAFEPATH."""
    (tmp_path / 'app').mkdir()
    (tmp_path / 'app' / '__main__.py').write_text('import sys, own; print(own.__file__, len(sys.path), sys.argv)')
    (tmp_path / 'app' / 'own.py').write_text('')
    plain, ours = [python(*start, 'app', 'x', folder=tmp_path, flags='cxx=', PYTHONSAFEPATH='1').stdout
                   for start in ([], ['-m', 'theano_mgpu', 'run', '-q'])]
    assert ours == plain


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.parametrize('flags, words, code, text', [
    ('a->cpu', ['--ledger', '/nowhere/ledger'], 2, '/nowhere/ledger cannot be written: there is no folder /nowhere'),
    ('a->cpu;b->opencl7:0', [], 1 if find_spec('pygpu') else 2, 'rank 1 (')])
def test_an_error_before_a_script_has_joined_the_others_ends_all(flags, words, code, text, tmp_path):
    """MPI waited at the exit of the rank for the others, and they for the rank: ten minutes and more."""
    script = tmp_path / 'script.py'
    script.write_text('import theano, theano.tensor as T\nx = T.matrix("x")\n'
                      'theano.function([x], x.sum(), mode="FAST_COMPILE")([[1, 2]])')
    done = launch(2, *words, script, job='run', flags='cxx=,contexts=' + flags, expected=code)
    assert text in done.stderr and done.stderr.count('theano-mgpu: error: ') == 1, done.stderr


ENDS_EARLY = '''
import os, sys, time
ends, where, who = sys.argv[1:]
def maybe_end(here):
    if here == where and os.environ['OMPI_COMM_WORLD_RANK'] in who:
        exec(ends)
maybe_end('before the import')
time.sleep(where == 'before the import')  # mpirun notices by itself a rank that ends after another one has started MPI
import theano_mgpu as mgpu, theano.tensor as T
maybe_end('before the first function')
mgpu.init('a->cpu')
x = T.matrix('x')
f = mgpu.function([x], x.sum(), mode='FAST_COMPILE')
f([[1, 2], [3, 4]])
maybe_end('after a call')
f([[1, 2], [3, 4]])
'''
NAMES_IT = 'RankError: rank %s (host {host}) ended while others go on'


ENDS = [  # the statement, its place, the ranks that execute it, the exit code of the job, a text of stderr
    ('sys.exit()', 'before the first function', '1', 1, NAMES_IT % 1),
    ('sys.exit("no data")', 'before the first function', '1', 1, NAMES_IT % 1),
    ('sys.exit(3)', 'before the first function', '0', 1, NAMES_IT % 0),
    ('os._exit(0)', 'before the first function', '1', 1, 'process rank 1 with PID'),
    ('1/0', 'before the first function', '1', 1, 'ZeroDivisionError'),
    ('sys.excepthook = print; 1/0', 'before the first function', '1', 1, 'ZeroDivisionError'),
    ('sys.exit()', 'before the first function', '01', 0, 'did not work together'),
    ('sys.exit(3)', 'before the first function', '01', 3, 'ended with exit code 3'),
    ('sys.exit()', 'before the import', '1', 1, 'rank 1 ended before it had imported theano_mgpu'),
    ('os._exit(0)', 'before the import', '0', 1, 'rank 0 ended before it had imported theano_mgpu'),
    ('sys.exit(3)', 'before the import', '1', 3, 'Exit code: 3'),
    ('sys.exit()', 'before the import', '01', 0, ''),
    ('sys.exit()', 'after a call', '1', 1, NAMES_IT % 1),
    ('os._exit(0)', 'after a call', '0', 1, 'process rank 0 with PID'),
    ('sys.exit()', 'nowhere', '', 0, '')]


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.parametrize('case', ENDS)
def test_a_rank_that_ends_alone_ends_the_others_with_an_error(case, tmp_path):
    """One that had not joined the others waited for them at the end of MPI, and they for it: ten minutes and more."""
    ends, where, who, code, text = case
    script = tmp_path / 'script.py'
    script.write_text(ENDS_EARLY)
    done = launch(2, ends, where, who, job=str(script), flags='floatX=float32,cxx=', expected=code)
    assert text.format(host=os.uname().nodename) in ' '.join(done.stderr.split())  # Open MPI breaks lines


@pytest.mark.mpi
def test_a_rank_that_ends_before_it_joins_ends_a_job_of_mpirun(tmp_path):
    """The others waited in MPI for ever: mpirun ends no job whose ranks end with exit code 0."""
    (tmp_path / 'script.py').write_text(ENDS_EARLY)
    done = launch(2, 'sys.exit()', 'before the import', '1', job=str(tmp_path / 'script.py'), mpirun=True, expected=1,
                  flags='floatX=float32,cxx=')
    assert done.stderr.count('rank 1 ended before it had imported theano_mgpu') == 1


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.parametrize('seconds,flag,code,text', [
    (33, '', 0, 'note: rank 0 has waited 30 s for rank 1 to import theano_mgpu'),
    (60, ',mgpu.timeout=1', 1, 'rank 0 has waited 10 s for rank 1 to import theano_mgpu')])
def test_a_rank_that_joins_late(seconds, flag, code, text, tmp_path):
    """It is no fault at first, but a note names it, and in the end the job fails."""
    (tmp_path / 'script.py').write_text(ENDS_EARLY)
    done = launch(2, 'time.sleep(%d)' % seconds, 'before the import', '1', job=str(tmp_path / 'script.py'),
                  flags='floatX=float32,cxx=' + flag, expected=code)
    assert text in done.stderr


def test_a_launcher_whose_faults_are_shown(fake_mpirun, tmp_path):
    """PYTHONFAULTHANDLER ended the launcher with a TypeError: Python cannot put back a handler of C code."""
    fake_mpirun('exit 0')
    assert python('-m', 'theano_mgpu', 'launch', '-n', '2', __file__, PYTHONFAULTHANDLER='1').stderr == ''


PRINTS_MUCH = """
import os, subprocess, sys, threading, time
import theano_mgpu as mgpu
from theano_mgpu.utils import rank_process
if mgpu.rank() == 0:
    sys.exit()
# A busy machine reads late.
writes = "import time; [(print('child ' * 20000), time.sleep(.03)) for _ in range(40)]"
thread = threading.Thread(target=subprocess.run, args=([sys.executable, '-c', writes],))
thread.start()
largest = 0
for number in range(60000):
    print('line', number, 80 * '.')
    time.sleep(.1 * (number % 5000 == 0))
    largest = max(largest, os.fstat(1).st_size)
thread.join()
rank_process.OFTEN, rank_process.MOST = .01, 5000
print(9000 * '.', 'the last line', sep='\\n', flush=True)
time.sleep(.5)
print('largest', largest)
subprocess.run(['echo', 'from a child'])
raise ValueError('the error')
"""


@pytest.mark.slow
@pytest.mark.mpi
def test_what_a_quiet_rank_prints_takes_no_more_and_more_of_the_disk(tmp_path):
    """Its output, 12 MB here, went to a deleted file that only grew. The last lines are shown with the error."""
    (tmp_path / 'script.py').write_text(PRINTS_MUCH)
    *_, last, largest, child, _ = launch(2, job=str(tmp_path / 'script.py'), flags='cxx=', expected=1) \
        .stderr.partition('Traceback')[0].splitlines()
    assert last == 'the last line' and child == 'from a child'
    assert int(largest.split()[1]) < 6 << 20


CLOSES_ALL = """
import os
import theano_mgpu as mgpu
from theano_mgpu.utils import rank_process
if mgpu.rank() == 0 and not os.fork():
    os.closerange(3, 256)
    files = [open('mine%d' % i, 'w+') for i in range(9)]
    rank_process.note('seen')
    print([file.seek(0) or file.read() for file in files] == [''] * 9, flush=True)
    files[0].write('own')
elif mgpu.rank() == 0:
    os.wait()
    print(open('mine0').read())
"""


@pytest.mark.slow
@pytest.mark.mpi
def test_a_note_in_a_fork_of_a_rank_that_has_closed_all_files_is_not_in_one_of_its_own(tmp_path):
    """It was written to the file that had got the number of the terminal's second descriptor."""
    (tmp_path / 'script.py').write_text(CLOSES_ALL)
    done = launch(2, job=str(tmp_path / 'script.py'), flags='cxx=', folder=str(tmp_path))
    assert done.stdout.split() == ['True', 'own'] and 'note: seen' in done.stderr
