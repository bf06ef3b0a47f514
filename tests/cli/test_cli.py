"""The command line: its output and its exit codes."""
import configparser
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import theano_mgpu as mgpu
from theano_mgpu.cli import main
from theano_mgpu.cli.doctor import host_checks
from theano_mgpu.devices import discovery
from theano_mgpu.devices.context_map import default_map, parse_context_map
from theano_mgpu.utils import flag_text

import pytest
import theano
from cli_fixtures import *  # noqa: F403  the fixtures
from support.processes import python
from support.search_path import search_path

ROOT = Path(__file__).resolve().parents[2]


# --- main ----------------------------------------------------------------------------------------

def test_help_teaches(capsys):
    with pytest.raises(SystemExit) as caught:
        main(['--help'])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for words in ('devices', 'doctor', 'config', 'theano-mgpu config -n 2 --write', "A context is Theano's name"):
        assert words in text


def test_version(capsys):
    with pytest.raises(SystemExit) as caught:
        main(['--version'])
    assert caught.value.code == 0
    assert capsys.readouterr().out == 'theano-mgpu %s\n' % mgpu.__version__


@pytest.mark.parametrize('args,message', [
    (['nope'], 'theano-mgpu: error: there is no command nope; there are: devices, doctor, '),
    (['doctr'], 'theano-mgpu: error: there is no command doctr; the nearest is doctor'),
    ([__file__, '3'], 'theano-mgpu: error: to run a script: theano-mgpu run ' + __file__),
    (['run', '--verfy', 'x.py'], 'theano-mgpu run: error: there is no option --verfy; the nearest is --verify'),
    (['run', '--gpsu=2', 'x.py'], 'theano-mgpu run: error: there is no option --gpsu; the nearest is --gpus'),
    (['--verify', 'run', 'x.py'], 'theano-mgpu: error: there is no option --verify; the nearest is --version'),
    (['predict', 'a', 'b', 'c', 'd'], 'theano-mgpu predict: error: unrecognized arguments: d'),
    (['config', '-n', '0'], "'0' is not a whole number of at least 1"),
    (['devices', '--gpus', '0'], "'0' is not a whole number of at least 1; for the first alone: --gpus dev0"),
    (['config', '--kind', 'gpu'], "invalid choice: 'gpu'"),
    (['config', '--executor', 'mpirun'], "invalid choice: 'mpirun'"),
    (['devices', '--contexts', 'a-cpu'], "malformed entry 'a-cpu' in the context map"),
    (['devices', '--contexts', 'a->gpu0'], "'gpu0' in the context map 'a->gpu0' is no device"),
])
def test_bad_arguments_exit_with_2(capsys, args, message):
    with pytest.raises(SystemExit) as caught:
        main(args)
    assert caught.value.code == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.out == ''


