"""The plan of a step: the one value between a program and its executable."""
from __future__ import annotations

from dataclasses import dataclass

import theano
from theano.compile.sharedvalue import SharedVariable

from ..devices.mesh import Mesh
from ..graph.partition import Output, Program
from .explain import as_text, explanation
from .parts import Boundary, DeviceBroadcast, Part, ShardedUpdate, StagePlan
from .shares import Machine, Shares


@dataclass(frozen=True)
class Choice:
    """A choice in a plan, and its reason."""

    what: str
    chosen: str
    reason: str


@dataclass(frozen=True, eq=False)
class StepPlan:
    """The parts of a step with their contexts, the exchanges, and the reasons. ``print(plan)`` explains it.

    Attributes
    ----------
    mesh : Mesh
        The contexts of this process.
    last : Boundary
        After the last stage.
    update : tuple of Part
        The graphs of exchanged values: new values, most of all.
    results : tuple of Output
        The program's outputs that are not new values.
    rows : dict of SharedVariable to Output
        New values with a row a sample.
    kept : frozenset of theano.Variable
        Values that a replica needs itself, beside those that it only gives to sums.
    params : tuple of SharedVariable
        Trained parameters.
    broadcasts : tuple of DeviceBroadcast
        Of new values, in place of copies to the other contexts and messages to the other ranks.
    overlaps : bool
        Whether sums over the ranks are made on a thread, or on streams of the devices, while the next part is computed.
    nccl_seconds : float
        In which devices exchange the gradients by NCCL, where these are enough for several pieces; else 0.
    """

    name: str | None
    program: Program
    mesh: Mesh
    machine: Machine
    shares: Shares
    stages: tuple[StagePlan, ...]
    last: Boundary
    update: tuple[Part, ...]
    results: tuple[Output, ...]
    rows: dict[SharedVariable, Output]
    kept: frozenset[theano.Variable]
    params: tuple[SharedVariable, ...] = ()
    divided: ShardedUpdate | None = None
    broadcasts: tuple[DeviceBroadcast, ...] = ()
    overlaps: bool = False
    nccl_seconds: float = 0
    choices: tuple[Choice, ...] = ()

    @property
    def parts(self) -> list[Part]:
        """All parts, in the order in which they are computed."""
        return [part for stage in self.stages for part in stage.parts] + list(self.update)

    def __str__(self) -> str:
        return as_text(explanation(self))
