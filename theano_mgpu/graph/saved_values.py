"""Values of earlier stages: a stage computes the cheap ones again, and saves the others."""
from __future__ import annotations

from typing import Any, Callable, Iterable, Mapping

import theano
from theano.gof.graph import Apply, io_toposort
from theano.scalar import basic as scalar
from theano.tensor import elemwise, opt

from ..compat import scan_rewrites
from .analysis import Shards
from .graph import n_axes

# Those that the gradient of a loop computes again, and a few more.
CHEAP = *scan_rewrites.CHEAP, opt.Assert
CHEAP_SCALARS = *scan_rewrites.CHEAP_SCALARS, scalar.IntDiv, scalar.Sqrt
DEEPEST = 12  # ops in a row that are computed again


def is_cheap(node: Apply) -> bool:
    """Return whether a node is a view, a shape, or simple arithmetic of each element."""
    if isinstance(node.op, elemwise.Elemwise):
        return isinstance(node.op.scalar_op, CHEAP_SCALARS)
    return isinstance(node.op, CHEAP)


def missing_for(variable: theano.Variable, is_here: Callable[[theano.Variable], bool],
                sources: Mapping[theano.Variable, theano.Variable] = {}) -> set[theano.Variable]:
    """Return the variables that are missing to compute a variable by cheap ops: the variable itself if there is no way.

    `sources` maps placeholders to the values that they stand for.
    """
    missing, seen, todo = set(), set(), [(variable, 0)]
    while todo:
        v, depth = todo.pop()
        if v in seen or depth and is_here(v):
            continue
        seen.add(v)
        if v.owner and is_cheap(v.owner) and depth < DEEPEST:
            todo += [(sources.get(each, each), depth + 1) for each in v.owner.inputs]
        else:
            missing.add(v)
    return missing


class SavedValues:
    """The values of earlier stages that are saved for a stage, and the others, which it computes again.

    All map placeholders of the stage: `needed` and `saved` to the values of earlier stages that they stand for, `again`
    to the expressions that the stage computes instead. Some of `saved` may be new: of values from which several others
    are computed.
    """

    def __init__(self, shards: Shards, stage: int, needed: Mapping[theano.Variable, theano.Variable]):
        self._shards = shards
        self._placeholders = {source: placeholder for placeholder, source in needed.items()}
        order = {variable: i for i, node in enumerate(io_toposort([], list(self._placeholders)))
                 for variable in node.outputs}
        latest_first = sorted(self._placeholders, key=lambda v: (shards.stage(v), order.get(v, -1)),
                              reverse=True)
        removed = self._remove(latest_first)
        self._save_common_sources(stage)
        removed += self._remove(latest_first)
        self._computed: dict[theano.Variable, theano.Variable] = {}
        self.again = {placeholder: self._compute(source) for placeholder, source in removed}
        self.saved = {placeholder: source for source, placeholder in self._placeholders.items()}

    def _remove(self, sources: Iterable[theano.Variable]) -> list[tuple[Any, Any]]:
        """Remove the sources that can be computed from the others; return pairs of a placeholder and its source."""
        return [(self._placeholders.pop(source), source) for source in sources
                if source in self._placeholders and not self._missing(source)]

    def _save_common_sources(self, stage: int) -> None:
        """Save each variable that alone is missing to compute several values."""
        needed_by: dict[theano.Variable, list[theano.Variable]] = {}
        for source in self._placeholders:
            missing = self._missing(source)
            if len(missing) == 1:
                needed_by.setdefault(missing.pop(), []).append(source)
        for variable, sources in needed_by.items():
            if len(sources) > 1 and variable in self._shards.stages and \
                    set(map(n_axes, sources)) == {n_axes(variable)}:
                self._placeholders[variable] = self._shards.at(variable, stage)

    def _missing(self, source: theano.Variable) -> set[theano.Variable]:
        # A value that is compared bit by bit is computed once: compiled with other ops it may round differently.
        return {source} if source in self._shards.compared else \
            missing_for(source, self._is_here, self._shards.saved)

    def _is_here(self, variable):
        return variable in self._placeholders or self._shards.is_everywhere(variable)

    def _compute(self, variable):
        variable = self._shards.saved.get(variable, variable)
        if self._is_here(variable):
            return self._placeholders.get(variable, variable)
        if variable not in self._computed:
            new = variable.owner.clone_with_new_inputs([self._compute(v) for v in variable.owner.inputs])
            self._computed.update(zip(variable.owner.outputs, new.outputs))
        return self._computed[variable]
