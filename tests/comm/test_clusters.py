"""Clusters: the rank of each launcher, the hosts of an allocation, and the command that starts a job there."""
import itertools
import os
import re
import shlex
import sys

from theano_mgpu.cli import main
from theano_mgpu.comm import mpi_library
from theano_mgpu.comm.allocation import allocation
from theano_mgpu.errors import MgpuError
from theano_mgpu.utils import mpi_environment, rank_process

import numpy as np
import pytest
from support.launch import INTERPRETED, JOBS, alone, arrays

OPEN_MPI, MPICH = 'Open MPI v4.1.4, package: Debian OpenMPI', 'MPICH Version:\t4.0.2\nMPICH Release date: 2022'

# Variables that Slurm sets for task 2 of three on two nodes, for a batch script, and for both.
IN_BOTH = {'SLURM_JOB_ID': '7', 'SLURM_JOB_NODELIST': 'n[1-2]', 'SLURM_JOB_NUM_NODES': '2', 'SLURM_NTASKS': '3',
           'SLURM_TASKS_PER_NODE': '2,1', 'SLURM_JOB_CPUS_PER_NODE': '4(x2)'}
STEP = dict(IN_BOTH, SLURM_STEP_ID='0', SLURM_STEP_NUM_TASKS='3', SLURM_STEP_TASKS_PER_NODE='2,1', SLURM_PROCID='2',
            SLURM_LOCALID='0', SLURM_NODEID='1', SLURM_GTIDS='2')
BATCH = dict(IN_BOTH, SLURM_PROCID='0', SLURM_LOCALID='0', SLURM_NODEID='0', SLURM_GTIDS='0')
MPIRUN = dict(zip(mpi_environment.MPIRUN.variables, '5812'))
PMI = {'PMI_RANK': '5', 'PMI_SIZE': '8'}


@pytest.fixture
def environ(monkeypatch):
    """Return a function that sets variables, in an environment that knows of no job."""
    for name in list(os.environ):
        if name.startswith(('SLURM', 'PMI', 'OMPI_', 'MPI_', 'OMP_NUM_THREADS')):
            monkeypatch.delenv(name)

    def use(**variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, str(value))
    return use


@pytest.mark.parametrize('variables,expected', [
    (MPIRUN, ("Open MPI's mpirun", 5, 8, 1, 2)),
    (dict(PMI, MPI_LOCALRANKID='1', MPI_LOCALNRANKS='4'), ('mpiexec of MPICH or Intel MPI', 5, 8, 1, 4)),
    (PMI, (None, 0, 1, 0, 1)),
    (dict(STEP, PMIX_RANK='2'), ("Slurm's srun", 2, 3, 0, 1)),
    (dict(STEP, PMI_RANK='2', PMI_SIZE='3'), ("Slurm's srun", 2, 3, 0, 1)),
    (dict(STEP, SLURM_NODEID='0', SLURM_PROCID='1', SLURM_LOCALID='1', SLURM_GTIDS='0,1'),
     ("Slurm's srun", 1, 3, 1, 2)),
    # mpirun and mpiexec in an allocation of Slurm, whose daemons srun has started
    (dict(STEP, **MPIRUN), ("Open MPI's mpirun", 5, 8, 1, 2)),
    (dict(BATCH, **MPIRUN), ("Open MPI's mpirun", 5, 8, 1, 2)),
    (dict(STEP, **PMI, MPI_LOCALRANKID='1', MPI_LOCALNRANKS='4'), ('mpiexec of MPICH or Intel MPI', 5, 8, 1, 4)),
    (BATCH, (None, 0, 1, 0, 1)), (IN_BOTH, (None, 0, 1, 0, 1)), ({}, (None, 0, 1, 0, 1)),
    (dict(BATCH, SLURM_STEP_ID='4294967291', SLURM_STEP_NUM_TASKS='1'), (None, 0, 1, 0, 1)),
    (dict(BATCH, SLURM_STEP_ID='batch'), (None, 0, 1, 0, 1)),
    # a batch script that was submitted from within the step
    (dict(STEP, **BATCH), (None, 0, 1, 0, 1)),
    (dict(STEP, SLURM_NODEID='2'), (None, 0, 1, 0, 1))])
