"""`theano-mgpu launch`: the command line that it runs, and its messages; the jobs themselves are in test_ranks.py."""
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from theano_mgpu.cli import job_command, main, supervise
from theano_mgpu.cli.doctor import mpi_checks
from theano_mgpu.cli.launch import COMMAND
from theano_mgpu.cli.launcher_output import OwnMessages
from theano_mgpu.cli.supervise import History, Next, decide
from theano_mgpu.comm.communicator import Communicator
from theano_mgpu.comm.mpi_library import import_mpi
from theano_mgpu.devices.context_map import describe
from theano_mgpu.devices.contexts import host_contexts, init
from theano_mgpu.errors import ContextError, MgpuError
from theano_mgpu.utils import mpi_environment, rank_process, values

import numpy as np
import pytest
from support.communicator_cases import summed
from support.processes import python


@pytest.fixture
def fake_mpirun(tmp_path, monkeypatch):
    """Return the folder of an mpirun that prints its arguments, and then runs the shell commands of mpirun.does."""
    program = tmp_path / 'mpirun'
    program.write_text('#!/bin/sh\n[ "$1" = --version ] && echo "mpirun (Open MPI) 4.1.4" && exit\n'
                       'printf "%s\\n" "$*"; echo "flags $THEANO_FLAGS threads $OMP_NUM_THREADS"; . "$0.does"\n')
    program.chmod(0o755)
    (tmp_path / 'mpirun.does').write_text('')
    monkeypatch.setenv('PATH', '%s:%s' % (tmp_path, os.environ['PATH']))
    monkeypatch.setenv('THEANO_FLAGS', 'floatX=float32,contexts=a->cuda0;b->cuda1')
    for name in job_command.THREADS:
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.fixture
def script(tmp_path):
    path = tmp_path / 'train.py'
    path.write_text('')
    return str(path)


def test_the_command(fake_mpirun, script, capfd, monkeypatch):
    monkeypatch.setattr(os, 'cpu_count', lambda: 8)
    monkeypatch.setattr(os, 'sched_getaffinity', lambda pid: set(range(8)))
    assert main(['launch', '-n', '2', script, '--epochs', '5', '-n', '7']) == 0
    words, environment = capfd.readouterr().out.splitlines()
    assert words.startswith('-n 2 ') and words.endswith('%s %s --epochs 5 -n 7' % (sys.executable, script))
    assert '--host localhost:2 --use-hwthread-cpus --map-by slot:PE=4 --bind-to hwthread' in words
    assert '-x THEANO_FLAGS' in words and ('--allow-run-as-root' in words) == (os.geteuid() == 0)
    assert environment == 'flags floatX=float32,contexts=a->cuda0;b->cuda1,mgpu.executor=mpi threads 4'


def test_options_become_flags(fake_mpirun, script, capfd):
    assert main(['launch', '-n', '3', '--hosts', 'one,two', '--gpus-per-process', '2', '--sharded', '--timeout', '30',
                 script]) == 0
    words, environment = capfd.readouterr().out.splitlines()
    assert '--host one:2,two:1 --mca oob_tcp_keepalive_time 3' in words
    assert 'mgpu.gpus_per_process=2,mgpu.data=sharded,mgpu.timeout=30' in environment


@pytest.mark.parametrize('overlap', ['True', 'False'])
def test_ranks_that_exchange_on_a_thread_leave_the_core_to_others(overlap, fake_mpirun, script, capfd, monkeypatch):
    monkeypatch.setenv('THEANO_FLAGS', 'mgpu.overlap=' + overlap)
    (fake_mpirun / 'mpirun.does').write_text('echo "yields $OMPI_MCA_mpi_yield_when_idle"')
    assert main(['launch', '-n', '2', script]) == 0
    assert ('yields 1' in capfd.readouterr().out) == (overlap == 'True')


