"""Compiles all ops of theano.gpuarray.dnn with NVIDIA's own headers of cuDNN, and links them with its libraries.

`make test-cudnn` installs versions of cuDNN into folders and runs this program for all of them. It needs no GPU: the
contexts are on the stand-in for CUDA, the ops are compiled, linked and loaded, but not run.
"""
import argparse
import json
import os
import re
import subprocess
import sys

EPILOG = """\
example:
  python tests/cuda_on_cpu/judge_cudnn.py build/cudnn/nvidia-cudnn-cu12==9.1.*
      prints a table of ops and versions, and the first error of each op that does not compile

The exit status is 1 where an op does not compile; with cuDNN 9, RNN ops have to be refused instead.
"""
BROKEN = {'GpuDnnDropoutOp': "error: ‘PyGpuArrayContext’"}  # with any cuDNN: Theano 1.0.5 spells the type wrongly
MODES = ('rnn_relu', 'rnn_tanh', 'lstm', 'gru')
DTYPES = ('float32', 'float64', 'float16')


def cases(context):
    """Yield the name of each op, with its options, and a function that makes its outputs on a context."""
    import theano
    from theano import tensor as T
    from theano.configdefaults import (
        SUPPORTED_DNN_CONV_ALGO_BWD_DATA,
        SUPPORTED_DNN_CONV_ALGO_BWD_FILTER,
        SUPPORTED_DNN_CONV_ALGO_FWD,
    )
    from theano.gpuarray import dnn
    from theano.gpuarray.type import GpuArrayType

    def array(ndim, dtype='float32'):
        return GpuArrayType(dtype, (False,) * ndim, context_name=context)()

    image, filters, volume, filters3d, matrix = array(4), array(4), array(5), array(5), array(2)
    shape, shape3d = T.lvector(), T.lvector()
    for algorithm in SUPPORTED_DNN_CONV_ALGO_FWD:
        yield 'GpuDnnConv(%s)' % algorithm, lambda algo=algorithm: dnn.dnn_conv(image, filters, algo=algo)
    for algorithm in SUPPORTED_DNN_CONV_ALGO_BWD_FILTER:
        yield ('GpuDnnConvGradW(%s)' % algorithm,
               lambda algo=algorithm: dnn.dnn_gradweight(image, filters, [shape[i] for i in range(4)], algo=algo))
    for algorithm in SUPPORTED_DNN_CONV_ALGO_BWD_DATA:
        yield ('GpuDnnConvGradI(%s)' % algorithm,
               lambda algo=algorithm: dnn.dnn_gradinput(filters, image, [shape[i] for i in range(4)], algo=algo))
    yield 'GpuDnnConv, 3 dimensions', lambda: dnn.dnn_conv3d(volume, filters3d)
    yield ('GpuDnnConvGradW, 3 dimensions',
           lambda: dnn.dnn_gradweight3d(volume, filters3d, [shape3d[i] for i in range(5)]))
    yield ('GpuDnnConvGradI, 3 dimensions',
           lambda: dnn.dnn_gradinput3d(filters3d, volume, [shape3d[i] for i in range(5)]))
    yield 'GpuDnnConv, groups, dilation', lambda: dnn.dnn_conv(image, filters, num_groups=2, dilation=(2, 2))
    for dtype in DTYPES[1:]:
        yield ('GpuDnnConv, %s' % dtype,
               lambda dtype=dtype: dnn.dnn_conv(array(4, dtype), array(4, dtype)))
    for mode in ('max', 'max_deterministic', 'average_inc_pad', 'average_exc_pad', 'sum'):
        def pool(mode=mode):
            return dnn.dnn_pool(image, (2, 2), mode=mode)
        yield 'GpuDnnPool(%s)' % mode, pool
        yield 'GpuDnnPoolGrad(%s)' % mode, lambda pool=pool: T.grad(pool().sum(), image)
    for algorithm in ('fast', 'accurate', 'log'):
        def softmax(algorithm=algorithm):
            return dnn.GpuDnnSoftmax(algorithm, 'channel')(image)
        yield 'GpuDnnSoftmax(%s)' % algorithm, softmax
        yield 'GpuDnnSoftmaxGrad(%s)' % algorithm, lambda softmax=softmax: T.grad(softmax().sum(), image)
    for operation in ('add', 'mul', 'minimum', 'maximum', 'absmax', 'avg', 'norm1', 'norm2'):
        yield ('GpuDnnReduction(%s)' % operation,
               lambda op=operation: dnn.GpuDnnReduction(op, (1,), 'float32', 'float32', False)(matrix))
    yield ('GpuDnnReduction(maximum), indices',
           lambda: dnn.GpuDnnReduction('maximum', (1,), 'float32', 'float32', True)(matrix))
    scale, bias, mean, variance = array(4), array(4), array(4), array(4)
    for mode in ('per-activation', 'spatial'):
        def train(mode=mode):
            return dnn.dnn_batch_normalization_train(image, scale, bias, mode)
        yield 'GpuDnnBatchNorm(%s)' % mode, train
        yield ('GpuDnnBatchNorm(%s), running averages' % mode,
               lambda mode=mode: dnn.dnn_batch_normalization_train(image, scale, bias, mode, running_mean=mean,
                                                                   running_var=variance))
        yield 'GpuDnnBatchNormGrad(%s)' % mode, lambda train=train: T.grad(train()[0].sum(), [image, scale, bias])
        yield ('GpuDnnBatchNormInference(%s)' % mode,
               lambda mode=mode: dnn.dnn_batch_normalization_test(image, scale, bias, mean, variance, mode))
    theta = array(3)
    yield 'GpuDnnTransformerGrid, Sampler', lambda: dnn.dnn_spatialtf(image, theta)
    yield ('GpuDnnTransformerGradI, GradT',
           lambda: T.grad(dnn.dnn_spatialtf(image, theta).sum(), [image, theta]))

    def value(kind):
        # Once a type has made a value, Theano 1.0.5 cannot read a key of compiled code that has the type.
        kept.append(dnn.CUDNNDataType(kind.ctype, kind.freefunc).make_value(1))
        return kept[-1]

    def opaque(kind):
        return kind.make_constant(value(kind))
    yield ('_DropoutDescriptor', lambda: dnn._DropoutDescriptor(context)(.5, 1, context))
    yield ('GpuDnnDropoutOp',
           lambda: dnn.GpuDnnDropoutOp(inplace=True)(matrix, opaque(dnn.dropoutdesc_type), array(1, 'uint8')))
    for mode in MODES:
        yield 'RNN descriptor(%s)' % mode, lambda mode=mode: dnn._RNNDescriptor(context)(
            8, 1, value(dnn.dropoutdesc_type), 'linear', 'unidirectional', mode, 'float32')
    weights, sequence, state, cell = array(1), array(3), array(3), array(3)
    for mode in ('lstm', 'gru'):
        def recurrent(mode=mode):
            dnn._RNNDescriptor(context)
            return dnn.GpuDnnRNNOp(mode, 'unidirectional')(opaque(dnn.rnndesc_type), weights, sequence, state,
                                                           *[cell] * (mode == 'lstm'), return_list=True)[1]
        yield 'GpuDnnRNNOp(%s)' % mode, recurrent
        yield ('GpuDnnRNNGradInputs, GradWeights(%s)' % mode,
               lambda recurrent=recurrent: T.grad(recurrent().sum(), [weights, sequence]))
    yield ('RNN parameters', lambda: [dnn._RNNDescriptor(context), dnn._RNNParamSize(context)(
        value(dnn.rnndesc_type), [1, 2], 0)][1])
    yield ('RNN, split parameters', lambda: [dnn._RNNDescriptor(context), dnn._RNNSplitParams('lstm')(
        weights, value(dnn.rnndesc_type), 0, theano.tensor.as_tensor_variable([1, 2]), 0)][1])


