"""A `theano.function` of `enable` whose graph is placed on devices."""
from ..errors import GraphError, MgpuError
from ..options import Options
from ..placement.layout import mesh_for
from .chooser import Way
from .enabled_function import EnabledFunction, NotDivided, OtherBatch

NOT_PLACED = '%s is placed on devices, but plain Theano runs it on one: %s'


class NotPlaced(GraphError):
    """The reason why devices cannot run a placed function."""


class PlacedFunction(EnabledFunction):
    """Runs in place of a `theano.function` whose graph is placed on devices, from its first call on.

    A batch is divided if there are several replicas, or micro-batches; what has no batch, or cannot be divided, runs
    as it is on the first replica.
    """

    _how = 'placed'

    def __init__(self, enabled, function, usage, definition=None):
        super().__init__(enabled, function, usage, definition)
        self._whole = {}  # Programs -> the ParallelFunction that divides no batch
        self._several = None  # whether there are several replicas, or micro-batches
        self._chooser.settle(Way.SEVERAL)

    def _is_plain(self, programs, news):
        return False

    def _is_for_plain(self, failure):
        return not (isinstance(failure, NotPlaced) and self._enabled.strict) and super()._is_for_plain(failure)

    def _go_on_after(self, failure, programs):
        if isinstance(failure, NotPlaced):
            self._stay(str(failure.__cause__))
            self._enabled.tell(str(failure))
        else:
            super()._go_on_after(failure, programs)

    def _compute(self, key, news, values, subset):
        programs = self._programs_of(key, subset)
        if self._divides(subset) and (programs.step is not None or news):
            try:
                return super()._compute(key, news, values, subset)
            except NotDivided:
                pass
            except OtherBatch:
                results = self._by(self._as_it_is(programs, values), values)
                self._change_step(programs, values)
                return results
        return self._by(self._as_it_is(programs, values), values)

    def _divides(self, subset):
        if self._several is None:
            try:
                _, outputs, updates = self._definition.on_host(subset)
                mesh = mesh_for(outputs + list(updates.values()) + list(updates), self._enabled.contexts())
            except MgpuError as error:
                raise self._unable(error) from error
            self._several = len(mesh.replicas) > 1 or self._ranks.size > 1 or Options().micro_batches > 1
        return self._several

    def _refuse(self, programs, refusal):
        self._tell_refusal('%s runs on one replica of its devices: %s', refusal)

    def _as_it_is(self, programs, values):
        """Return the ParallelFunction that computes a call as it is on the first replica."""
        if programs not in self._whole:
            try:
                self._whole[programs] = programs.whole()
            except MgpuError as error:
                raise self._unable(error) from error
            self._verify(self._whole[programs], values)
        step = self._whole[programs]
        if programs.step is None:
            self._usage.run_on(step.contexts, self._how)
        return step

    @property
    def step(self):
        return super().step or next(iter(self._whole.values()), None)

    def _unable(self, error):
        return NotPlaced(NOT_PLACED % (self._usage.name, error))