@pytest.mark.parametrize('hosts,family', [([], '6'), (['--hosts', 'one,two'], '')])
def test_ranks_on_one_host_do_not_look_for_pairs_of_ipv6_interfaces(hosts, family, fake_mpirun, script, capfd):
    (fake_mpirun / 'mpirun.does').write_text('echo "without family <$OMPI_MCA_btl_tcp_disable_family>"')
    assert main(['launch', '-n', '2', *hosts, script]) == 0
    assert 'without family <%s>' % family in capfd.readouterr().out


def test_threads_that_the_user_has_set_stay(fake_mpirun, script, capfd, monkeypatch):
    monkeypatch.setenv('OMP_NUM_THREADS', '3')
    assert main(['launch', '-n', '2', script]) == 0
    assert 'threads 3' in capfd.readouterr().out


@pytest.mark.parametrize('words,expected', [
    (['-m', 'package.train', '-x', '1'], '-m package.train -x 1'),
    (['run', '--strict', 'train.py', '-n', '7'], COMMAND + ' run --strict train.py -n 7')])
def test_modules_and_scripts_that_run_unchanged(words, expected, fake_mpirun, script, capfd, monkeypatch):
    monkeypatch.chdir(os.path.dirname(script))
    assert main(['launch', '-n', '2'] + words) == 0
    assert capfd.readouterr().out.splitlines()[0].endswith('%s %s' % (sys.executable, expected))


def test_predictions_by_several_processes(fake_mpirun, tmp_path, capfd, monkeypatch):
    """The command of the console script had to be given, with its path."""
    monkeypatch.chdir(tmp_path)
    words = ['launch', '-n', '2', '--gpus', 'b', 'predict', 'model.h5', 'x.npy', 'y.npy']
    (tmp_path / 'model.h5').touch()
    assert main(words) == 2 and 'there is no file x.npy' in capfd.readouterr().err
    (tmp_path / 'x.npy').touch()
    assert main(words) == 0
    command, environment = capfd.readouterr().out.splitlines()
    assert command.endswith(COMMAND + ' predict model.h5 x.npy y.npy') and 'contexts=b->cuda1,' in environment


def test_no_script(capsys):
    with pytest.raises(SystemExit) as caught:
        main(['launch', '-n', '2'])
    assert caught.value.code == 2 and 'give the path of a Python script' in capsys.readouterr().err


