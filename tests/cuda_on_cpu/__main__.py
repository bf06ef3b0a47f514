"""The command line of the CUDA stand-in: ``python tests/cuda_on_cpu --help``."""
import argparse
import os
import sys

if not __package__:  # run as a folder: Python then puts the folder itself on the path, not its parent
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
from cuda_on_cpu import Unavailable, build, environment

EPILOG = """\
examples:
  python tests/cuda_on_cpu run .venv/bin/theano-mgpu devices
      lists two devices, cuda0 and cuda1
  python tests/cuda_on_cpu run --devices 4 .venv/bin/theano-mgpu doctor
  python tests/cuda_on_cpu run .venv/bin/theano-mgpu run --always --verify train.py
      divides each batch of a script, and compares the first one with one device
  python tests/cuda_on_cpu run --set MEMORY=256M --set FAIL=1:100 python train.py
      each device has 256 MiB, and device 1 fails for good after 100 kernels
  python tests/cuda_on_cpu run --set TRACE=- python -c "import pygpu; pygpu.init('cuda0')"
      prints every allocation, copy and kernel
  python tests/cuda_on_cpu run --cudnn 9 --set CC=12.0 .venv/bin/theano-mgpu doctor
      Theano finds cuDNN 9, on devices of compute capability 12.0; without --cudnn, a note says that there is none
  python tests/cuda_on_cpu build --versioned
      makes libcuda.so.1, libnvrtc.so.12 and libcublas.so.12 and prints their folder

theano-mgpu run takes all devices. Other programs use the contexts in Theano's flags:
THEANO_FLAGS='contexts=dev0->cuda0;dev1->cuda1'.
README.md beside this program lists the settings, and says what a test on the stand-in proves.
"""


def parse(arguments):
    """Read the command line.

    Returns
    -------
    argparse.Namespace
    """
    parser = argparse.ArgumentParser('python tests/cuda_on_cpu', epilog=EPILOG,
                                     formatter_class=argparse.RawDescriptionHelpFormatter,
                                     description='Runs programs for NVIDIA GPUs on the processor.')
    commands = parser.add_subparsers(dest='action', metavar='{run,build}', required=True)
    run = commands.add_parser('run', help='build the libraries if need be, then run a command on them')
    run.add_argument('--devices', type=int, default=2, metavar='N', help='number of devices (default: 2)')
    run.add_argument('--cudnn', choices=('7', '8', '9'), help='a version of cuDNN (default: there is none)')
    run.add_argument('--set', action='append', default=[], metavar='NAME=VALUE', dest='settings', type=setting,
                     help='a setting, without its prefix CUDA_ON_CPU_; may be repeated')
    run.add_argument('command', nargs=argparse.REMAINDER, metavar='COMMAND ...', help='the command and its arguments')
    make = commands.add_parser('build', help='build the libraries and print their folder')
    make.add_argument('--versioned', action='store_true', help='names with versions, such as libcuda.so.1, only')
    options = parser.parse_args(arguments)
    if options.action == 'run':
        if options.command[:1] == ['--']:
            del options.command[0]
        if not options.command:
            run.error('a COMMAND is missing, such as: .venv/bin/theano-mgpu devices')
    return options


def setting(text):
    """Return ``NAME=VALUE`` as a pair.

    >>> setting('MEMORY=64M')
    ('MEMORY', '64M')
    """
    name, equals, value = text.partition('=')
    if not equals or not name:
        raise argparse.ArgumentTypeError('%r is not NAME=VALUE' % text)
    return name, value


def tell(line):
    """Print a line of the build on stderr."""
    print('cuda-on-cpu: ' + line, file=sys.stderr, flush=True)


def main(arguments=None):
    options = parse(arguments)
    try:
        if options.action == 'build':
            print(build(options.versioned, tell=tell))
            return 0
        build(cudnn=options.cudnn, tell=tell)
        env = environment(options.devices, cudnn=options.cudnn,
                          **{name.lower(): value for name, value in options.settings})
        os.execvpe(options.command[0], options.command, env)
    except Unavailable as exc:
        print(exc, file=sys.stderr)
    except OSError as exc:
        tell('cannot run %s: %s. Give its path, as in .venv/bin/theano-mgpu' % (options.command[0], exc.strerror))
    return 1


if __name__ == '__main__':
    sys.exit(main())