def test_the_rank_of_each_launcher(variables, expected, environ):
    environ(**variables)
    launcher = mpi_environment.launcher()
    assert (launcher and launcher.name, mpi_environment.rank(), mpi_environment.size(), mpi_environment.local_rank(),
            mpi_environment.local_size()) == expected


@pytest.mark.parametrize('library,offered,expected', [
    (OPEN_MPI, 'MPI plugin types are...\n\tpmi2\n\tpmix\nspecific pmix plugin versions available: pmix_v4', 'pmix'),
    (OPEN_MPI, 'srun: MPI types are...\nsrun: pmix_v3\nsrun: pmi2', 'pmix_v3'), (OPEN_MPI, 'none pmi2', None),
    (MPICH, 'none pmi2 pmix', 'pmi2'), (MPICH, 'none', None), ('', 'pmix pmi2', None)])
def test_the_type_for_srun(library, offered, expected, monkeypatch):
    monkeypatch.setattr(mpi_library, 'components', lambda mpirun: 'MCA pmix: ext3x (MCA v2.1.0)')
    assert mpi_library.type_for_srun(library, offered) == expected


def test_pmi2_for_an_open_mpi_that_speaks_it(monkeypatch):
    monkeypatch.setattr(mpi_library, 'components', lambda mpirun: 'MCA pmix: s2 (MCA v2.1.0)')
    assert mpi_library.type_for_srun(OPEN_MPI, 'none pmi2') == 'pmi2'


@pytest.mark.parametrize('variables,library,can', [
    (dict(STEP, PMIX_RANK='2'), OPEN_MPI, True), (STEP, OPEN_MPI, False), (STEP, MPICH, False),
    (dict(STEP, PMI_RANK='2'), MPICH, True), (dict(STEP, PMI_RANK='2'), OPEN_MPI, False),
    (MPIRUN, OPEN_MPI, True), (MPIRUN, MPICH, False), (MPIRUN, 'Intel(R) MPI Library 2021.9 for Linux* OS', False),
    (BATCH, OPEN_MPI, True), (dict(STEP, SLURM_STEP_NUM_TASKS='1', SLURM_STEP_TASKS_PER_NODE='0,1'), OPEN_MPI, True)])
def test_what_a_library_cannot_know(variables, library, can, environ, monkeypatch):
    monkeypatch.setattr(mpi_library, 'components', lambda mpirun: '')
    environ(**variables)
    assert mpi_library.can_find_ranks(library) == can


@pytest.mark.parametrize('launcher, library, size, said, remedy', [
    ('MPIRUN', MPICH, 1, "Open MPI's mpirun started 4 processes, but the MPI library of mpi4py, MPICH", 'mpiexec'),
    ('MPIRUN', OPEN_MPI, None, 'cannot connect them: each would train by itself. Start them', '--no-binary=mpi4py'),
    ('HYDRA', OPEN_MPI, 1, 'finds 1: each would train by itself', "Open MPI's mpirun or theano-mgpu launch; or"),
    ('HYDRA', MPICH, 2, 'finds 2. Start them with', 'the same installation'),
    ('SRUN', OPEN_MPI, 1, "Slurm's srun with --mpi=cray started 4", 'Use srun --mpi=pmix'),
    ('SRUN', MPICH, None, 'cannot connect them: each would train by itself. Use', 'srun --mpi=pmi2 '),
    (None, MPICH, 4, ') finds 4 processes, but no variable gives the rank of', 'Use another launcher')])
def test_a_launcher_of_another_mpi(launcher, library, size, said, remedy, monkeypatch):
    """The error says who counts how many, and how to start the processes together."""
    monkeypatch.setattr(mpi_environment, 'launcher', lambda: launcher and getattr(mpi_environment, launcher))
    monkeypatch.setattr(mpi_environment, 'size', lambda: 4)
    monkeypatch.setenv(mpi_library.MPI_OF_SRUN, 'cray')
    text = mpi_library.mismatch(library, size)
    assert said in text and remedy in text