@pytest.mark.parametrize('words', [[], ['run', '-q']])
@pytest.mark.parametrize('name', ['train.py', 'folder'])
def test_a_script_with_an_error_of_syntax_is_not_started(words, name, fake_mpirun, tmp_path, capfd, monkeypatch):
    """Each process and each restart showed the same error."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'folder').mkdir()
    for path in ('train.py', 'folder/__main__.py'):
        (tmp_path / path).write_text('"\\d"\nif 1\n    print()\n')
    with pytest.raises(SystemExit) as caught:
        main(['launch', '-n', '2', '--restarts', '2', *words, name])
    text = str(caught.value.code).splitlines()
    assert text[0].endswith('line 2') and name in text[0] and text[-1].startswith('SyntaxError: ')
    out, err = capfd.readouterr()
    assert 'flags' not in out and not err  # neither mpirun nor a warning


def test_a_dry_run_runs_nothing(fake_mpirun, script, capfd):
    (fake_mpirun / 'mpirun.does').write_text('exit 1')
    assert main(['launch', '-n', '2', '--dry-run', script, 'a b']) == 0
    out = capfd.readouterr().out
    assert 'THEANO_FLAGS=floatX=float32' in out and out.rstrip().endswith("%s 'a b'" % script)


def shell_report(*what):
    """Return commands of a shell that make reports of rank 0."""
    return ' '.join(': > "$MGPU_REPORTS/%s";' % each for each in what)


STUCK = dict(stepped=False)


@pytest.mark.parametrize('job,history,following,note', [
    (dict(stepped=True), History(1), Next.RESTART, 'it ended: restart 1 of 1'),
    (dict(stepped=True, has_spare=True), History(2, restart=1), Next.RESTART,
     'it ended: restart 2 of 2, by the spare processes'),
    (dict(stepped=True), History(1, restart=1), Next.END, 'it ended'),
    (STUCK, History(0), Next.END, 'it ended'),
    (STUCK, History(3), Next.RESTART, 'it ended: restart 1 of 3'),
    (STUCK, History(3, stuck=1), Next.END,
     'it ended, again before the first step was done: it is not started once more'),
    (STUCK, History(3, (2, 1)), Next.SMALLER, 'it ended, before the first step was done: it is tried with -n 2'),
    (STUCK, History(3, (2, 1), stuck=1), Next.SMALLER,
     'it ended, before the first step was done: it is tried with -n 1'),
    (STUCK, History(3, (2, 1), stuck=2), Next.END,
     'it ended, again before the first step was done: it is not started once more'),
    (STUCK, History(3, (2,), restart=3), Next.SMALLER,
     'it ended, before the first step was done: it is tried with -n 2'),
    (dict(stepped=True), History(3, (2, 1), stuck=2), Next.RESTART, 'it ended: restart 1 of 3'),
    (dict(stepped=True, grows=True), History(1, (2,), restart=1), Next.RESTART,
     'it ended: it continues with all of them'),
    (dict(stepped=True, grows=True, has_spare=True), History(1, (2,)), Next.RESTART,
     'it ended: it continues with all of them, the spare ones')])
def test_the_decision_after_a_job(job, history, following, note):
    assert decide(history, 'it ended', **job)[:2] == (following, note)
    after = decide(history, 'it ended', **job)[2]
    assert after.stuck == (0 if job['stepped'] else history.stuck + 1)
    assert after.restart == history.restart + ('restart ' in note)


@pytest.mark.slow
def test_restarts(fake_mpirun, script, capfd):
    runs = shell_report(mpi_environment.STEP) + 'echo x >> "$0.runs"; '
    (fake_mpirun / 'mpirun.does').write_text(runs + '[ $(wc -l < "$0.runs") -ge 3 ] || exit 5')
    assert main(['launch', '-n', '2', '--restarts', '3', script]) == 0
    _, err = capfd.readouterr()
    assert re.search(r'exit code 5 after \d+ s: restart 1 of 3', err)
    assert 'restart 2 of 3' in err and 'restart 3' not in err
    (fake_mpirun / 'mpirun.runs').unlink()
    assert main(['launch', '-n', '2', '--restarts', '1', script]) == 5
    assert (fake_mpirun / 'mpirun.runs').read_text() == 'x\nx\n'


def test_a_job_that_never_gets_to_a_step_is_not_started_again_and_again(fake_mpirun, script, capfd):
    """``import nosuch`` ran four times with ``--restarts 3``."""
    (fake_mpirun / 'mpirun.does').write_text('echo x >> "$0.runs"; exit 5')
    assert main(['launch', '-n', '2', '--restarts', '3', script]) == 5
    assert (fake_mpirun / 'mpirun.runs').read_text() == 'x\nx\n'
    assert 'again before the first step was done: it is not started once more' in capfd.readouterr().err


@pytest.mark.slow_but_with('True-2')
@pytest.mark.parametrize('is_here, runs', [(True, 2), (False, 4)])
def test_a_job_whose_reports_may_not_arrive_is_started_again(is_here, runs, fake_mpirun, script):
    """The launcher cannot know of a step if rank 0 is on another host."""
    reports = shell_report(mpi_environment.STARTED) if is_here else ''
    (fake_mpirun / 'mpirun.does').write_text('%s echo x >> "$0.runs"; exit 5' % reports)
    assert main(['launch', '-n', '2', '--hosts', 'one,two', '--restarts', '3', script]) == 5
    assert (fake_mpirun / 'mpirun.runs').read_text() == 'x\n' * runs


def test_rank_0_reports_where_there_is_a_folder_for_it(tmp_path, monkeypatch):
    for folder in (tmp_path, tmp_path / 'nowhere'):
        monkeypatch.setenv(mpi_environment.REPORTS, str(folder))
        rank_process.report.cache_clear()
        rank_process.report('test')
    assert [path.name for path in tmp_path.iterdir()] == ['test']


def test_a_kill_of_a_job_that_has_just_started_again_does_not_end_it(fake_mpirun, script, capfd):
    """A second kill before the next step ended the job, whatever number of restarts was left."""
    (fake_mpirun / 'mpirun.does').write_text('''
        echo x >> "$0.runs"; case $(wc -l < "$0.runs") in 2) exit 5;; esac
        %s [ $(wc -l < "$0.runs") -ge 3 ] || exit 5''' % shell_report(mpi_environment.STEP))
    assert main(['launch', '-n', '2', '--restarts', '3', script]) == 0
    assert (fake_mpirun / 'mpirun.runs').read_text() == 'x\nx\nx\n' and 'restart 2 of 3' in capfd.readouterr().err


@pytest.mark.slow
def test_fewer_processes_and_all_again(fake_mpirun, script, capfd):
    """A job shrinks where it does not come to a step, and grows with the next restart."""
    (fake_mpirun / 'mpirun.does').write_text('''
        echo "$2" >> "$0.runs"; run=$(wc -l < "$0.runs")
        case $run-$2 in 2-4|3-3|5-4) exit 1;; esac
        %s [ $run -ge 6 ] || exit 5''' % shell_report(mpi_environment.STEP))
    assert main(['launch', '--min', '2', '--max', '4', '--restarts', '2', script]) == 0
    assert (fake_mpirun / 'mpirun.runs').read_text().split() == ['4', '4', '3', '2', '4', '3']
    err = capfd.readouterr().err
    assert re.search(r'exit code 1 after \d s, before the first step was done: it is tried with -n 2', err)
    assert 'restart 2 of 2' in err


# An mpirun of which three processes find their devices from the time on when a file is there. Two keep checkpoints, and
# wait for their end; the first job of three has a step.
SHRUNK = '''
[ -z "$MGPU_SPARE" ] || kind=spare
echo "$kind$2" >> "$0.runs"; run=$(wc -l < "$0.runs")
case $run-$2 in
    1-3) %(step)s exit 5;;
    *-3) [ -e "$0.back" ] || exit 6
         [ -z "$MGPU_SPARE" ] || { %(ready)s until [ -e "$MGPU_SPARE" ]; do sleep 0.02; done; printf needed; }
         exit;;
    *) %(step)s %(checkpoint)s %(does)s; exec sleep 60;;
esac
'''


def shrunk(folder, does):
    reports = {what: shell_report(what) for what in (mpi_environment.STEP, mpi_environment.CHECKPOINT,
                                                     mpi_environment.READY)}
    (folder / 'mpirun.does').write_text(SHRUNK % dict(reports, does=does))


@pytest.mark.slow
@pytest.mark.parametrize('is_back', [True, False])
def test_a_job_of_fewer_processes_grows_when_it_is_asked_to(is_back, fake_mpirun, script, capfd):
    """It goes on with fewer if the device is not back."""
    ask = 'sleep 0.2; kill -%d %d' % (supervise.GROW, os.getpid())
    shrunk(fake_mpirun, 'touch "$0.%s"; [ $run -lt 5 ] || exit 0; %s' % ('back' if is_back else 'gone', ask))
    before = signal.getsignal(supervise.GROW)
    assert main(['launch', '--min', '1', '--max', '3', '--restarts', '1', script]) == 0
    assert (fake_mpirun / 'mpirun.runs').read_text().split() == ['3', '3', '2', '3'] + ['2'] * (not is_back)
    assert re.search(r'was ended after \d+ s: it continues with all of them\n', capfd.readouterr().err)
    assert signal.getsignal(supervise.GROW) == before


@pytest.mark.slow
def test_a_job_that_cannot_grow_says_why(fake_mpirun, script, capfd):
    (fake_mpirun / 'mpirun.does').write_text('kill -%d %d; sleep 0.5' % (supervise.GROW, os.getpid()))
    assert main(['launch', '--min', '1', '--max', '3', '--restarts', '1', script]) == 0
    assert 'the job does not grow: it has all of its processes' in capfd.readouterr().err


@pytest.mark.slow
def test_a_job_of_fewer_processes_grows_once_spare_ones_are_ready(fake_mpirun, script, capfd, monkeypatch):
    """The first spare processes fail, since the device is not back; they are tried again, and less often each time."""
    monkeypatch.setattr(supervise, 'SOONEST', 0.2)
    shrunk(fake_mpirun, '(while [ $(wc -l < "$0.runs") -lt 5 ]; do sleep 0.05; done; touch "$0.back") & :')
    assert main(['launch', '--min', '1', '--max', '3', '--restarts', '1', '--spares', '1', script]) == 0
    runs, (out, err) = (fake_mpirun / 'mpirun.runs').read_text().split(), capfd.readouterr()
    assert runs[:5] == ['3', '3', '2', 'spare3', 'spare3'] and set(runs[5:]) <= {'spare3'}
    assert 'the job goes on with fewer, and the next ones are started in 0 s' in err and out.endswith('needed')
    assert 'it continues with all of them, the spare ones' in err and err.count('restart 1 of 1') == 1


def test_a_job_that_never_gets_to_a_step_is_tried_once_with_each_number(fake_mpirun, script, capfd):
    (fake_mpirun / 'mpirun.does').write_text('echo "$2" >> "$0.runs"; exit 5')
    assert main(['launch', '-n', '3', '--min', '1', '--restarts', '9', script]) == 5
    assert (fake_mpirun / 'mpirun.runs').read_text().split() == ['3', '2', '1']
    assert 'again before the first step was done: it is not started once more' in capfd.readouterr().err


# An mpirun whose job keeps checkpoints, and ends with an error once a spare is ready; the spare waits, and prints.
SPARED = '''
if [ -n "$MGPU_SPARE" ]; then
    echo spare >> "$0.runs"; echo "from the spare"; %s
    %s touch "$0.ready"; until [ -e "$MGPU_SPARE" ]; do sleep 0.02; done; printf needed; exit
fi
echo job >> "$0.runs"; %s while [ ! -e "$0.ready" ]; do sleep 0.05; done; sleep 0.2
echo "from the job"; exit 5
'''


def spared(does, extra=''):
    does.write_text(SPARED % (extra, shell_report(mpi_environment.READY),
                              shell_report(mpi_environment.STEP, mpi_environment.CHECKPOINT)))


def test_a_spare_job_continues(fake_mpirun, script, capfd):
    """Its output is held back until it continues, and no further spare is started for the last attempt."""
    spared(fake_mpirun / 'mpirun.does')
    assert main(['launch', '-n', '2', '--restarts', '1', '--spares', '1', script]) == 0
    out, err = capfd.readouterr()
    assert out.endswith('from the spare\nneeded') and 'from the job\n-n 2 ' in out and out.count('from the spare') == 1
    assert 'note: the spare processes are ready, after ' in err and '\0' not in err
    assert re.search(r'exit code 5 after \d s: restart 1 of 1, by the spare processes', err)
    assert (fake_mpirun / 'mpirun.runs').read_text() == 'job\nspare\n'


@pytest.mark.slow
def test_a_spare_job_that_fails_is_no_secret(fake_mpirun, script, capfd):
    spared(fake_mpirun / 'mpirun.does', extra='touch "$0.ready"; exit 7')
    assert main(['launch', '-n', '2', '--restarts', '1', '--spares', '1', script]) == 5
    out, err = capfd.readouterr()
    assert 'the spare processes have ended with exit code 7 before they were needed; there will be no others' in err
    assert 'from the spare' in out and 'by the spare' not in err
    assert (fake_mpirun / 'mpirun.runs').read_text() == 'job\nspare\njob\n'


def test_a_process_has_ended_when_its_last_thread_has():
    """A spare rank found the checkpoint file locked: a thread of the killed rank had not ended."""
    code = 'import ctypes, threading, time; threading.Thread(target=time.sleep, args=(60,)).start(); ' \
        'print(flush=True); ctypes.CDLL(None).pthread_exit(None)'
    with subprocess.Popen([sys.executable, '-c', code], stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        while b') Z ' not in Path('/proc/%d/stat' % process.pid).read_bytes():
            time.sleep(0.01)
        assert not supervise.has_ended(process.pid)
        supervise.end_all([process.pid])
        assert supervise.has_ended(process.pid)


@pytest.mark.slow
def test_a_job_without_checkpoints_has_no_spare(fake_mpirun, script, capfd):
    """The spare would train by itself."""
    (fake_mpirun / 'mpirun.does').write_text('echo "job$MGPU_SPARE" >> "$0.runs"; %s sleep 0.2; exit 5'
                                             % shell_report(mpi_environment.STEP))
    assert main(['launch', '-n', '2', '--restarts', '1', '--spares', '1', script]) == 5
    assert (fake_mpirun / 'mpirun.runs').read_text() == 'job\njob\n'
    assert 'has no spare processes, since the script keeps no checkpoints' in capfd.readouterr().err


@pytest.mark.slow_but_with('SIGINT')
@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_to_the_launcher_ends_mpirun_without_a_restart(number, fake_mpirun, script, monkeypatch):
    monkeypatch.setattr(supervise, 'GRACE', 0.1)
    (fake_mpirun / 'mpirun.does').write_text('echo x >> "$0.runs"; exec sleep 60')
    threading.Timer(0.5, os.kill, [os.getpid(), number]).start()
    before = signal.signal(number, signal.SIG_DFL)  # these tests may run under nohup
    try:
        assert main(['launch', '-n', '2', '--restarts', '3', script]) == 128 + number
    finally:
        signal.signal(number, before)
    assert (fake_mpirun / 'mpirun.runs').read_text() == 'x\n'


@pytest.mark.slow
def test_a_second_signal_kills_an_mpirun_that_does_not_end(fake_mpirun, script, monkeypatch):
    (fake_mpirun / 'mpirun.does').write_text('trap "" TERM INT; sleep 100 & wait')
    for delay in (0.5, 1):
        threading.Timer(delay, os.kill, [os.getpid(), signal.SIGTERM]).start()
    began = time.monotonic()
    assert main(['launch', '-n', '2', script]) == 128 + signal.SIGTERM
    assert time.monotonic() - began < 30


def test_a_signal_that_was_ignored_stays_so(fake_mpirun, script):
    """The process keeps ignoring a signal, as under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        (fake_mpirun / 'mpirun.does').write_text('kill -HUP %d; sleep 0.2' % os.getpid())
        assert main(['launch', '-n', '2', script]) == 0
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize('arguments,message', [
    (['-n', '2', 'nowhere.py'], 'there is no script nowhere.py'),
    (['-n', '2', '--restarts', '-1', __file__], '--restarts -1: give 0 or more'),
    (['-n', '2', '--restarts', '1', '--spares', '-1', __file__], '--spares -1: give 0 or more'),
    (['-n', '2', '--spares', '1', __file__], '--spares 1 is for restarts, and there are none: give --restarts R, too'),
    (['-n', '2', '--min', '1', __file__], '--min 1 is for restarts, and there are none: give --restarts R, too'),
    (['-n', '2', '--min', '3', '--restarts', '1', __file__], '--min 3 is more than the number of processes, 2'),
    (['-n', '2', '--min', '1', '--restarts', '1', '--hosts', 'a,b', __file__], '--min 1 is for processes of one host'),
    (['-n', '2', '--hosts', 'a,b,c', __file__], 'room for 2 processes|each host runs at least one'),
    (['-n', '3', '--hosts', 'a:1,b:1', __file__], 'has room for 2 processes, but -n asks for 3'),
    (['-n', '2', '--hosts', 'a,a', __file__], 'name each host once'),
    (['-n', '2', '--hosts', 'a:1,b', __file__], 'name each host once'),
    (['-n', '2', '--hosts', 'a:0,b:2', __file__], 'name each host once'),
])
def test_bad_arguments(fake_mpirun, capsys, arguments, message):
    assert main(['launch'] + arguments) == 2
    err = capsys.readouterr().err
    assert any(part in err for part in message.split('|')), err


