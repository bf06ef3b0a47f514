"""Parameters of tests of which most, or some, are slow."""
import pytest


def slow_but(quick, values):
    """Return values for `pytest.mark.parametrize`; the ones that are not among `quick` are slow."""
    return [value if value in quick else pytest.param(value, marks=pytest.mark.slow) for value in values]


# For tests with the fixture `kind` that others run on a GPU as well.
SLOW_ON_GPU = pytest.mark.parametrize('kind', ['cpu', pytest.param('gpu', marks=pytest.mark.slow)])


def mark_slow(variants):
    """Mark the slow ones among all variants of a test: those that `slow_with` names, or `slow_but_with` does not.

    Both markers take the names that pytest prints between brackets, or their beginnings and an asterisk. A name that no
    variant has is an error.
    """
    named = {variant.callspec.id: variant for variant in variants if hasattr(variant, 'callspec')}
    for marker in ('slow_with', 'slow_but_with'):
        for mark in variants[0].iter_markers(marker):
            found = {name: {each for each in named if _is_like(each, name)} for name in mark.args}
            unknown = [name for name in mark.args if not found[name]]
            if unknown:
                raise pytest.UsageError('%s: %s names variants that do not exist: %s; there are %s' % (
                    variants[0].nodeid, marker, unknown, sorted(named)))
            marked = set().union(*found.values())
            for name, variant in named.items():
                if (name in marked) == (marker == 'slow_with'):
                    variant.add_marker('slow')


def _is_like(name, pattern):
    return name == pattern or pattern.endswith('*') and name.startswith(pattern[:-1])