def test_ranks_without_a_known_launcher(environ):
    assert re.match(r'MPI \(Open MPI v4.1.4\) finds 2 processes, but no variable gives the rank of this one. Known '
                    'are .*OMPI_COMM_WORLD_RANK, .*SLURM_PROCID', mpi_library.mismatch(OPEN_MPI, 2))


def hosts_file(path, *lines):
    path.write_text('\n'.join(lines) + '\n')
    return str(path)


@pytest.mark.parametrize('make,expected', [
    (lambda path: BATCH, ('Slurm', 'n[1-2]', 2, [2, 1], [4, 4], 0)),
    (lambda path: {name: value for name, value in BATCH.items() if name != 'SLURM_NTASKS'},
     ('Slurm', 'n[1-2]', 2, [1, 1], [4, 4], 0)),
    (lambda path: dict(OMPI_MCA_orte_default_hostfile=hosts_file(path, 'a', 'a', 'b')),
     ('hostfile', 'a,b', 2, [2, 1], [], 0)),
    (lambda path: dict(OMPI_MCA_orte_default_hostfile=hosts_file(path, '# hosts', 'worker-0.job slots=2', 'b:3', 'c')),
     ('hostfile', 'worker-0.job,b,c', 3, [2, 3, 1], [], 0)),
    (lambda path: dict(OMPI_MCA_orte_default_hostfile=hosts_file(path, '# none')), None), (lambda path: {}, None)])
def test_allocations(make, expected, environ, tmp_path):
    environ(**make(tmp_path / 'hosts'))
    assert allocation() == expected


def test_an_allocation_whose_hosts_cannot_be_read(environ):
    """The file exists in the launcher of an MPIJob alone."""
    environ(OMPI_MCA_orte_default_hostfile='/nowhere/hosts')
    with pytest.raises(MgpuError, match='hosts of this job cannot be read .*/nowhere/hosts.*Start in the launcher'):
        allocation()


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """Return a function that puts shell commands on PATH as programs; there is an Open MPI already."""
    folder = tmp_path / 'bin'
    folder.mkdir()
    monkeypatch.setenv('PATH', '%s:/usr/bin:/bin' % folder)
    monkeypatch.setattr(mpi_library, 'loaded', lambda: OPEN_MPI)

    def make(**commands):
        for name, command in commands.items():
            (folder / name).write_text('#!/bin/sh\n%s\n' % command)
            (folder / name).chmod(0o755)
    make(mpirun='echo "mpirun (Open MPI) 4.1.4"', ompi_info='echo "MCA plm: rsh (MCA v2.1.0)"',
         prte_info='exit 1', srun='echo "none pmi2"')
    return make


def command(capsys, *arguments):
    """Return the command that launch would run, without the program."""
    assert main(['launch', '--dry-run', *arguments, __file__]) == 0
    line, = capsys.readouterr().out.splitlines()
    env, *words = shlex.split(line)
    assert env == 'env'
    settings = list(itertools.takewhile(lambda word: '=' in word, words))
    return ' '.join(settings), ' '.join(words[len(settings):]).partition(' %s ' % sys.executable)[0]


