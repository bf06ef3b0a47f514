"""A user's functions in the place of a model's train, test and predict functions: the same in every mode."""
import os

from theano_mgpu.keras import disable, enable

import numpy as np
import pytest
from support import replaced_functions
from support.keras_equivalence import floatx
from support.modes import PYTHON
from support.processes import python
from support.replaced_functions import CASES

pytestmark = pytest.mark.filterwarnings('ignore:.*several cores')
SCRIPT = os.path.abspath(replaced_functions.__file__)


@pytest.fixture(params=CASES)
def case(request, monkeypatch):
    """Return a case, in which models are compiled for the interpreter."""
    monkeypatch.setitem(replaced_functions.OPTIONS, 'mode', PYTHON)
    with floatx('float64'):
        yield CASES[request.param]
    disable()


@pytest.mark.slow_but_with('train_function_replaced_b*')
def test_enabled(case, cpu2):
    """A weight of a layer and the optimizer led to "two new values"; other functions were left alone, or lost."""
    expected = case()
    for options in ({'always': True, 'verify': True}, {}):
        report = enable(tell=lambda text: None, **options)
        np.testing.assert_allclose(case(), expected, rtol=1e-9)
    assert not [note for note in report.notes if 'verified' in note]


@pytest.mark.slow
def test_on_devices(case, contexts, monkeypatch):
    expected = case()
    monkeypatch.delitem(replaced_functions.OPTIONS, 'mode')  # this mode compiles no kernels
    contexts('gpu', 2)
    enable(always=True)
    np.testing.assert_allclose(case(), expected, rtol=1e-9)


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.parametrize('option', [['--always'], []])
def test_in_two_processes(option):
    """The first epoch ended with "'function' object has no attribute 'begin'"."""
    found = [python(*words, SCRIPT, flags='floatX=float64,cxx=,optimizer=fast_compile')
             for words in ([], ['-m', 'theano_mgpu', 'launch', '-n', '2', 'run', *option])]
    plain, ranks = [{line.split()[0]: np.array(line.split()[1:], float) for line in done.stdout.splitlines()}
                    for done in found]
    assert set(plain) == set(ranks) == set(CASES)
    for name in plain:
        np.testing.assert_allclose(ranks[name], plain[name], rtol=1e-7, err_msg=name)
