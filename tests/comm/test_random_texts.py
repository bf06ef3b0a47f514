"""Parsers of texts from users and schedulers, on random texts: a value, or an error that names the text."""
import argparse
import os
import tempfile

from theano_mgpu import config
from theano_mgpu.cli import job_command
from theano_mgpu.cli.shared_arguments import devices, positive
from theano_mgpu.comm import mpi_library
from theano_mgpu.comm.allocation import DEFAULT_HOSTFILE, allocation
from theano_mgpu.devices.context_map import parse_context_map
from theano_mgpu.errors import MgpuError
from theano_mgpu.utils import flag_text, mpi_environment

import pytest
from cost_model import parse_network
from hypothesis import example, given
from hypothesis import strategies as st
from support.strategies import examples
from test_clusters import BATCH, STEP
from theano.configparser import parse_config_string

FEW = examples(60)
ANY = st.text(st.characters(blacklist_categories=('Cs',), blacklist_characters='\0'), max_size=40)
# Pieces of valid texts, in any order, and numbers that are too large.
PIECES = st.lists(st.sampled_from(
    ['0', '1', '2', '9' * 30, '9' * 5000, '999999999', '-1', '1.5', '1e9', '\u0663', '\xb2', '(x', ')',
     '(x999999999)', ',', ';', ':', '=', '->', ' ', '\t', '\n', '#', '"', "'", '\\', 'a', 'b', 'slots=',
     'slots', 'max_slots=2', 'dev0', 'cuda', 'cuda0', 'opencl', 'cpu', '-o', '+', 'pcie4', 'nan', 'inf', '[',
     ']']), max_size=8).map(''.join)
TEXT = st.one_of(ANY, PIECES)
PATHS = st.lists(st.sampled_from(['/tmp/', "it's", ' ', ',', '"b"', '\\', '#', '-DX=', '$HOME', '`', '%(USER)s', ';']),
                 max_size=6).map(''.join)


