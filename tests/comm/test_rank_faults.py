"""Jobs of several processes; one of them fails, is killed, stops, or does something else than the others."""
import json
import os
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from support.launch import INTERPRETED, JOBS, alone, arrays, command_of, launch
from support.requirements import is_open_mpi_5

NOTE = r'^replica 0 \(context a->cpu, samples 4 to 6\) failed, nothing was changed$'
pytestmark = pytest.mark.mpi


def test_ranks_that_disagree_are_told_so_at_once(tmp_path):
    launch(2, 'disagree', tmp_path / 'met', flags=INTERPRETED)
    for rank in range(2):
        with open('%s.%d' % (tmp_path / 'met', rank)) as f:
            found = json.load(f)
        met = {name: (kind, text) for name, kind, text in found['met']}
        assert met['lengths'][0] == 'RankBatchError' and '7 samples, rank 1 (host' in met['lengths'][1]
        assert met['data'][0] == 'RankBatchError'
        assert 'different batches of 7 samples, which differ in x: rank 0' in met['data'][1]
        assert met['functions'][0] == 'RankError' and 'in call 1 of predict' in met['functions'][1]
        assert met['model'][0] == 'RankError' and 'w2 float32(16, 3)' in met['model'][1]
        assert met['weights'][0] == met['weights of one'][0] == 'RankError'
        assert re.search(r': w1 on rank 1 \(host \S+\), to another value than on rank 0 \(host \S+\)\. Set the same ',
                         met['weights'][1])
        assert re.search(r'since the last step: b1 on rank 1 \(host \S+\) alone\. ', met['weights of one'][1])
        assert met['after all'] == ('nothing', '')
        assert found['unchanged']
        kind, text = met['replica']
        assert kind == 'MemoryError' and text.split('\n')[0] == 'no memory left'  # before Python 3.11 notes follow
        note = NOTE if rank else r'^rank 1 \(host .*\) failed here'
        assert re.search(note, found['notes']['replica']), found['notes']


@pytest.mark.slow
@pytest.mark.parametrize('how,code,message', [
    ('kill', 137, 'exited on signal 9 (Killed)'), ('replica', 1, 'MemoryError: no memory left'),
    ('raise', 1, 'rank 1 of 2 (host {host}, process'),
    ('output', 1, 'ValueError: the data of step 5 are bad'),
    ('hook', 1, 'ValueError: the data of step 5 are bad'),
    ('sleep', 1, 'has waited 2 s for rank 1 (host {host})'),
    ('exit', 1, 'rank 1 (host {host}) ended while others go on'),
    ('raise everywhere', 1, 'rank 0 of 2 (host {host}, process'),
    ('segfault', 139, 'Fatal Python error: Segmentation fault')])
def test_what_ends_one_rank_ends_all(how, code, message):
    done = launch(2, 'fail', how, options=['--timeout', '2'] if how == 'sleep' else [], expected=code,
                  flags=INTERPRETED)
    seconds = time.time() - float(re.search(r'failing at (\S+)', done.stdout).group(1))
    assert seconds < 60  # ranks wait for each other for 600
    assert message.format(host=os.uname().nodename) in ' '.join(done.stderr.split())  # Open MPI breaks lines
    assert done.stdout.startswith('rank 0 began\n') and 'rank 1 began' not in done.stdout
    hooks = how not in ('kill', 'segfault', 'hook')
    assert done.stderr.count(') failed:') == hooks
    assert 'MPI_ABORT' not in done.stderr or is_open_mpi_5()  # it prints its own messages among the ranks' lines
    assert 'therefore given up' not in done.stderr
    if how == 'raise':
        assert 'ValueError: the data of step 5 are bad' in done.stderr and 'rank 1 began' in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize('where,message', [
    ('all_reduce', 'adding up what each rank has computed, has waited 1 s for data from rank 1'),
    ('agree', 'at the end of a step, has waited 1 s for rank 1 (host {host})'),
    ('share', 'sharing values, has waited 10 s for rank 1'),
    ('call', 'in call 2 of train (number 0), has waited 1 s for rank 1'),
    ('gather', 'gathering the rows of a batch, has waited 1 s for rank 1'),
    ('compile', 'compiling in turn, has waited 10 s for rank 1'),
    ('prediction', 'of predict (number 2), has waited 1 s for rank 1'),
    ('end', 'at its end, has waited 10 s for rank 1'),
    ('finalize', 'Timeout (0:00:01)!')])
def test_a_stopped_rank_ends_the_job(where, message, tmp_path):
    """SIGSTOP stops the rank, as a debugger may; where others may still work, the limit is ten times longer."""
    done = launch(2, 'stopped', where, tmp_path / 'state.npz', options=['--timeout', '1'], expected=1,
                  flags=INTERPRETED)
    assert message.format(host=os.uname().nodename) in done.stderr


@pytest.mark.slow
def test_a_killed_job_goes_on_from_its_last_checkpoint(tmp_path):
    done = launch(2, 'checkpoints', tmp_path / 'ranks.npz', tmp_path / 'ckpt.npz', 4, 11, options=['--restarts', '3'],
                  flags=INTERPRETED)
    assert re.search(r'note: rank 1 \(process \d+\) ended early, and the others .*: restart 1 of 3\n', done.stderr)
    assert 'restart 2' not in done.stderr
    if not is_open_mpi_5():  # it writes its messages where ranks write
        assert 'note: in the job that was ended, rank 1 ended by signal 9 (Killed)\n' in done.stderr
        assert 'mpirun noticed' not in done.stderr
    *ours, done_before = arrays(tmp_path / 'ranks.npz')
    assert done_before == 8
    alone('checkpoints', tmp_path / 'whole.npz', tmp_path / 'whole.ckpt.npz', 100, -1, flags=INTERPRETED)
    for a, b in zip(ours, arrays(tmp_path / 'whole.npz')):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)


