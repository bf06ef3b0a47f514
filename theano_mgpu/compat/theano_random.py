"""The starts of streams of random numbers."""
from __future__ import annotations

from types import ModuleType


def find_starts_without_a_loop(rng_mrg: ModuleType) -> None:
    """Compute the starts of the streams of `MRG_RandomStreams` by products of arrays of integers.

    Each start is the first one, multiplied by a power of a matrix (L'Ecuyer, Simard, Chen and Kelton, "An
    object-oriented random-number package with many long streams and substreams", 2002): one product
    turns the starts of n streams into the starts of the next n. Theano compiles a function for one start, and calls it
    for each of up to 15,360 streams.
    """
    import numpy

    from .wrapping import wrap

    def product(states, matrices, moduli):
        # A sum of three products of two numbers of 31 bits has less than 64.
        return numpy.concatenate([half @ matrix.T % modulus for half, matrix, modulus in zip(
            numpy.split(states, 2, axis=-1), matrices, moduli)], axis=-1)

    def unsigned(*values):
        return [numpy.asarray(value, 'uint64') for value in values]

    @wrap(rng_mrg)
    def multMatVect(original, v, A, m1, B, m2):
        return product(*unsigned(v), unsigned(A, B), unsigned(m1, m2)).astype('int32')

    @wrap(rng_mrg.MRG_RandomStreams)
    def get_substream_rstates(original, self, n_streams, dtype, inc_rstate=True):
        states, moduli = unsigned([self.rstate])[0], unsigned(rng_mrg.M1, rng_mrg.M2)
        matrices = unsigned(rng_mrg.A1p72, rng_mrg.A2p72)
        while len(states) < n_streams:
            states = numpy.concatenate([states, product(states, matrices, moduli)])
            matrices = [matrix @ matrix % modulus for matrix, modulus in zip(matrices, moduli)]
        if inc_rstate:
            self.inc_rstate()
        return states[:n_streams].astype('int32')
