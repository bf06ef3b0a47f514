"""Divide an update among devices: each computes the new values of a share of the parameters, with their state."""
from typing import Dict, List, Sequence, Tuple

import theano
from theano.compile.sharedvalue import SharedVariable
from theano.gof.graph import ancestors


def update_shares(variables: Sequence[SharedVariable], new: Dict[SharedVariable, theano.Variable],
                  n: int) -> Tuple[List[SharedVariable], List[List[SharedVariable]]]:
    """Divide variables among n devices, in their order, with about as many bytes for each.

    Variables of which one's new value reads the other, such as a parameter and its state in the optimizer, stay
    together.

    Parameters
    ----------
    variables : list of SharedVariable
    new : dict of SharedVariable to theano.Variable
        Their new values.
    n : int

    Returns
    -------
    common : list of SharedVariable
        Scalars, such as the number of steps: each device computes them.
    shares : list of list of SharedVariable
        Of n devices. One may be empty.

    Notes
    -----
    This is the first stage of ZeRO (Rajbhandari et al., 2020), with whole parameters in place of slices.
    """
    common = [variable for variable in variables if not getattr(variable, 'ndim', 0)]
    groups = _groups([variable for variable in variables if variable not in common], new)
    sizes = [sum(map(_bytes_of, group)) for group in groups]
    shares: List[List[SharedVariable]] = [[] for _ in range(n)]
    before, total = 0, sum(sizes) or 1
    for group, size in zip(groups, sizes):
        shares[min(n - 1, int(n * (before + size / 2) / total))] += group
        before += size
    return common, shares


def _groups(variables, new):
    """The variables in lists of those that belong together."""
    group_of = {variable: [variable] for variable in variables}
    for variable in variables:
        for other in ancestors([new[variable]]):
            mine, others = group_of[variable], group_of.get(other)
            if others is not None and others is not mine:
                mine += others
                group_of.update((each, mine) for each in others)
    return list({id(group): group for group in group_of.values()}.values())


def _bytes_of(variable):
    value = variable.container.storage[0]
    return value.size * value.dtype.itemsize