def compile_all():
    """Compile each case, and print a line of JSON for it: its name and its error. The first line has the version."""
    import ctypes

    import theano_mgpu

    import theano
    from theano.gpuarray import dnn
    from theano.gpuarray.type import get_context
    from tqdm import tqdm
    theano_mgpu.init('dev0->cuda0')
    if not dnn.dnn_present():
        print(json.dumps(['version', None, dnn.dnn_present.msg]), flush=True)
        os._exit(1)
    print(json.dumps(['version', dnn.version(), None]), flush=True)
    # The stand-in is no GPU for the real cuDNN. Nothing is run, so any handle does.
    context = get_context('dev0')
    context.cudnn_handle, context.mgpu_against_cudnn, context.mgpu_tried_cudnn = ctypes.c_void_p(1), '', True
    mode = theano.Mode(optimizer=None)
    for name, build in tqdm(list(cases('dev0')), unit='op', disable=None):
        error = None
        try:
            outputs = build()
            outputs = list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]
            inputs = [v for v in theano.gof.graph.inputs(outputs) if not isinstance(v, theano.Constant)]
            kept.append(theano.function(inputs, outputs, mode=mode, on_unused_input='ignore', accept_inplace=True))
        except Exception as reason:
            error = '%s: %s' % (type(reason).__name__, ' '.join(str(reason).split()))
            compilers = re.search(r'error: .*?\. ', error)  # Theano joins the compiler's lines by full stops
            if compilers or len(error) > 400:
                error = compilers.group() if compilers else '%s ... %s' % (error[:200], error[-200:])
        print(json.dumps([name, None, error]), flush=True)
    os._exit(0)


