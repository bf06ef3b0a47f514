"""Errors that a script catches: the class and text of plain Theano and plain Keras, on one device or several ranks."""
import os
import pickle
import subprocess
import sys

from theano_mgpu.comm.rank_errors import packed, unpacked

import pytest
from support.launch import INTERPRETED, environment
from support.search_path import PROGRAMS

CASES = str(PROGRAMS / 'error_cases.py')
OVER_CONTEXTS = '-m', 'theano_mgpu', 'run', '--quiet', '--contexts', 'a->cpu;b->cpu', '--always'
OVER_RANKS = '-m', 'theano_mgpu', 'launch', '-n', '2', 'run', '--quiet'


@pytest.fixture(scope='module')
def plain(tmp_path_factory):
    return lines(str(tmp_path_factory.mktemp('plain') / 'lines'))


def lines(path, *command, rank=0):
    if not os.path.exists('%s.%d' % (path, rank)):
        subprocess.run([sys.executable, *command, CASES, path], check=True, timeout=600,
                       env=environment(INTERPRETED))
    with open('%s.%d' % (path, rank)) as file:
        return file.read().split('\n')


@pytest.mark.slow_but_with('ranks')
@pytest.mark.parametrize('command', [
    OVER_CONTEXTS, pytest.param(OVER_RANKS + ('--always',), marks=pytest.mark.mpi),
    pytest.param(OVER_RANKS, marks=[pytest.mark.mpi, pytest.mark.slow])], ids=['contexts', 'ranks', 'ranks, short'])
def test_errors_are_those_of_plain_theano_and_keras(command, plain, tmp_path):
    """A ReplicaError, RankError or BatchError came in their place, which `except ValueError` did not catch."""
    for rank in range(2 if 'launch' in command else 1):
        found = lines(str(tmp_path / 'lines'), *command, rank=rank)
        assert found == plain and len(plain) > 80


class Refused(KeyError):
    """An error that neither its text nor its `args` suffice to make."""

    def __init__(self, name, number):
        super().__init__(name)
        self.number = number


def sent(error):
    return unpacked(pickle.loads(pickle.dumps(packed(error))), 'rank 1 failed')


@pytest.mark.skipif(sys.version_info < (3, 11), reason='before Python 3.11 a note is part of the text')
@pytest.mark.parametrize('error', [
    ValueError('shapes', (7, 4)), OSError(2, 'No such file', 'x'), SystemExit(3), Refused('w', 5),
    UnicodeDecodeError('utf8', b'x', 0, 1, 'bad'), StopIteration(), KeyError()], ids=lambda error: type(error).__name__)
def test_an_error_of_one_rank_has_its_class_and_text_on_the_others(error):
    error.number = 5
    error.__op_instance__ = lambda: None  # as Theano's have, which refer to the graph
    found = sent(error)
    assert type(found) is type(error) and str(found) == str(error) and found.args == error.args
    assert found.number == 5 and not hasattr(found, '__op_instance__')
    assert getattr(found, '__notes__', ['rank 1 failed']) == ['rank 1 failed']


def test_an_error_of_a_class_that_other_ranks_do_not_have_is_one_of_its_nearest_base():
    class Local(IndexError):
        pass
    found = sent(Local('row 9'))
    assert type(found) is IndexError and 'row 9' in str(found)
    if hasattr(found, '__notes__'):
        assert 'It raised Local, of which this process could not make a copy' in found.__notes__[0]


class Wordless(Exception):
    def __str__(self):
        raise ZeroDivisionError

    __reduce__ = __str__


def test_an_error_that_has_no_text_is_sent_all_the_same():
    found = sent(Wordless(lambda: None))
    assert type(found) is Exception and str(found).partition('\n')[0] == 'Wordless'
