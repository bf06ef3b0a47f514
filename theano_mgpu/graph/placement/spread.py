"""Places for the parameters of a model that does not fit on one device: the first ones on the first device."""
from __future__ import annotations

from typing import Collection, Sequence

import theano
from theano.compile.sharedvalue import SharedVariable
from theano.gof.graph import io_toposort

from ..value_sizes import bytes_of_shared, parts_by_bytes


def spread(outputs: Sequence[theano.Variable], params: Collection[SharedVariable],
           names: Sequence[str]) -> list[SharedVariable]:
    """Tag parameters with the names of contexts, in the order of their use, about as many bytes for each context.

    Every other variable is placed by them: see `propagation`. Functions that are made later are placed alike. Return
    the parameters that were tagged.
    """
    used = dict.fromkeys(variable for node in io_toposort([], list(outputs)) for variable in node.inputs
                         if variable in params)
    for variable, number in zip(used, parts_by_bytes(list(map(bytes_of_shared, used)), len(names))):
        variable.tag.mgpu_place = names[number]
    return list(used)