def test_a_reader_that_has_enough_sees_no_traceback():
    env = dict(os.environ, PYTHONPATH=search_path(), THEANO_FLAGS='')
    process = subprocess.Popen([sys.executable, '-m', 'theano_mgpu', 'config', '-n', '3', '--kind', 'cpu'], env=env,
                               text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    errors = process.stderr.read()  # without a compiler Theano prints a warning
    assert 'Traceback' not in errors and 'BrokenPipe' not in errors
    assert process.wait() == 141
    process.stderr.close()


@pytest.mark.slow_but_with('rnu x.py')
@pytest.mark.parametrize('words', ['--help', 'run --help', 'rnu x.py', 'run --gpsu 2 x.py', 'run nowhere.py',
                                   'predict nowhere.h5 x.npy y.npy', 'bench --model nowhere.h5'])
def test_help_and_mistakes_import_neither_theano_nor_keras(words):
    code = ('import sys; sys.argv = ["theano-mgpu", *sys.argv[1:]]\nfrom theano_mgpu.cli import main\n'
            'try: sys.exit(main())\nfinally: print(sys.modules.keys() & {"theano", "keras", "scipy"}, file=sys.stderr)')
    done = python('-c', code, *words.split(), expected=0 if '--help' in words else 2)
    assert done.stderr.endswith('set()\n')


# --- devices -------------------------------------------------------------------------------------

def test_devices_are_listed_with_their_names_and_memory(capsys, opencl):
    assert main(['devices', '--contexts', 'cli_x->%s;cli_host->cpu' % opencl[-1]]) == 0
    captured = capsys.readouterr()
    assert captured.err == ''  # no "Mapped name ..."
    header, first, second = captured.out.splitlines()
    assert header.split() == ['CONTEXT', 'DEVICE', 'KIND', 'TYPE', 'NAME', 'FREE', 'TOTAL', 'BUSY']
    name = theano.gpuarray.type.get_context('cli_x').devname
    name = name.decode() if isinstance(name, bytes) else name
    column = header.index('NAME')
    assert first[:column].split() == ['cli_x', opencl[-1], 'opencl', discovery.type_of(opencl[-1])]
    assert first[column:].startswith(name.strip())
    assert second[:column].split() == ['cli_host', 'cpu', 'cpu', 'CPU']
    assert second[column:].startswith(discovery.status('cpu', None).name)
    # Numbers end where their titles end.
    for title in ('FREE', 'TOTAL'):
        end = header.index(title) + len(title)
        assert [line[end - 4:end] for line in (first, second)] == [' GiB'] * 2 and first[end:end + 2] == '  '
    assert first.endswith('  -') and len(first) == len(header)


def test_a_device_that_cannot_be_opened_is_a_row_and_exit_code_1(capsys, opencl):
    platform = opencl[0].partition(':')[0]
    assert main(['devices', '--contexts', 'cli_bad->%s:77;cli_good->%s' % (platform, opencl[0])]) == 1
    captured = capsys.readouterr()
    bad, good = captured.out.splitlines()[1:]
    assert bad.split(None, 4) == ['cli_bad', platform + ':77', 'opencl', '-',
                                  'cannot be opened: Device ID out of range']
    assert good.startswith('cli_good') and 'GiB' in good
    assert 'theano-mgpu: error: context cli_bad->%s:77 could not be opened' % platform in captured.err
    assert 'There is: ' + ', '.join(opencl) in captured.err


def test_devices_as_json(capsys, opencl):
    platform = opencl[0].partition(':')[0]
    assert main(['devices', '--json', '--contexts', 'cli_bad->%s:77;cli_good->%s' % (platform, opencl[0])]) == 1
    bad, good = json.loads(capsys.readouterr().out)
    assert set(bad) == set(good) == {'context', 'device', 'kind', 'type', 'name', 'free_bytes', 'total_bytes',
                                     'utilisation_percent', 'error'}
    assert bad['name'] is bad['total_bytes'] is None and 'Device ID out of range' in bad['error']
    assert (good['context'], good['device'], good['kind'], good['error']) == ('cli_good', opencl[0], 'opencl', None)
    assert good['total_bytes'] == theano.gpuarray.type.get_context('cli_good').total_gmem
    assert 2**20 < good['free_bytes'] <= good['total_bytes'] and good['utilisation_percent'] is None


@pytest.mark.parametrize('words, names', [
    (['--gpus', '1'], 'a'), (['--gpus', 'cli_b'], 'b'), (['--gpus', '1,cli_a'], 'ba'), (['--contexts', '1'], 'a')])
def test_contexts_are_chosen_by_number_or_name(words, names, capsys, cpu_only):
    """The commands `bench` and `config` took a number after --contexts."""
    assert main(['devices', *words]) == 0
    captured = capsys.readouterr()
    assert [line.split()[0] for line in captured.out.splitlines()[1:]] == ['cli_' + name for name in names]
    assert ('a number of contexts is --gpus 1 now' in captured.err) == (words[0] == '--contexts')


def test_contexts_mean_the_same_in_each_command(capsys):
    texts = set()
    for name in 'devices', 'config', 'run', 'launch', 'predict', 'bench':
        with pytest.raises(SystemExit):
            main([name, '--help'])
        _, _, text = capsys.readouterr().out.partition('  --contexts MAP ')
        text = text.partition('N contexts on the CPU')[0]
        text = re.sub(r'-n( N\|LIST)?, ', '', text)  # since Python 3.13: -n, --gpus
        texts.add(' '.join(text.split()))
    assert len(texts) == 1 and '--gpus N|LIST how many' in texts.pop()


def test_devices_of_the_flags(capsys, cpu_only):
    assert main(['devices']) == 0
    assert [line.split()[:3] for line in capsys.readouterr().out.splitlines()[1:]] == [
        ['cli_a', 'cpu', 'cpu'], ['cli_b', 'cpu', 'cpu']]


def test_utilisation_is_shown_in_percent(capsys, cpu_only, monkeypatch):
    status = discovery.DeviceStatus('Tesla', 3 * 2**29, 2**31, 7)
    monkeypatch.setattr(discovery, 'status', lambda device, context: status)
    assert main(['devices']) == 0
    header, line, _ = capsys.readouterr().out.splitlines()
    assert line.split() == 'cli_a cpu cpu CPU Tesla 1.5 GiB 2.0 GiB 7 %'.split() and len(line) == len(header)


def test_a_driver_that_fails_when_asked_is_a_row_too(capsys, cpu_only, monkeypatch):
    def status(device, context):
        raise RuntimeError('NVML: not supported')
    monkeypatch.setattr(discovery, 'status', status)
    assert main(['devices']) == 1
    captured = capsys.readouterr()
    assert 'cannot be opened: NVML: not supported' in captured.out and 'NVML' in captured.err


def test_a_malformed_map_in_the_flags_is_one_message(capsys, monkeypatch):
    monkeypatch.setenv('THEANO_FLAGS', 'contexts=dev0-cuda0')
    assert main(['devices']) == 2
    captured = capsys.readouterr()
    assert captured.out == ''
    assert captured.err.startswith("theano-mgpu: error: malformed entry 'dev0-cuda0' in the context map")
    assert len(captured.err.splitlines()) == 1


# --- config --------------------------------------------------------------------------------------

def written(text):
    parser = configparser.RawConfigParser()
    parser.read_string(text)
    return parser


def test_config_for_another_machine(capsys, cpu_only):
    assert main(['config', '-n', '4', '--kind', 'cuda']) == 0
    captured = capsys.readouterr()
    assert written(captured.out)['global']['contexts'] == 'dev0->cuda0;dev1->cuda1;dev2->cuda2;dev3->cuda3'
    assert captured.err == 'theano-mgpu: note: not on this machine: cuda0, cuda1, cuda2, cuda3\n'


def test_config_of_this_machine_is_what_is_read_back(capsys, monkeypatch, tmp_path):
    assert main(['config', '--floatx', 'float64', '--executor', 'serial']) == 0
    captured = capsys.readouterr()
    assert captured.err == ''
    path = tmp_path / 'theanorc'
    path.write_text(captured.out)
    monkeypatch.setenv('THEANORC', str(path))
    monkeypatch.setenv('THEANO_FLAGS', '')
    found = discovery.discover_best()
    assert flag_text.flag('contexts', '') == ('' if found == ['cpu'] else default_map(found))
    assert flag_text.flag('floatX') == 'float64' and flag_text.own_flag('mgpu.executor') == 'serial'
    assert (host_checks.source_of_map() == 'from %s' % path) == (found != ['cpu'])


@pytest.mark.parametrize('args,expected', [
    ([], None),
    (['-n', '3'], 'dev0->cpu;dev1->cpu;dev2->cpu'),
    (['-n', '2', '--kind', 'opencl'], 'dev0->opencl0:0;dev1->opencl0:1'),
    (['--kind', 'cuda'], 'dev0->cuda0'),
])
def test_config_on_a_machine_without_gpu(capsys, cpu_only, args, expected):
    assert main(['config'] + args) == 0
    parser = written(capsys.readouterr().out)
    assert parser['global'].get('contexts') == expected  # each core, without a map
    assert parser['global']['device'] == 'cpu' and parser['global']['floatX'] == 'float32'
    assert parser['mgpu']['executor'] == 'auto'


def test_config_converts_an_old_file(capsys, cpu_only, monkeypatch, tmp_path):
    """Flags of Theano 0.x, of 1.0, and such as neither knows; a word on each that is not kept."""
    old, new = tmp_path / 'old', tmp_path / 'new'
    old.write_text('[global]\ndevice = cuda1\nfloatX = float32\nOpenMP = True\nconfig.allow_gc = True\n'
                   '[lib]\ncnmem = 0.5\n[nvcc]\nfastmath = True\n[blas]\nldflags =\n[mgpu]\nexecutor = serial\n'
                   '[dnn]\nconv.workmem = small\nconv.algo_bwd_data = "none"\n')
    assert main(['config', '--from', str(old)]) == 0
    captured = capsys.readouterr()
    new.write_text(captured.out)
    assert flag_text.read_theanorc(str(new)) == {
        'device': 'cpu', 'floatx': 'float32', 'openmp': 'True', 'mgpu.executor': 'serial',
        'gpuarray.preallocate': '0.5', 'blas.ldflags': '', 'dnn.conv.algo_fwd': 'small'}
    for said in ('lib.cnmem=0.5 as gpuarray.preallocate=0.5', 'nvcc.fastmath=True not at all (no code is compiled by',
                 'dnn.conv.workmem=small as dnn.conv.algo_fwd=small', 'config.allow_gc = True is left out: Theano has',
                 'dnn.conv.algo_bwd_data = "none" is left out: Invalid value (""none"")',
                 'device = cuda1 is left to the contexts, which are the cores of the CPU'):
        assert said in captured.err
    assert main(['config', '--from', str(new), '-n', '2', '--floatx', 'float64']) == 0
    captured = capsys.readouterr()
    again = written(captured.out)
    assert not captured.err and again['global']['contexts'] == 'dev0->cpu;dev1->cpu'
    assert again['global']['floatX'] == 'float64' and again['gpuarray']['preallocate'] == '0.5'
    code = 'import theano_mgpu, theano; c = theano.config; print(c.floatX, c.openmp, c.dnn.conv.algo_fwd)'
    assert python('-c', code, THEANORC=str(new)).stdout == 'float32 True small\n'


def test_config_writes_a_file_and_keeps_the_old_one(capsys, cpu_only, monkeypatch, tmp_path):
    path = tmp_path / 'theanorc'
    monkeypatch.setenv('THEANORC', str(path))
    assert main(['config', '--write', '--contexts', 'a->cpu']) == 0
    first = path.read_text()
    assert written(first)['global']['contexts'] == 'a->cpu'
    assert capsys.readouterr() == ('', 'theano-mgpu: note: %s is written\n' % path)
    assert main(['config', '--write', '-n', '2']) == 0
    copy, = tmp_path.glob('theanorc.*')
    assert copy.read_text() == first and 'contexts = dev0->cpu;dev1->cpu\n' in path.read_text()
    assert '; %s is a copy of the old file' % copy in capsys.readouterr().err


# --- flags ---------------------------------------------------------------------------------------

def test_flags_are_listed(capsys, monkeypatch):
    monkeypatch.setenv('THEANO_FLAGS', 'mgpu.timeout=5')
    assert main(['flags']) == 0
    lines = [line.split()[:3] for line in capsys.readouterr().out.splitlines()]
    assert ['mgpu.timeout', '5', '600'] in lines and len(lines) == 1 + len(flag_text.OWN_FLAGS)


def test_the_example_is_read_as_it_says(monkeypatch):
    path = ROOT / 'theanorc.example'
    if not path.exists():
        pytest.skip('not beside these tests')
    monkeypatch.setenv('THEANORC', str(path))
    monkeypatch.setenv('THEANO_FLAGS', '')
    assert mgpu.Context('dev1', 'cuda1', 'cuda') == parse_context_map(flag_text.flag('contexts'))[1]
    assert flag_text.own_flag('mgpu.executor') == 'auto'
    assert (flag_text.flag('floatX'), flag_text.flag('blas.ldflags'), flag_text.flag('device')) == (
        'float32', '-lopenblas', 'cpu')
    code = "import theano_mgpu, theano; c = theano.config; print(c.floatX, c.blas.ldflags, c.mgpu.executor)"
    assert python('-c', code).stdout == 'float32 -lopenblas auto\n'
