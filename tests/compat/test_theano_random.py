"""Streams of random numbers: where they start."""
import numpy as np
import pytest
from theano.sandbox import rng_mrg


def skipped(state, first, second):
    """Return a state after a number of draws that two matrices stand for, by Theano's own product."""
    return np.concatenate([rng_mrg.matVecModM(first, state[:3], rng_mrg.M1),
                           rng_mrg.matVecModM(second, state[3:], rng_mrg.M2)])


@pytest.mark.parametrize('seed', [1, [1, 2, 3, 4, 5, 6], [rng_mrg.M1 - 1] * 3 + [rng_mrg.M2 - 1] * 3], ids=str)
def test_streams_start_where_theano_starts_them(seed, monkeypatch):
    """Theano calls a function, which it compiles first, 15,360 times."""
    monkeypatch.setattr(rng_mrg, 'function', None)
    monkeypatch.setattr(rng_mrg.multMatVect, 'dot_modulo', None)
    streams = rng_mrg.MRG_RandomStreams(seed)
    state = first = np.array(streams.rstate)
    for i, found in enumerate(streams.get_substream_rstates(11, 'float32')):
        assert found.dtype == 'int32' and (found == state).all(), i
        state = skipped(state, rng_mrg.A1p72, rng_mrg.A2p72)
    following = skipped(first, rng_mrg.A1p134, rng_mrg.A2p134)
    assert streams.rstate.dtype == 'int32' and (streams.rstate == following).all()
    assert (streams.get_substream_rstates(1, 'float32', inc_rstate=False)[0] == following).all()
    assert (streams.rstate == following).all()
