"""Checks of a Predictor's numbers."""

BATCH_SIZE = 32


def check_numbers(**numbers):
    """Raise a ValueError for an argument that is too small, or not a whole number."""
    for name, number in numbers.items():
        least = 0 if name == 'prefetch' else 1
        if isinstance(number, bool) or not hasattr(number, '__index__') or number < least:
            raise ValueError('%s=%r: give a whole number, at least %d' % (name, number, least))


def chosen_batch_size(batch_size):
    """The `batch_size` of `predict`, or its default; a ValueError if it is not a number of samples."""
    batch_size = BATCH_SIZE if batch_size is None else batch_size
    check_numbers(batch_size=batch_size)
    return batch_size
