"""The threads and the cores that a process may use."""
import os
import subprocess
import sys

from theano_mgpu.utils import processor

import pytest
from support.search_path import ROOT


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Return a function that makes a machine of files like Linux's; it returns the cores of the process there."""
    monkeypatch.delenv('OMP_NUM_THREADS', raising=False)

    def make(siblings, usable=None, groups='', **files):
        for i, text in enumerate(siblings):
            (tmp_path / ('siblings%d' % i)).write_text(text)
        for path, text in files.items():
            path = tmp_path / path.replace('__', '/').replace('_DOT_', '.')
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        (tmp_path / 'cgroup').write_text(groups)
        usable = range(len(siblings)) if usable is None else usable
        monkeypatch.setattr(os, 'sched_getaffinity', lambda process: set(usable), raising=False)
        monkeypatch.setattr(processor, 'SIBLINGS', str(tmp_path / 'siblings%d'))
        monkeypatch.setattr(processor, 'CGROUPS', str(tmp_path))
        monkeypatch.setattr(processor, 'CGROUP', str(tmp_path / 'cgroup'))
        return processor.cores()
    return make


def test_hardware_threads_of_a_core_count_once(machine):
    assert machine(['0,4', '1,5', '2,6', '3,7'] * 2) == 4
    assert machine(['0,4', '1,5', '2,6', '3,7'] * 2, usable=[0, 4, 5]) == 2


@pytest.mark.parametrize('groups,files,expected', [
    ('0::/', {'cpu_DOT_max': '200000 100000'}, 2),
    ('0::/', {'cpu_DOT_max': 'max 100000'}, 4),
    ('0::/a/b', {'a__cpu_DOT_max': '50000 100000', 'a__b__cpu_DOT_max': '300000 100000'}, 1),
    ('1:name=systemd:/\n4:cpu,cpuacct:/c', {'cpu,cpuacct__c__cpu_DOT_cfs_quota_us': '250000',
                                            'cpu,cpuacct__c__cpu_DOT_cfs_period_us': '100000'}, 3),
    ('4:cpu:/', {'cpu__cpu_DOT_cfs_quota_us': '-1', 'cpu__cpu_DOT_cfs_period_us': '100000'}, 4)])
def test_quotas_of_containers(machine, groups, files, expected):
    assert machine('0123', groups=groups, **files) == expected


def test_a_machine_that_says_nothing(machine, monkeypatch):
    assert machine(['0', '1']) == 2
    monkeypatch.setattr(processor, 'SIBLINGS', '/none/%d')
    monkeypatch.setattr(processor, 'CGROUP', '/none')
    assert processor.cores() == 2
    monkeypatch.delattr(os, 'sched_getaffinity')
    assert processor.cores() == os.cpu_count()


def test_the_user_may_ask_for_fewer(machine, monkeypatch):
    assert machine('0123') == 4
    for text, expected in [('1', 1), ('4096', 4), ('3,2', 3), ('', 4), ('many', 4), ('0', 1)]:
        monkeypatch.setenv('OMP_NUM_THREADS', text)
        assert processor.threads() == processor.cores() == expected, text


@pytest.mark.slow
def test_the_affinity_of_this_machine():
    code = 'import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); ' \
           'from theano_mgpu.utils import processor; print(processor.cores(), processor.threads())'
    done = subprocess.run([sys.executable, '-c', code], stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT)
    assert done.stdout.split() == ['1', '1']
