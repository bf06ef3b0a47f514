"""A `theano.function` of `enable` whose graph is placed on devices."""
from ..errors import GraphError, MgpuError
from ..options import Options
from ..placement.layout import mesh_for
from .enabled_function import EnabledFunction

NOT_PLACED = '%s is placed on devices, but plain Theano runs it on one: %s'


class PlacedFunction(EnabledFunction):
    """Runs in place of a `theano.function` whose graph is placed on devices, from its first call on.

    A batch is divided if there are several replicas, or micro-batches; what has no batch, or cannot be divided, runs
    as it is on the first replica.
    """

    _how = 'placed'
    _whole = None

    def __init__(self, enabled, function, given, usage):
        super().__init__(enabled, function, given, usage)
        self._run = self._place
        self._first = self._divide

    def _place(self, args, kwargs):
        """Make the first call over the devices; or stay with plain Theano, and say why."""
        try:
            if not self._prepared():
                raise GraphError(self._refusal)
            mesh = mesh_for(self._programs.graph, self._enabled.contexts())
        except MgpuError as error:
            return self._not_placed(error, args, kwargs)
        several = len(mesh.replicas) > 1 or self._ranks.size > 1 or Options().micro_batches > 1
        self._run = self._divide if several else self._undivided
        return self._run(args, kwargs)

    def _undivided(self, args, kwargs):
        """Compute a call as it is on the first replica: the next one may have a batch."""
        if self._whole is None:
            try:
                self._whole = self._programs.compiled(samples={}, whole=True)
            except MgpuError as error:
                return self._not_placed(error, args, kwargs)
            self._verify(self._whole, args, kwargs)
        if self.step is None or self.step is self._whole:
            self.step = self._whole
            self._usage.run_on(self.step.contexts, self._how)
        return self._by(self._whole, args, kwargs)

    def _stay_undivided(self, why):
        self._run = self._undivided

    def _not_placed(self, error, args, kwargs):
        if self._enabled.strict:
            raise GraphError(NOT_PLACED % (self._usage.name, error)) from error
        self._stay(str(error))
        self._enabled.tell(NOT_PLACED % (self._usage.name, error))
        return self._plain(args, kwargs)

    def _refuse(self, error):
        self._tell_refusal('%s runs on one replica of its devices: %s', error)
