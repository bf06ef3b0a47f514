"""A `theano.function` of `enable` whose graph is placed on devices."""
from __future__ import annotations

import contextlib
from typing import Any

from ..errors import GraphError, MgpuError
from ..options import Options
from ..parallel_function import ParallelFunction
from ..plan.layout import mesh_for
from .chooser import Way
from .enabled_function import PROFILED, EnabledFunction
from .programs import Programs

NOT_PLACED = '%s is placed on devices, but plain Theano runs it on one: %s'


class NotPlaced(GraphError):
    """The reason why devices cannot run a placed function."""


class PlacedFunction(EnabledFunction):
    """A callable in place of a `theano.function` whose graph is placed on devices, from its first call on.

    A batch is divided if there are several replicas, or micro-batches. A call without a batch, or with one that cannot
    be divided, runs as it is on the first replica.
    """

    _how = 'placed'
    _not_divided = '%s runs on one replica of its devices: %s'

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._whole: dict[Programs, ParallelFunction] = {}  # the functions that divide no batch
        self._divides: bool | None = None  # whether there are several replicas, or micro-batches
        self._raises_refusals = False
        self._chooser.settle(Way.SEVERAL)

    @property
    def step(self) -> ParallelFunction | None:
        return super().step or next(iter(self._whole.values()), None)

    def copied(self, function: Any, swap: Any, delete_updates: bool) -> None:
        super().copied(function, swap, delete_updates)
        if function.profile:
            self._enabled.tell(NOT_PLACED % (function.mgpu_name, PROFILED))

    def _is_plain(self, programs):
        return False

    def _note_failure(self, failure):
        if isinstance(failure, NotPlaced):
            self._stay(str(failure.__cause__))
            self._enabled.tell(str(failure))
        else:
            super()._note_failure(failure)

    def _note_undivided(self, programs):
        pass  # it runs as it is

    def _compute(self, key, news, values, subset):
        with self._placing():
            programs = self._programs_of(key, subset)
            if self._divides is None:
                self._divides = self._is_divided(subset)
        afterwards = None
        if self._divides and (programs.step is not None or news):
            results = super()._compute(key, news, values, subset)
            if not callable(results):
                return results
            afterwards = results
        results = self._by(self._as_it_is(programs, values), values)
        if afterwards is not None:
            afterwards()
        return results

    def _is_divided(self, subset):
        _, outputs, updates = self._definition.on_host(subset)
        mesh = mesh_for(outputs + list(updates.values()) + list(updates), self._enabled.contexts())
        return len(mesh.replicas) > 1 or self._ranks.size > 1 or Options().in_rounds

    def _as_it_is(self, programs, values):
        """Return the ParallelFunction that computes a call as it is on the first replica."""
        if programs not in self._whole:
            with self._placing():
                self._whole[programs] = programs.whole()
            self._verify(self._whole[programs], values)
        step = self._whole[programs]
        if programs.step is None:
            self._usage.run_on(step.contexts, self._how)
        return step

    @contextlib.contextmanager
    def _placing(self):
        """Make an MgpuError of the ``with`` block a NotPlaced."""
        try:
            yield
        except MgpuError as error:
            raise NotPlaced(NOT_PLACED % (self._usage.name, error)) from error
