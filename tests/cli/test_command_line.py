"""Bugs that were found and fixed, each under its symptom: bad input of the commands, and closed streams."""
import importlib
import json
import os
import subprocess
import sys

import theano_mgpu as mgpu
from theano_mgpu.cli import main
from theano_mgpu.utils.python2 import hint

import pytest
from support.processes import python

pytestmark = pytest.mark.verified
EVERYTHING = '>&- 2>&- <&-'


def run(*words, streams='', **variables):
    """Run Python with closed streams, as in ``>&-``; return the CompletedProcess, with text."""
    return subprocess.run(['sh', '-c', 'exec "$@" ' + streams, 'sh', sys.executable, *words], text=True, timeout=300,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL,
                          env=dict(os.environ, **{'THEANO_FLAGS': 'cxx=', **variables}))


@pytest.mark.slow_but_with('command1->&-')
@pytest.mark.parametrize('streams', ['>&-', EVERYTHING])
@pytest.mark.parametrize('command', [['launch', '-n', '2', '--dry-run', __file__], ['config', '--kind', 'cpu']])
def test_a_command_whose_streams_are_closed(command, streams):
    """Four commands ended with "'NoneType' object has no attribute 'flush'"."""
    done = run('-m', 'theano_mgpu', *command, streams=streams)
    assert done.returncode == 0 and 'Traceback' not in done.stderr, done.stderr


@pytest.mark.mpi
def test_a_job_whose_streams_are_closed(tmp_path):
    """The job was done, and launch returned 1. Files that the job opened got the number of a closed stream."""
    script = tmp_path / 'script.py'
    script.write_text('import os; print("text", flush=True)\n'
                      'with open(os.environ["OMPI_COMM_WORLD_RANK"], "w") as file: file.write("done")')
    done = run('-m', 'theano_mgpu', 'launch', '-n', '2', '-m', 'script', streams='>&- 2>&- <&-',
               PYTHONPATH=str(tmp_path))
    try:
        assert done.returncode == 0
        assert [open(name).read() for name in '01'] == ['done'] * 2
    finally:
        for name in '01':
            os.remove(name)


def test_a_script_finds_its_streams_closed_as_under_python(tmp_path):
    script = tmp_path / 'script.py'
    script.write_text('import sys; open(sys.argv[1], "w").write(repr([sys.stdin, sys.stdout, sys.stderr]))')
    plain, ours = tmp_path / 'plain', tmp_path / 'ours'
    run(str(script), str(plain), streams=EVERYTHING)
    assert run('-m', 'theano_mgpu', 'run', str(script), str(ours), streams=EVERYTHING).returncode == 0
    assert ours.read_text() == plain.read_text() == '[None, None, None]'


def test_a_full_disk_is_an_error_and_no_traceback():
    done = run('-m', 'theano_mgpu', 'config', '--kind', 'cpu', streams='>/dev/full')
    assert done.returncode == 1 and done.stderr.endswith('theano-mgpu: error: [Errno 28] No space left on device\n')


NUMBER = 'is not a whole number of at least 1'


@pytest.mark.parametrize('words,message', [
    (['config', '-n', '999999999'], "argument -n/--gpus: '999999999' " + NUMBER),
    (['config', '-n', '9' * 5000], NUMBER), (['launch', '-n', '999999999', __file__], NUMBER),
    (['run', '--gpus', '\u0663', __file__], NUMBER), (['launch', '-n', '2', '--timeout', '9' * 30, __file__], NUMBER),
    (['devices', '--contexts', 'a->opencl999999999:0'], "'opencl999999999:0' in the context map"),
    (['launch', '-n', '2', 'run', 'nowhere.py'], "can't open file 'nowhere.py'"),
    (['launch', '-n', '2', 'run'], 'give the path of a Python script'),
    (['launch', '-n', '2', 'run', '--gpus', '0', __file__], NUMBER),
    (['launch', '-n', '2', '--hosts', '-a,b', __file__], 'argument --hosts: expected one argument')])
def test_bad_arguments_are_found_at_once(words, message, capsys):
    """``config -n 999999999`` took the memory of the machine; an error of ``launch ... run`` came from each process."""
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert message in last and len(last) < 300


