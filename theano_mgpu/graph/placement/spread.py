"""Places for the parameters of a model that does not fit on one device: the first ones on the first device."""
from __future__ import annotations

from typing import Collection, Sequence

import numpy as np
import theano
from theano.compile.sharedvalue import SharedVariable
from theano.gof.graph import io_toposort


def spread(outputs: Sequence[theano.Variable], params: Collection[SharedVariable],
           names: Sequence[str]) -> list[SharedVariable]:
    """Tag parameters with the names of contexts, in the order of their use, about as many bytes for each context.

    Every other variable is placed by them: see `propagation`. Functions that are made later are placed alike. Return
    the parameters that were tagged.
    """
    used = dict.fromkeys(variable for node in io_toposort([], list(outputs)) for variable in node.inputs
                         if variable in params)
    values = [variable.container.storage[0] for variable in used]
    sizes = [value.size * np.dtype(value.dtype).itemsize for value in values]  # a GpuArray has no nbytes
    before, total = np.cumsum([0] + sizes[:-1]), sum(sizes) or 1
    for variable, start, size in zip(used, before, sizes):
        variable.tag.mgpu_place = names[min(len(names) - 1, int(len(names) * (start + size / 2) / total))]
    return list(used)