kept = []  # descriptors that are none must not be freed


def judge(folder):
    """Compile all ops with the cuDNN of a folder, in a process on the stand-in.

    Returns
    -------
    version : int or None
    errors : dict
        Name of an op to its error, or None.
    """
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    from cuda_on_cpu import environment
    env = environment(1, version=13000, cc='12.0')
    env['PYTHONPATH'] = os.pathsep.join(filter(None, [os.path.abspath(folder), env.get('PYTHONPATH')]))
    env['THEANO_FLAGS'] = 'floatX=float32,contexts=dev0->cuda0,print_active_device=False'
    done = subprocess.run([sys.executable, os.path.abspath(__file__), '--compile'], env=env, stdout=subprocess.PIPE,
                          text=True)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('["')]
    version = next((version for name, version, _ in lines if name == 'version'), None)
    errors = {name: error for name, _, error in lines if name != 'version' or error}
    if done.returncode or len(errors) < 2:
        errors['the whole run'] = errors.pop('version', None) or 'it ended with status %d' % done.returncode
    return version, errors


def verdict(name, version, error):
    """Return the word for an op in the table; only FAILS is wrong. RNN ops have to be refused with cuDNN 9."""
    if not error:
        return 'compiles'
    if version and version >= 90000 and 'RNN' in name and 'cuDNN 9 lacks' in error:
        return 'refused'
    return 'broken in Theano' if name in BROKEN and BROKEN[name] in error else 'FAILS'


def main(arguments=None):
    parser = argparse.ArgumentParser('python tests/cuda_on_cpu/judge_cudnn.py', epilog=EPILOG,
                                     formatter_class=argparse.RawDescriptionHelpFormatter,
                                     description="Compiles Theano's ops of cuDNN with NVIDIA's headers and libraries.")
    parser.add_argument('folders', nargs='*', metavar='FOLDER', help='of a cuDNN, as pip install --target makes it')
    parser.add_argument('--compile', action='store_true', help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.compile:
        compile_all()
    failed, columns = 0, []
    for folder in options.folders:
        version, errors = judge(folder)
        columns.append((os.path.basename(folder.rstrip('/')), version, errors))
    names = list(dict.fromkeys(name for _, _, errors in columns for name in errors))
    width = max(map(len, names), default=0)
    titles = ['%s (%s)' % (package, version) for package, version, _ in columns]
    print(' '.join([' ' * width, *titles]))
    for name in names:
        words = [verdict(name, version, errors[name]) if name in errors else '-' for _, version, errors in columns]
        failed += words.count('FAILS')
        print(' '.join('%-*s' % pair for pair in zip([width, *map(len, titles)], [name, *words])).rstrip())
    for package, version, errors in columns:
        for name, error in errors.items():
            if verdict(name, version, error) == 'FAILS':
                print('%s: %s: %s' % (package, name, error))
        compiled = sum(error is None for error in errors.values())
        print('%s: %d of %d ops compile' % (package, compiled, len(errors)))
    return 1 if failed or not columns else 0


if __name__ == '__main__':
    sys.exit(main())