def test_the_command_in_slurm(environ, programs, capsys):
    environ(**BATCH)
    programs(srun='echo "none pmix"')
    environment, words = command(capsys)
    assert words.endswith('/srun --mpi=pmix --nodes=2 --ntasks=3 --cpus-per-task=2 --export=ALL --kill-on-bad-exit=1 '
                          '--quit-on-interrupt --unbuffered --quiet')
    assert 'OMP_NUM_THREADS=2 ' in environment and 'MGPU_QUIET=1' in environment and 'OVERLAP' not in environment
    assert ' --nodes=1 --ntasks=1 --cpus-per-task=4 ' in command(capsys, '-n', '1')[1]
    assert ' --nodes=2 --ntasks=8 --cpus-per-task=1 ' in command(capsys, '-n', '8')[1]
    environ(SLURM_CPUS_PER_TASK=3)
    assert ' --ntasks=3 --cpus-per-task=3 ' in command(capsys)[1]
    assert ' --ntasks=2 --cpus-per-task=4 ' in command(capsys, '-n', '2')[1]
    environ(SLURM_STEP_ID='0', SLURM_STEP_NUM_TASKS='1', SLURM_STEP_TASKS_PER_NODE='1', SLURM_TASKS_PER_NODE='1')
    assert 'SLURM_OVERLAP=1' in command(capsys)[0]


def test_the_command_in_a_slurm_without_pmix(environ, programs, capsys):
    environ(**BATCH)
    environment, words = command(capsys)
    assert re.search(r'/mpirun -n 3 (--allow-run-as-root )?--mca plm slurm --mca oob_\S+ 3 .*--bind-to none -x ', words)
    assert 'OMP_NUM_THREADS=2 ' in environment


@pytest.mark.parametrize('nodes,arguments,code,message', [
    (2, [], 1, 'cannot start processes on the hosts of this allocation (Slurm: 3 tasks on n[1-2]): srun is not on'),
    (2, ['-n', '4'], 2, '-n 4: the allocation (Slurm: 3 tasks on n[1-2]) has room for 3 processes'),
    (2, ['-n', '2', '--hosts', 'a'], 2, '--hosts a: the hosts of this job are those of its allocation (Slurm: 3'),
    (1, [], 0, '--host localhost:3 --mca ras ^slurm --mca oob_')])
def test_a_slurm_without_srun(nodes, arguments, code, message, environ, programs, capsys, monkeypatch, tmp_path):
    """Jobs in a container are never started by ssh: a scheduler neither counts nor ends its processes."""
    (tmp_path / 'bin' / 'srun').unlink()
    monkeypatch.setenv('PATH', str(tmp_path / 'bin'))
    environ(**BATCH)
    if nodes == 1:
        environ(SLURM_JOB_NODELIST='n1', SLURM_JOB_NUM_NODES='1', SLURM_TASKS_PER_NODE='3', SLURM_JOB_CPUS_PER_NODE='4')
    assert main(['launch', '--dry-run', *arguments, __file__]) == code
    assert message in ''.join(capsys.readouterr()).replace("'", '')


def test_no_number_of_processes(environ, programs, capsys):
    assert main(['launch', __file__]) == 2
    assert 'give the number of processes, -n N' in capsys.readouterr().err


def test_launch_as_a_rank(environ, programs, capsys, monkeypatch):
    environ(**MPIRUN)
    ended = []
    monkeypatch.setattr(rank_process, 'end_all', ended.append)  # it would end this process, too
    assert main(['launch', '-n', '2', __file__]) == 2 and ended == [2]
    assert "this is one of 8 processes that Open MPI's mpirun has started" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.mpi
def test_an_mpijob_on_two_hosts(two_hosts, tmp_path):
    """Hosts and number of processes come from the operator's file; a stand-in for ssh enters the test's namespaces."""
    hosts, path = tmp_path / 'hosts', tmp_path / 'ranks.npz'
    hosts_file(hosts, *[host + ' slots=1' for host in two_hosts.hosts])
    done = two_hosts.run([sys.executable, '-m', 'theano_mgpu', 'launch', JOBS, 'train', str(path), 'a->cpu', 'plain'],
                         {'OMPI_MCA_orte_default_hostfile': str(hosts), 'THEANO_FLAGS': INTERPRETED})
    assert done.returncode == 0 and done.stdout == 'rank 0 trained on a\n', done.stderr
    assert two_hosts.second.sent_bytes() > 10000
    alone('train', tmp_path / 'one.npz', 'a->cpu', 'plain', flags=INTERPRETED)
    for ours, theirs in zip(arrays(path), arrays(tmp_path / 'one.npz')):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