@pytest.mark.parametrize('words,message', [
    (['bench', '--json', os.path.dirname(__file__)], 'it is a folder, not a file'),
    (['bench', '--model', 'mlp', '--batch-size', '999999999'], '--batch-size 999999999 with samples of shape'),
    (['launch', '-n', '2', '--hosts=-a,b', __file__], '--hosts -a,b: name each host once')])
def test_bad_input_is_one_sentence_and_exit_code_2(words, message, capsys):
    assert main(words) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith('theano-mgpu: error: ') and message in last


def test_flags_are_checked_before_a_job_starts(monkeypatch, capsys):
    monkeypatch.setenv('THEANO_FLAGS', 'mgpu.timeout=soon')
    assert main(['launch', '-n', '2', __file__]) == 2
    assert 'flag mgpu.timeout=soon is not a number of seconds' in capsys.readouterr().err
    monkeypatch.setenv('THEANO_FLAGS', "contexts='a->cpu")
    assert main(['launch', '-n', '2', __file__]) == 2
    assert 'cannot be read: no closing quotation' in capsys.readouterr().err


def test_a_timeline_in_a_folder_that_does_not_exist():
    """The import of theano_mgpu, and each command, ended with a FileNotFoundError."""
    done = python('-m', 'theano_mgpu', 'devices', flags='cxx=,mgpu.timeline=/nowhere/t.json', expected=2)
    assert done.stdout == '' and 'Traceback' not in done.stderr
    assert 'the timeline /nowhere/t.json could not be written' in done.stderr


def test_a_timeline_of_a_script_that_changes_its_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with mgpu.timeline('t.json'):
        os.chdir('/')
    assert json.loads((tmp_path / 't.json').read_text())['traceEvents']


TWICE = '''
import sys
import theano_mgpu, theano, numpy as np, theano.tensor as T
first = theano_mgpu.init
import importlib
importlib.reload(theano_mgpu)
for removed in (['theano_mgpu'], [name for name in sys.modules if name.partition('.')[0] == 'theano_mgpu']):
    for name in removed:
        del sys.modules[name]
    import theano_mgpu as mgpu
    assert mgpu.init is first, removed
mgpu.init('a->cpu;b->cpu')
x, w = T.matrix(), theano.shared(np.ones(3))
f = mgpu.function([x], T.dot(x, w).sum(), updates={w: w + x.sum(axis=0)})
assert f(np.ones((3, 3))) == 9 and (w.get_value() == 4).all()
for name in [name for name in sys.modules if name.partition('.')[0] in ('theano_mgpu', 'theano')]:
    del sys.modules[name]
import theano_mgpu
'''


def test_a_second_import_uses_the_modules_of_the_first():
    """After the package was removed from sys.modules, its import ended with "This name is already taken"."""
    done = python('-c', TWICE, flags='floatX=float64,cxx=', expected=1)
    assert done.stderr.rstrip().splitlines()[-1].startswith(
        'theano_mgpu.errors.MgpuError: theano_mgpu and Theano were removed from sys.modules'), done.stderr


@pytest.mark.needs_compiler
def test_a_home_directory_that_cannot_be_written():
    """Theano's error did not say which flag names another folder for compiled code."""
    for words in (['-c', 'import theano_mgpu'], ['-m', 'theano_mgpu', 'devices']):
        done = run(*words, HOME='/proc/no_such_folder', THEANO_FLAGS='')
        last = done.stderr.rstrip().splitlines()[-1]
        assert last.endswith('Name another one: THEANO_FLAGS=base_compiledir=/path/to/folder'), done.stderr
    assert done.returncode == 2 and last.startswith('theano-mgpu: error: ')


@pytest.mark.parametrize('command', [['run'], ['launch', '-n', '2'], ['launch', '-n', '2', 'run']],
                         ids=' '.join)
def test_flags_that_exclude_each_other(command, monkeypatch, capsys):
    """A GraphError with a traceback ended the script, in its first step, in each process."""
    monkeypatch.setenv('THEANO_FLAGS', 'mgpu.logical_shards=8,mgpu.micro_batches=2')
    assert main([*command, __file__]) == 2
    out, err = capsys.readouterr()
    assert err.startswith('theano-mgpu: error: mgpu.micro_batches=2 and mgpu.logical_shards=8: '), err
    assert err.endswith('Leave out one of the two\n') and err.count('\n') == 1 and not out