def test_no_mpirun(monkeypatch, script, capsys, tmp_path):
    monkeypatch.setenv('PATH', str(tmp_path / 'empty'))
    assert main(['launch', '-n', '2', script]) == 1
    assert 'mpirun, which starts the processes, is not on PATH. Debian: apt-get install openmpi-bin' \
        in capsys.readouterr().err


def test_another_mpirun(fake_mpirun, script, capsys):
    (fake_mpirun / 'mpirun').write_text('#!/bin/sh\necho "HYDRA build details:"\n')
    assert main(['launch', '-n', '2', script]) == 1
    assert "is not Open MPI's (HYDRA build details:)" in capsys.readouterr().err


RULE = b'-' * 74 + b'\n'
NOISE = RULE + b'MPI_ABORT was invoked on rank 1\nwith errorcode 1.\n' + RULE


def in_parts(output, data):
    """Yield the data that an Output lets through if they arrive a byte at a time, in sevens, or at once."""
    for step in (1, 7, 1000):
        one = output()
        yield b''.join(one.passed(data[start:start + step]) for start in range(0, len(data), step)) + one.unfinished


def test_what_mpirun_adds_is_left_out_but_nothing_else():
    news = RULE + b'mpirun noticed that process rank 1 was killed\n' + RULE
    whole = NOISE + b'text\n' + news + b'-- a line\n' + NOISE + news + b'end'
    assert list(in_parts(OwnMessages, whole)) == [whole.replace(NOISE, b'')] * 3
    assert list(in_parts(OwnMessages, NOISE[:90])) == [NOISE[:90]] * 3
    alone = b'MPI_ABORT was invoked by a script\n'  # without lines of dashes around it: it is no message of mpirun
    assert list(in_parts(OwnMessages, alone)) == [alone] * 3


