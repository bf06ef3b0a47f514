"""The patches of cuDNN that need no device."""
import types

from theano_mgpu.compat.cuda_libraries import cudnn_choice as libraries
from theano_mgpu.devices import patches
from theano_mgpu.errors import MgpuWarning

import numpy as np
import pytest
import theano
import theano.gpuarray.type
from scipy.signal import correlate2d
from support.processes import python


@pytest.mark.slow
@pytest.mark.needs_compiler
def test_an_import_does_not_look_for_cudnn():
    """Each process ran g++ for the check, and kept a wrong result for ever."""
    assert python('-c', '''
import subprocess
commands, run = [], subprocess.Popen.__init__

def noted(self, command, *args, **options):
    commands.append(str(command))
    run(self, command, *args, **options)

subprocess.Popen.__init__ = noted
import theano_mgpu
import theano.gpuarray.dnn
print([command for command in commands if 'cudnn' in command], theano.config.dnn.enabled)
''', flags='').stdout == '[] auto\n'


@pytest.mark.slow_with('-deterministic deterministic small')
@pytest.mark.parametrize('flags,algorithms', [('', 'deterministic deterministic small'),
                                              ('dnn.conv.algo_bwd_data=none', 'none deterministic small')])
def test_algorithms_are_deterministic_by_default(flags, algorithms):
    code = 'import theano_mgpu; from theano import config\n' \
        'print(config.dnn.conv.algo_bwd_data, config.dnn.conv.algo_bwd_filter, config.dnn.conv.algo_fwd)'
    assert python('-c', code, flags=flags).stdout == algorithms + '\n'


def test_several_devices_do_not_choose_by_time(monkeypatch):
    monkeypatch.setattr(theano.config.dnn.conv, 'algo_fwd', 'time_once')
    context = types.SimpleNamespace(kind=b'cuda')
    monkeypatch.setattr(theano.gpuarray.type, 'list_contexts', lambda: ['dev0'])
    patches.choose_alike(context)
    assert theano.config.dnn.conv.algo_fwd == 'time_once'
    monkeypatch.setattr(theano.gpuarray.type, 'list_contexts', lambda: ['dev0', 'dev1'])
    with pytest.warns(MgpuWarning, match='dnn.conv.algo_fwd=time_once .* guess_once is used'):
        patches.choose_alike(context)
    assert theano.config.dnn.conv.algo_fwd == 'guess_once'


def test_a_problem_is_one_line():
    problem = libraries.Cudnn('/lib/libcudnn.so.9', problem='it cannot\nbe loaded', remedy='Install another')
    assert problem.why_not() == 'it cannot be loaded. Install another'
    assert libraries.Cudnn('/lib/libcudnn.so.9').why_not() == ''


def test_versions_of_headers(tmp_path):
    assert libraries.header_version(str(tmp_path)) == ()
    text = '#define CUDNN_MAJOR 7\n#define CUDNN_MINOR 6\n#define CUDNN_PATCHLEVEL 5\n'
    (tmp_path / 'cudnn.h').write_text(text)
    assert libraries.header_version(str(tmp_path)) == (7, 6, 5)
    (tmp_path / 'cudnn_version.h').write_text(text.replace('7', '9'))
    assert libraries.header_version(str(tmp_path)) == (9, 6, 5)


def test_the_reference_of_a_convolution():
    """SciPy computes the same numbers; a sum of products, linear in images and in filters, gives the gradients."""
    rng = np.random.RandomState(1)
    x, w, dy = (rng.rand(*shape) for shape in ((2, 3, 6, 5), (4, 3, 3, 2), (2, 4, 4, 4)))
    y, dx, dw = libraries._convolve(x, w, dy)
    expected = [[sum(correlate2d(x[i, c], w[k, c], 'valid') for c in range(3)) for k in range(4)] for i in range(2)]
    np.testing.assert_allclose(y, expected)
    np.testing.assert_allclose([(dx * x).sum(), (dw * w).sum()], 2 * [(dy * y).sum()])
    np.testing.assert_allclose(dw[1, 2], sum(correlate2d(x[i, 2], dy[i, 1], 'valid') for i in range(2)))
