"""Numbers in a form that can be compared, for the programs of this folder."""
import numpy as np


def show(name, values):
    """Print numbers with their first seven digits."""
    print(name, *('%.7g' % value for value in np.ravel(values)))


def show_sums(name, arrays):
    """Print the sum of the absolute values of each array."""
    show(name, [abs(array).sum() for array in arrays])