@pytest.fixture
def rank_1_of_2(monkeypatch):
    for name, value in zip(mpi_environment.MPIRUN.variables, '1212'):
        monkeypatch.setenv(name, value)


@pytest.mark.slow_but_with('1-True')
@pytest.mark.parametrize('code,said', [(1, True), (0, False)])
def test_what_mpirun_logs_is_shown_if_it_is_the_only_reason(code, said, fake_mpirun, script, capfd):
    """The job could not make its folder for temporary files, and ended without a word."""
    log = '[host:7] ORTE_ERROR_LOG: Error in file session_dir.c\n'
    write = 'import os; os.write(int(os.environ["OPAL_OUTPUT_STDERR_FD"]), %r)' % log.encode()
    (fake_mpirun / 'mpirun.does').write_text("%s -c %s; exit %d" % (sys.executable, shlex.quote(write), code))
    assert main(['launch', '-n', '2', script]) == code
    assert (log in capfd.readouterr().err) == said


def test_a_rank_takes_its_share_of_the_contexts(rank_1_of_2, monkeypatch, contexts):
    monkeypatch.setenv('THEANO_FLAGS', '')
    assert (mpi_environment.rank(), mpi_environment.size()) == (1, 2)
    assert (mpi_environment.local_rank(), mpi_environment.local_size()) == (1, 2)
    assert describe(init('a->cpu;b->cpu;c->cpu')) == 'b->cpu;c->cpu'
    assert [context.name for context in host_contexts()] == ['a', 'b', 'c']
    monkeypatch.setenv('THEANO_FLAGS', 'mgpu.gpus_per_process=1')
    assert describe(init('a->cpu;b->cpu;c->cpu')) == 'b->cpu'
    monkeypatch.setenv('THEANO_FLAGS', 'mgpu.gpus_per_process=4')
    with pytest.raises(ContextError, match='4 contexts for each process were asked for; this host has 3'):
        init('a->cpu;b->cpu;c->cpu')
    monkeypatch.setenv('THEANO_FLAGS', 'mgpu.executor=serial')
    assert describe(init('a->cpu;b->cpu')) == 'a->cpu;b->cpu'
    monkeypatch.undo()
    contexts('cpu', 1)


