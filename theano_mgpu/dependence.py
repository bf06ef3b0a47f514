"""How a variable of a graph can depend on the samples of a batch."""
from collections import namedtuple

CONSTANT = 'constant'  # the same whatever the samples are
ROWS = 'rows'          # samples along `axis`; each element depends on one sample
COUNT = 'count'        # a constant times the number of samples
SUM = 'sum'            # a sum over samples
MEAN = 'mean'          # a mean over samples, plus constants
SCALED = 'scaled'      # a sum over samples, times the number of samples
MIXED = 'mixed'        # a linear combination of sums, means and constants
PLACES = 'places'      # 0, 1, 2 ...: the place of each sample in its batch, good as an index only
NUMBER = 'number'      # another whole number computed of the number of samples, good as a size only
DRAWN = 'drawn'        # random numbers, so many as are needed
SIZES = 'sizes'        # a vector whose elements depend in different ways, such as a shape
COUPLED = 'coupled'    # any other function of several samples

SHIFTED = 'shifted'    # of rows: a mean over samples was added to each, so that only their sum is one over samples

STATISTICS = (COUNT, SUM, MEAN, MIXED)
ACROSS = STATISTICS + (SHIFTED,)  # what rows are filled with that depends on other samples, too


class Dependence(namedtuple('Dependence', 'kind axis filled merged elements')):
    """How a variable depends on the samples.

    Attributes
    ----------
    kind : str
        One of the constants of this module.
    axis : int or None
        Of ROWS: the axis that has the samples; one sample may own several rows in succession.
    filled : str or None
        Of ROWS that are all the same: the kind of what they are; CONSTANT for `ones_like`. Of others: SHIFTED, or None.
    merged : int
        Of ROWS: so many axes that lay before the samples' axis were merged into it, as in a
        time-major tensor that is flattened for a product.
    elements : tuple of Dependence
        Of SIZES.
    """

    def __new__(cls, kind, axis=None, filled=None, merged=0, elements=()):
        return super().__new__(cls, kind, axis, filled, merged, elements)


UNIFORM = {kind: Dependence(kind) for kind in STATISTICS + (CONSTANT, SCALED, PLACES, NUMBER, DRAWN, COUPLED)}


def rows(axis=0, filled=None, merged=0):
    """The Dependence of a variable that has samples along an axis."""
    return Dependence(ROWS, axis, filled, merged)


def sizes(elements):
    """The Dependence of a vector, from those of its elements."""
    kinds = {element.kind for element in elements}
    if len(kinds) == 1 and kinds != {ROWS} and kinds != {SIZES}:
        return elements[0]
    return Dependence(SIZES, elements=tuple(elements))