@pytest.fixture
def environment(monkeypatch):
    """Return a function that sets variables, in an environment that knows of no job."""
    for name in list(os.environ):
        if name.startswith(('SLURM', 'PMI', 'OMPI_', 'MPI_')):
            monkeypatch.delenv(name)
    monkeypatch.setattr(job_command, 'find_mpirun', lambda: 'mpirun')
    monkeypatch.setattr(job_command, 'slurm_type', lambda: None)
    monkeypatch.setattr(mpi_library, 'components', lambda mpirun: '')

    def use(variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
    return use


def value_or_error(parse, *names):
    """Call a parser; check that its error, if it raises one, is a short line with one of some names."""
    try:
        return parse()
    except (MgpuError, argparse.ArgumentTypeError) as error:
        text = str(error)
        assert len(text.splitlines()) == 1 and len(text) < 600, text
        assert not names or any(name in text for name in names), text
        return None


def start_of_job():
    found = allocation()
    assert found is None or found.tasks and min(found.tasks) >= 1 and len(found.tasks) < 200000
    return found and job_command.choose_start(None, None, found)


@pytest.mark.slow_with('SLURM_JOB_NODELIST')
@pytest.mark.parametrize('variable', [
    'SLURM_JOB_NODELIST', 'SLURM_JOB_NUM_NODES', 'SLURM_NTASKS', 'SLURM_TASKS_PER_NODE', 'SLURM_JOB_CPUS_PER_NODE',
    'SLURM_CPUS_PER_TASK'])
def test_variables_of_an_allocation(variable, environment):
    @FEW
    @given(TEXT)
    def check(text):
        environment(dict(BATCH, **{variable: text}))
        value_or_error(start_of_job, variable, 'cannot start processes')
    check()


def test_files_of_hosts(environment):
    @FEW
    @given(st.one_of(st.binary(max_size=40), TEXT.map(str.encode)))
    def check(content):
        with tempfile.NamedTemporaryFile() as file:
            file.write(content)
            file.flush()
            environment({DEFAULT_HOSTFILE: file.name})
            value_or_error(start_of_job, DEFAULT_HOSTFILE)
    check()


@pytest.mark.parametrize('path', ['/dev/zero', '/', 'no\nfile', ''])
def test_paths_of_files_of_hosts(path, environment):
    """A device was read for ever."""
    environment({DEFAULT_HOSTFILE: path})
    assert value_or_error(start_of_job, DEFAULT_HOSTFILE) is None


@pytest.mark.parametrize('variable', [
    'SLURM_STEP_ID', 'SLURM_STEP_NUM_TASKS', 'SLURM_STEP_TASKS_PER_NODE', 'SLURM_PROCID', 'SLURM_NODEID', 'SLURM_GTIDS',
    'OMPI_COMM_WORLD_RANK', 'PMI_SIZE'])
def test_variables_of_a_rank(variable, environment):
    @FEW
    @given(TEXT)
    def check(text):
        environment(dict(STEP, OMPI_COMM_WORLD_SIZE='2', PMI_RANK='1', **{variable: text}))
        value_or_error(lambda: (mpi_environment.rank(), mpi_environment.size(), mpi_environment.local_rank(),
                                mpi_environment.local_size()), variable)
    check()


@FEW
@given(TEXT)
def test_flags(text):
    """A quote that was not closed ended the import with "No closing quotation"."""
    value_or_error(lambda: flag_text.parse_flags(text), 'THEANO_FLAGS')
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv('THEANO_FLAGS', 'mgpu.timeout=' + text)
        value_or_error(lambda: flag_text.own_flag('mgpu.timeout'), 'mgpu.timeout', 'THEANO_FLAGS')


@FEW
@given(st.dictionaries(TEXT, st.one_of(TEXT, PATHS), max_size=4))
@example({'base_compiledir': "/tmp/it's", 'gcc.cxxflags': '-DX=\'a,b\' -DY="c d" -DZ=\\"e\\"', 'mgpu.ledger': 'a#b'})
def test_flags_are_read_as_they_were_written(flags_):
    """A quote in a value was lost, or ended in "No closing quotation", and what came after # was no flag any more."""
    written = value_or_error(lambda: flag_text.join_flags(flags_), 'THEANO_FLAGS cannot have all of these flags')
    if written is None:
        assert any(name != name.lstrip() or '=' in name or value != value.rstrip() for name, value in flags_.items())
    else:
        assert parse_config_string(written) == flag_text.parse_flags(written) == flags_


@FEW
@given(st.binary(max_size=40).map(lambda content: b'[gcc]\ncxxflags = ' + content + b'\n'))
@example(b'[gcc]\ncxxflags = -O2\n  -g\n\n  -DX=\'a\'\n[global]\ncontexts = a->cpu;\n  b->cpu\n')
def test_a_configuration_file_is_converted_to_one_that_reads_alike(content):
    """The further lines of a value were written without the blanks that they begin with, and the file was refused."""
    with tempfile.NamedTemporaryFile() as file:
        def read(content):
            with open(file.name, 'wb') as new:
                new.write(content)
            return value_or_error(lambda: flag_text.read_theanorc(file.name))
        old = read(content)
        if old is not None:
            contexts = old.pop('contexts', 'a->cpu')
            new = read(config.theanorc_text(contexts, more=old).encode())
            assert new == {**old, 'device': 'cpu', 'floatx': 'float32', 'contexts': contexts, 'mgpu.executor': 'auto'}


@FEW
@given(st.one_of(st.binary(max_size=40), TEXT.map(lambda text: b'[global]\n' + text.encode())))
@example(b'[global]\n' + b'9' * 5000)
def test_configuration_files(content):
    with tempfile.NamedTemporaryFile() as file, pytest.MonkeyPatch.context() as patch:
        file.write(content)
        file.flush()
        patch.setenv('THEANORC', file.name)
        value_or_error(flag_text.read_theanorc, file.name)


@pytest.mark.parametrize('parse,names', [
    (lambda text: job_command.parse_hosts(text, 3), ['--hosts']), (parse_context_map, []), (positive, ['whole number']),
    (devices, ['whole number']), (parse_network, [])], ids=['hosts', 'contexts', 'number', 'devices', 'links'])
def test_options(parse, names):
    @FEW
    @given(TEXT)
    def check(text):
        value_or_error(lambda: parse(text), *names)
    check()


@pytest.mark.parametrize('text', ['-oProxyCommand=touch x', '-a,b,c', 'a b,c,d', 'a;b,c,d', 'a:1,b:,c:1', 'a,,b', ''])
def test_no_host_is_an_option_or_a_command(text):
    with pytest.raises(MgpuError, match='--hosts .*name each host once'):
        job_command.parse_hosts(text, 3)


@pytest.mark.parametrize('line', ['-oProxyCommand=x', '-o slots=2', 'a;b', 'a slots=', 'a:x', 'a slots=0'])
def test_no_host_of_a_list_is_an_option_or_a_command(line, environment, tmp_path):
    (tmp_path / 'hosts').write_text('node1\n%s\n' % line)
    environment({DEFAULT_HOSTFILE: str(tmp_path / 'hosts')})
    with pytest.raises(MgpuError, match='in the list of the hosts of this job .*%s.* is no host' % DEFAULT_HOSTFILE):
        allocation()
