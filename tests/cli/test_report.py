"""`theano-mgpu report`: its table is true, each step ends in time, and names are left out."""
import os
import re
import signal
import subprocess
import sys
import time

from theano_mgpu.cli import limited, report
from theano_mgpu.cli.report.names import without_names

import cuda_on_cpu
import pytest

on_standin = pytest.mark.skipif(cuda_on_cpu.unavailable() is not None, reason=cuda_on_cpu.unavailable() or '')


def written(folder, *arguments, env=None):
    """Run the command; return the rows of its table by their names, the whole text, and the exit code."""
    path = str(folder / 'report.txt')
    env = dict(env or os.environ, NCCL_DEBUG_FILE=str(folder / 'nccl'))  # no other test's outcome counts
    done = subprocess.run([sys.executable, '-m', 'theano_mgpu', 'report', path, *arguments], capture_output=True,
                          text=True, env=env, timeout=300)
    text = open(path).read()
    head, _, rest = text.partition('\n\n')
    lines = [line.partition('  ') for line in rest.partition('\n\n')[0].splitlines()[1:] if not line.startswith(' ')]
    rows = {name: ' '.join(cells.split()) for name, _, cells in lines}
    assert 'Please read' in done.stdout or done.returncode > 2, done.stderr
    return rows, text, done.returncode


def standin(devices=2, **settings):
    pytest.importorskip('pygpu', reason='CUDA contexts need pygpu')
    return dict(cuda_on_cpu.environment(devices, **settings), THEANO_FLAGS='floatX=float32')


@pytest.mark.slow
def test_a_machine_without_a_gpu(tmp_path):
    env = {name: value for name, value in os.environ.items() if not name.startswith('CUDA_ON_CPU')}
    rows, text, code = written(tmp_path, '--only', 'machine,doctor,copies,nccl', '--gpus', '2',
                               env=dict(env, USER='', LOGNAME='', HOME='/home/nobody-here', SECRET='x'))
    assert rows['machine'].startswith('ok') and 'no NVIDIA GPU' in rows['machine']
    assert rows['doctor'].startswith(('ok', 'FAILED')) and 'shared memory' in text
    assert rows['copies'].startswith('left out') and 'no CUDA device' in text
    assert rows['nccl'].startswith('left out') and code == rows['doctor'].startswith('FAILED')
    assert 'SECRET' not in text and '\nNCCL_DEBUG_FILE=' in text and 'contexts dev0->cpu;dev1->cpu' in text


@pytest.mark.slow_with('copies that are wrong')
@on_standin
@pytest.mark.parametrize('settings, expected', [
    pytest.param({}, {'copies': 'ok', 'nccl': 'ok', 'nccl-staged': 'left out'}, id='well'),
    pytest.param({'peer': 'broken'}, {'copies': 'FAILED'}, id='copies that are wrong'),
    pytest.param({'init': 802}, {'doctor': 'ok', 'nccl': 'left out'}, id='a driver that refuses')])
def test_the_table_is_true(settings, expected, tmp_path):
    rows, text, code = written(tmp_path, '--only', ','.join(expected), env=standin(**settings))
    assert {name: rows[name].startswith(result) for name, result in expected.items()} == dict.fromkeys(expected, True)
    assert code == ('FAILED' in expected.values())
    assert ('copy wrong bytes' in text or 'wrongly' in text) == ('peer' in settings)
    assert ('fabric manager' in text) == ('init' in settings)
    if 'init' in settings:
        rows, _, _ = written(tmp_path, '--only', 'machine', env=standin(**settings))
        assert 'the driver reports error 802' in rows['machine']


@pytest.mark.slow
@on_standin
@pytest.mark.parametrize('step', ['nccl', 'nccl-staged'])  # each waits for 20 s
def test_a_first_exchange_that_hangs_is_named(step, tmp_path):
    rows, text, code = written(tmp_path, '--only', step, env=standin(nccl_hang=True))
    assert rows[step].startswith('FAILED') and code == 1
    assert 'NCCL has not ended the first exchange of values within 20 s' in text and '(ACS)' in text


@pytest.mark.slow_but_with('settings1-719')
@on_standin
@pytest.mark.parametrize('settings, said', [
    ({'nccl_fail': '14:101'}, 'not done after 25 s'),  # an exchange that never ends, in a step
    ({'fail': '1:300'}, '719')])                       # a card that is lost
