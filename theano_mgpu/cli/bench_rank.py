"""The script that `theano-mgpu bench` has `theano-mgpu launch` run; see bench_worker.py."""
import os
import sys

if __name__ == '__main__':
    # Python put this folder first, whose config.py and others are not for everybody who imports such names.
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    from theano_mgpu.cli.bench_worker import work
    work(sys.argv[1:])