def test_an_mpi_that_is_not_there(rank_1_of_2, monkeypatch):
    monkeypatch.setitem(sys.modules, 'mpi4py', None)
    with pytest.raises(MgpuError, match='several processes need mpi4py and an MPI library: .*python3-mpi4py'):
        import_mpi()


@pytest.mark.slow
def test_an_mpi_of_another_mpirun():
    """The environment tells of two processes, and MPI finds itself alone."""
    pytest.importorskip('mpi4py')
    code = 'from theano_mgpu.comm.mpi_library import import_mpi; import_mpi()'
    done = python('-c', code, flags='mgpu.executor=serial', expected=None,
                  **dict(zip(mpi_environment.HYDRA.variables, '0202')))
    assert re.search('mpiexec of MPICH or Intel MPI started 2 processes, but the MPI library of mpi4py, [^,]*, finds '
                     '1: each would train by itself', done.stderr)


def test_theano_does_not_start_mpi():
    python('-c', "import theano_mgpu, sys; assert 'mpi4py.MPI' not in sys.modules\n"
                 "from theano.tensor.io import mpi_enabled; assert not mpi_enabled")


@pytest.mark.parametrize('change', [lambda x: x[::-1], lambda x: x + 1, lambda x: np.roll(x, 1, axis=1)])
def test_batches_are_told_apart(change):
    x = np.random.RandomState(0).rand(100, 28, 28)
    number = values.sampled_checksum(x)
    assert values.sampled_checksum(change(x)) != number == values.sampled_checksum(x.copy())


