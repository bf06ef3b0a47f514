"""Functions of programs that train by NCCL on the CUDA stand-in."""
import warnings

import theano_mgpu as mgpu


def by(step):
    """Return what adds the sums of a step, by its plan."""
    return next(choice.chosen for choice in step.plan.choices if choice.what == 'collectives')


def fails(call):
    """Return the text of a call's error, and of its warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        try:
            call()
            text = ''
        except mgpu.MgpuError as error:
            text = '%s: %s' % (type(error).__name__, error)
    return text, [str(each.message) for each in caught if isinstance(each.message, mgpu.MgpuWarning)]
