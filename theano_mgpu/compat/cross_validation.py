"""The names of ``sklearn.cross_validation``, which scikit-learn 0.20 removed: `removed_names` has scripts find them.

Folds take the number of samples, or the targets, and are lists of the rows for training and for testing.
"""
from sklearn import model_selection
from sklearn.model_selection import *  # noqa: F403


def KFold(n, n_folds=3, **options):
    """Return the folds of n samples."""
    return list(model_selection.KFold(n_folds, **options).split(range(n)))


def StratifiedKFold(y, n_folds=3, **options):
    """Return folds that each have as many samples of a class as the others."""
    return list(model_selection.StratifiedKFold(n_folds, **options).split(y, y))