PYTHON_2 = {'print': 'print "x"', 'print a name': 'if 1: print os', 'exec': 'exec "x"', 'exec in': 'exec code in names',
            'except': 'try:\n    pass\nexcept ValueError, error:\n    pass',
            'except several': 'try:\n    pass\nexcept (IOError, os.error), error:\n    pass', 'backticks': 'x = `1`',
            'octal': 'x = 0777', 'unequal': 'x = 1 <> 2', 'raise': 'raise ValueError, "x"', 'long': 'x = 10L',
            'hexadecimal long': 'x = 0xFFL', 'raw unicode': "x = ur'a'", 'tuple': 'def f(a, (b, c)): pass',
            'lambda of a tuple': 'x = lambda (a, b): a', 'tabs': 'if 1:\n        x = 1\n\ty = 2\n',
            'tabs and print': 'if 1:\n        x = 1\n\tprint x\n'}
OTHERS = {'paren': 'f("<>"\nx = 1\n', 'target': '1 = x', 'colon': 'if x\n  pass',
          'literal with a backtick': 'x = "`" +\n',
          'open text': '"""see `f`', 'quote in a literal': "x = 'it's `f`'", 'default': 'def f(a=(1, 2)\n  pass\n',
          'tabs': 'if 1:\n    x = 1\n\ty = 2\n', 'raise': 'raise ValueError("a, b" x)', 'comment': 'x = ) # `a` <> b',
          'except': 'try:\n    pass\nexcept (A, B) as e\n    pass', 'lambda': 'f(lambda x: (x, 1) y)',
          'number': 'x = 08', 'small number': 'x = 1e-05 y', 'keyword': 'f(a=1, 2)',
          'return': 'return 1', 'quotes': 'x = \u201ca\u201d'}


@pytest.mark.parametrize('text, is_old', [(text, True) for text in PYTHON_2.values()] + [
    (text, False) for text in OTHERS.values()], ids=[*PYTHON_2, *('no ' + name for name in OTHERS)])
def test_a_script_of_python_2_is_named_as_such(text, is_old, tmp_path):
    """There was a SyntaxError alone."""
    script = tmp_path / 'train.py'
    script.write_text(text)
    with pytest.raises(SystemExit) as caught:
        main(['launch', '-n', '2', *['run'] * (is_old and len(text) % 2), str(script)])
    lines = str(caught.value).splitlines()
    assert lines[-1].startswith('theano-mgpu: ') == is_old
    assert not is_old or '%s is written for Python 2' % script in lines[-1] and '-m lib2to3 -w %s' % script in lines[-1]
    assert ('expand' in lines[-1]) == (is_old and '\t' in text)


@pytest.mark.parametrize('text', ['print "x"', 'x = unicode(1)', 'import cPickle',
                                  'import sys\nprint >>sys.stderr, "x"',
                                  'from itertools import izip', '{}.iteritems()'])
def test_a_module_of_python_2_is_named_as_such(text, tmp_path, monkeypatch):
    (tmp_path / 'old_helper.py').write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(Exception) as caught:
        importlib.import_module('old_helper')
    assert hint(caught.value).startswith('%s is written for Python 2' % (tmp_path / 'old_helper.py'))
    with pytest.raises(NameError) as caught:
        exec('unknown', {})
    assert not hint(caught.value)


def test_a_run_names_a_module_of_python_2(tmp_path):
    (tmp_path / 'train.py').write_text('import helper')
    (tmp_path / 'helper.py').write_text('print "x"')
    done = run('-m', 'theano_mgpu', 'run', str(tmp_path / 'train.py'))
    assert done.returncode == 1 and '\nSyntaxError: Missing parentheses' in done.stderr
    assert done.stderr.count('%s is written for Python 2' % (tmp_path / 'helper.py')) == 1


@pytest.mark.mpi
@pytest.mark.slow
def test_a_module_of_python_2_under_launch_is_named_as_such(tmp_path):
    (tmp_path / 'train.py').write_text('import theano\nimport helper')
    (tmp_path / 'helper.py').write_text('print "x"')
    for words in ['run'], []:
        done = run('-m', 'theano_mgpu', 'launch', '-n', '2', *words, str(tmp_path / 'train.py'))
        assert done.returncode and done.stderr.count('helper.py is written for Python 2') == 1, done.stderr