def test_a_step_that_hangs_or_a_card_that_is_lost(settings, said, tmp_path, monkeypatch, capfd):
    for name, value in standin(**settings).items():
        monkeypatch.setenv(name, value)
    path, began = str(tmp_path / 'report.txt'), time.monotonic()
    limit = 25 if 'nccl_fail' in settings else 200
    code = subprocess.run([sys.executable, '-c', '''
import sys
from theano_mgpu.cli import report
from theano_mgpu.devices.contexts import configured
print(report.take_steps({'equal': report.STEPS['equal']}, configured(), sys.argv[1], %d))
''' % limit, path], timeout=300, stdout=subprocess.PIPE, text=True).stdout.split()[-1]
    text = open(path).read()
    assert code == '1' and time.monotonic() - began < 250
    assert said in ' '.join(text.split()), text
    if 'nccl_fail' in settings:
        assert '= stopped after 25 s; the stacks' in text and 'hread 0x' in text and 'TIME OUT' in text
        assert 'most recent call first' in text


@on_standin
def test_a_driver_that_hangs_at_once(tmp_path):
    path = str(tmp_path / 'report.txt')
    done = subprocess.run([sys.executable, '-c', '''
import argparse, sys
from theano_mgpu.cli import report
report.LISTING = 3
report.STEPS['machine'] = report.STEPS['machine']._replace(seconds=2)
print(report.run(argparse.Namespace(contexts=None, only=['machine', 'nccl'], file=sys.argv[1])))
''', path], env=standin(init=-1), timeout=120, capture_output=True, text=True)
    text = open(path).read()
    assert done.stdout.split()[-1] == '1' and 'the driver hangs' in done.stderr
    assert re.search('machine  TIME OUT', text) and 'in _devices' in text and 'nccl' not in text


def test_what_was_found_is_there_when_it_is_interrupted(tmp_path):
    path = tmp_path / 'report.txt'
    command = [sys.executable, '-m', 'theano_mgpu', 'report', str(path), '--only', 'machine,doctor', '--gpus', '1']
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        while 'doctor   running' not in (path.read_text() if path.exists() else ''):
            time.sleep(.05)
        process.send_signal(signal.SIGHUP)  # a connection that is closed
        assert process.wait(30) == 130 and 'has what was found so far' in process.stderr.read()
    text = path.read_text()
    assert re.search('machine  ok ', text) and '=== machine' in text
    assert re.search('doctor   left out +\\d+  interrupted', text)


def is_running(process):
    try:
        with open('/proc/%s/stat' % process) as file:
            return file.read().rpartition(')')[2].split()[0] != 'Z'  # nobody may have waited for it
    except OSError:
        return False


@pytest.mark.slow
def test_a_command_that_hangs_says_where_and_ends_with_what_it_has_started():
    program = '''
import subprocess, sys, time
child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])
print('child', child.pid)
def waits(): time.sleep(600)
waits()
'''
    began, lines = time.monotonic(), []
    ended = limited.run([sys.executable, '-c', program], 2, show=lines.append)
    assert ended.code is None and time.monotonic() - began < 15
    assert ended.text.startswith('child') and lines[0] == ended.text and 'in waits' in ended.stacks
    end = time.monotonic() + 10
    while is_running(ended.text.split()[1]) and time.monotonic() < end:
        time.sleep(.05)
    assert time.monotonic() < end
    assert limited.run(['no-such-command'], 2) == (127, 'no-such-command cannot be run: No such file or directory', '')
    assert limited.run([sys.executable, '-c', 'print(1); raise SystemExit(3)'], 60) == (3, '1\n', '')


def test_names_are_left_out(monkeypatch):
    monkeypatch.setenv('USER', 'ml')
    monkeypatch.setattr('platform.node', lambda: 'gpu7.lab.example')
    text = without_names('''\
File "/home/ml/my work/train.py", line 3, in html
File "/opt/conda/envs/ml/lib/python3.9/site-packages/theano/gof/vm.py", line 1
PATH=/home/ml/bin:/scratch/project_9/bin:/usr/bin gpu7: NCCL INFO gpu7.lab.example 10.0.3.17<0> GPU-0a1b2c3d-aa-bb
/usr/lib/libcuda.so.1 and/or 1/2 html ml''')
    assert text == '''\
File ".../train.py", line 3, in html
File ".../site-packages/theano/gof/vm.py", line 1
PATH=.../bin:.../bin:/usr/bin HOST: NCCL INFO HOST ADDRESS<0> GPU-UUID
/usr/lib/libcuda.so.1 and/or 1/2 html USER'''


def test_a_user_without_a_name(monkeypatch):
    """`docker run --user 1234` gives a user that has none: KeyError, at the very end."""
    for variable in 'USER', 'LOGNAME', 'LNAME', 'USERNAME':
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr('pwd.getpwuid', lambda number: {}[number])
    assert without_names('all is well') == 'all is well'


def test_a_file_that_cannot_be_written_is_an_error_at_once(tmp_path, capfd):
    from theano_mgpu.cli import main
    assert main(['report', str(tmp_path / 'no' / 'report.txt')]) == 2
    assert 'there is no folder' in capfd.readouterr().err
    assert report.found(limited.Ended(None, '', ''), 9) == 'not done after 9 s; the last line: '
