"""The starts of streams of random numbers."""
from __future__ import annotations

from types import ModuleType


def find_starts_without_a_loop(rng_mrg: ModuleType) -> None:
    """Compute the starts of the streams of `MRG_RandomStreams` by products of arrays of integers.

    Each start is a power of a matrix by the first one (L'Ecuyer, Simard, Chen and Kelton, "An object-oriented
    random-number package with many long streams and substreams", 2002): with the starts of n streams, those of the next
    n are one product. Theano compiles a function for one product, and calls it for each of up to 15,360 streams.
    """
    import numpy

    from .wrapping import wrap

    moduli = numpy.uint64(rng_mrg.M1), numpy.uint64(rng_mrg.M2)

    def product(states, matrices):
        # Sums of three products of 31 bits have less than 64.
        return numpy.concatenate([half @ matrix.T % modulus for half, matrix, modulus in zip(
            numpy.split(states, 2, axis=-1), matrices, moduli)], axis=-1)

    @wrap(rng_mrg)
    def multMatVect(original, v, A, m1, B, m2):
        return product(v.astype('uint64'), [A.astype('uint64'), B.astype('uint64')]).astype('int32')

    @wrap(rng_mrg.MRG_RandomStreams)
    def get_substream_rstates(original, self, n_streams, dtype, inc_rstate=True):
        states = numpy.asarray(self.rstate, 'uint64')[None]
        matrices = [rng_mrg.A1p72.astype('uint64'), rng_mrg.A2p72.astype('uint64')]
        while len(states) < n_streams:
            states = numpy.concatenate([states, product(states, matrices)])
            matrices = [matrix @ matrix % modulus for matrix, modulus in zip(matrices, moduli)]
        if inc_rstate:
            self.inc_rstate()
        return states[:n_streams].astype('int32')
