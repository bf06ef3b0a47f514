"""A replica's part of a batch, and what it knows in the course of a step."""
import numpy as np

from ..replicas.transfers import fetch
from .exchange import Sum


class Shard:
    """A replica's part of a batch in one step.

    Parameters
    ----------
    replica : int
    context : Context
    span : (int, int)
        Its samples, of those that this process has.
    known : dict of theano.Variable to (ndarray or pygpu.gpuarray.GpuArray)
        Its inputs; what it computes is added.
    buffers : DeviceBuffers
        Where its inputs go.
    """

    def __init__(self, replica, context, span, known, buffers):
        self.replica, self.context, self.span, self.known = replica, context, span, known
        self._buffers = buffers
        self._sent = {}

    def send(self, variable, value):
        """A value on the replica's device, where it is sent once a step."""
        if not isinstance(value, np.ndarray):
            return value
        if variable not in self._sent:
            self._sent[variable] = self._buffers.send(variable, value)
        return self._sent[variable]

    def arguments(self, given, takes, common):
        """Values of variables as a function takes them.

        Parameters
        ----------
        given : list of theano.Variable
        takes : list of bool
            Which are taken on the device, see `graph.compile_for`.
        common : dict of theano.Variable to (ndarray or pygpu.gpuarray.GpuArray or Sum)
            What every replica knows.
        """
        found = []
        for variable, on_device in zip(given, takes):
            value = self.known[variable] if variable in self.known else common[variable]
            if isinstance(value, Sum):
                value = value.on(self.context) if on_device else value.on_host
            found.append(self.send(variable, value) if on_device else fetch(value))
        return found