def test_small_arrays_of_several_dtypes_are_added_at_once():
    class Twice(Communicator):
        calls = []

        def __init__(self):
            super().__init__()
            self.size = 2

        def all_reduce(self, arrays):
            self.calls.append(len(arrays))
            for array in arrays:
                array *= 2
    arrays = [np.arange(3.0), np.array(4), np.ones((2, 2)), np.array([1, 2])]
    for ours, given in zip(summed(Twice(), arrays), arrays):
        np.testing.assert_array_equal(ours, 2 * given)
        assert ours.dtype == given.dtype
    assert Twice.calls == [2]


@pytest.mark.mpi
def test_doctor_starts_two_processes():
    finding = mpi_checks.check_mpirun(None)
    assert finding.status == 'ok' and finding.text.endswith('mpirun: two processes start and add a number')


@pytest.mark.parametrize('does,text', [('exit 1', 'no output'), ('echo "size 1, total 1"', 'size 1, total 1'),
                                       ('echo "ImportError: no MPI" >&2; exit 1', 'ImportError: no MPI')])
def test_doctor_finds_processes_that_are_apart(fake_mpirun, does, text, monkeypatch):
    program = '#!/bin/sh\n[ "$1" = --version ] && echo "mpirun (Open MPI) 4" || { %s; }\n'
    (fake_mpirun / 'mpirun').write_text(program % does)
    monkeypatch.setattr(mpi_checks, 'installed', lambda name: '3')
    finding = mpi_checks.check_mpirun(None)
    assert finding.status == 'warn' and text in finding.text and 'openmpi-bin' in finding.remedy


def test_doctor_without_mpirun(monkeypatch, tmp_path):
    monkeypatch.setattr(mpi_checks, 'installed', lambda name: '3')
    monkeypatch.setenv('PATH', str(tmp_path))
    assert mpi_checks.check_mpirun(None)[:2] == ('warn', 'mpirun, which starts the processes, is not on PATH')
