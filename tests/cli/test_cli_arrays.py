"""Reading input arrays for `theano-mgpu predict`, from each kind of file."""
from theano_mgpu.cli.array_input import open_inputs
from theano_mgpu.errors import MgpuError

import numpy as np
import pytest


def test_inputs_of_different_lengths(tmp_path):
    np.savez(str(tmp_path / 'x.npz'), a=np.ones((3, 2)), b=np.ones((4, 2)))
    with pytest.raises(MgpuError, match=r'the same number of samples.*a has shape \(3, 2\), b has shape \(4, 2\)'), \
            open_inputs(str(tmp_path / 'x.npz'), ['a', 'b']):
        pass


def test_an_array_of_its_own_is_mapped_and_others_are_read(tmp_path):
    np.save(str(tmp_path / 'x.npy'), np.arange(10.))
    np.savez(str(tmp_path / 'x.npz'), x=np.arange(10.), none=np.ones((0, 3)))
    for name, is_mapped in (('x.npy', True), ('x.npz', False)):
        with open_inputs(str(tmp_path / name), ['x']) as (x,):
            assert isinstance(x, np.memmap) == is_mapped
            np.testing.assert_array_equal(x, np.arange(10.))
    with open_inputs(str(tmp_path / 'x.npz'), ['none']) as (none,):
        assert none.shape == (0, 3)