BY_ITSELF = '''
import os, sys, time
import theano_mgpu as mgpu, numpy as np, theano.tensor as T
mgpu.init('a->cpu')
x = T.matrix('x')
mgpu.function([x], x * 2, executor='serial')(np.ones((2, 2), 'float32'))
if mgpu.rank() == 0:
    time.sleep(2)
    print('done')
'''


@pytest.mark.slow
def test_a_rank_that_works_by_itself_may_end_earlier(tmp_path):
    (tmp_path / 'script.py').write_text(BY_ITSELF)
    done = launch(2, job=str(tmp_path / 'script.py'), options=['--restarts', '1'], flags=INTERPRETED)
    assert done.stdout == 'done\n' and 'restart' not in done.stderr


@pytest.mark.slow
def test_a_killed_job_continues_with_fewer_processes(tmp_path):
    done = launch(2, 'checkpoints', tmp_path / 'ranks.npz', tmp_path / 'ckpt.npz', 4, 11, 3, 1, flags=INTERPRETED,
                  options=['--restarts', '1', '--min', '1'])
    assert 'a device is lost' in done.stderr and 'it is tried with -n 1' in done.stderr
    *ours, done_before = arrays(tmp_path / 'ranks.npz')
    assert done_before == 8
    alone('checkpoints', tmp_path / 'whole.npz', tmp_path / 'whole.ckpt.npz', 100, -1, flags=INTERPRETED)
    for a, b in zip(ours, arrays(tmp_path / 'whole.npz')):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)


@pytest.mark.slow
def test_a_job_of_fewer_processes_grows_again(tmp_path):
    done = launch(2, 'shrinks_and_grows', tmp_path / 'ranks.npz', tmp_path / 'ckpt.npz', flags=INTERPRETED,
                  options=['--restarts', '1', '--min', '1'])
    assert 'it is tried with -n 1' in done.stderr and 'it continues with all of them' in done.stderr
    *ours, progress = arrays(tmp_path / 'ranks.npz')
    assert progress.tolist() == [8, 2]
    alone('checkpoints', tmp_path / 'whole.npz', tmp_path / 'whole.ckpt.npz', 100, -1, flags=INTERPRETED)
    for a, b in zip(ours, arrays(tmp_path / 'whole.npz')):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)


def test_spare_processes_continue_after_a_kill(tmp_path):
    """They have imported and compiled all before the kill, and the state is the same to the bit as without it."""
    path, whole = tmp_path / 'killed.npz', tmp_path / 'whole.npz'
    command = [sys.executable, '-m', 'theano_mgpu', 'launch', '-n', '2', '--restarts', '1', '--spares', '1', JOBS,
               'killed_while_it_waits', path, tmp_path / 'a.npz']
    with subprocess.Popen(list(map(str, command)), env=dict(os.environ, THEANO_FLAGS=INTERPRETED), text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE) as job:
        lines = iter(job.stderr.readline, '')
        assert any('the spare processes are ready' in line for line in lines)
        os.kill(int((tmp_path / 'killed.npz.1').read_text()), signal.SIGKILL)
        killed = time.monotonic()
        assert any('others were ended' in line and 'restart 1 of 1, by the spare processes' in line for line in lines)
        assert time.monotonic() - killed < 1  # mpirun itself takes two seconds
        out, errors = job.communicate(timeout=60)
    assert job.returncode == 0 and out == 'begins\n' * 2 and 'signal 9' in errors, errors
    launch(2, 'killed_while_it_waits', whole, tmp_path / 'b.npz', flags=INTERPRETED)
    (*ours, done), (*theirs, none) = arrays(path), arrays(whole)
    assert (done, none) == (4, 0) and all(map(np.array_equal, ours, theirs))


@pytest.mark.slow
@pytest.mark.parametrize('delay', [0.0, 0.3, 0.7])
def test_a_kill_at_any_moment_leaves_a_whole_file(delay, tmp_path):
    """A checkpoint follows each step, so that rank 0 is writing one most of the time."""
    file = tmp_path / 'ckpt.npz'
    command = [sys.executable, '-m', 'theano_mgpu', 'launch', '-n', '2', JOBS, 'checkpoints', tmp_path / 'r.npz', file,
               '1', '-1', '1000']
    job = subprocess.Popen(list(map(str, command)), env=dict(os.environ, THEANO_FLAGS='floatX=float32'),
                           stderr=subprocess.DEVNULL)
    while not file.exists():
        time.sleep(0.01)
    time.sleep(delay)
    for pid in os.listdir('/proc'):
        if pid.isdigit() and str(file) in command_of(int(pid)) and 'launch' not in command_of(int(pid)) \
                and not any(each in command_of(int(pid)) for each in ('mpirun', 'prterun')):
            os.kill(int(pid), signal.SIGKILL)
            break
    assert job.wait(60) == 137
    done = int(dict(np.load(str(file)))['extra/calls'])
    assert 0 < done < 6000
    rounds = done // 6 + 2
    launch(2, 'checkpoints', tmp_path / 'r.npz', file, 1, -1, rounds)
    launch(2, 'checkpoints', tmp_path / 'whole.npz', tmp_path / 'w.npz', 10 ** 6, -1, rounds)
    for ours, theirs in zip(arrays(tmp_path / 'r.npz')[:-1], arrays(tmp_path / 'whole.npz')):
        np.testing.assert_array_equal(ours, theirs)
