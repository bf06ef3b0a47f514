# theano_mgpu on a machine without a GPU: the CPU as contexts, as two OpenCL devices of PoCL, and as MPI processes.
#
#   docker build -f docker/cpu.Dockerfile -t theano_mgpu:cpu .
#   docker run --rm theano_mgpu:cpu                                                  # the devices, and useful commands
#   docker run --rm -v "$PWD:/work" theano_mgpu:cpu launch -n 2 run train.py         # a script of this folder
#
# docs/guide/docker.md says more.
FROM debian:12-slim

# hadolint ignore=DL3008
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        g++ gcc libopenblas-dev python3-dev python3-venv \
        libgpuarray-dev python3-pygpu \
        libclblast-dev libclblast1 pocl-opencl-icd \
        openmpi-bin python3-mpi4py \
    && rm -rf /var/lib/apt/lists/*

COPY . /tmp/theano_mgpu
# The environment sees Debian's pygpu, which is compiled for Debian's NumPy, so it keeps this NumPy. The range of setuptools
# is the same as in pyproject.toml. Theano 1.0.5 is built with this setuptools, too.
RUN python3 -m venv --system-site-packages /opt/theano_mgpu \
    && numpy=$(python3 -c 'import numpy; print(numpy.__version__)') \
    && /opt/theano_mgpu/bin/pip install --no-cache-dir 'setuptools>=64,<81' 'wheel<1' \
    && /opt/theano_mgpu/bin/pip install --no-cache-dir --no-build-isolation --use-pep517 "numpy==$numpy" \
        '/tmp/theano_mgpu[keras,tensorboard,bench]' \
    && rm -rf /tmp/theano_mgpu

# Any user may run the image, as with `docker run --user`. Theano keeps compiled code in HOME.
RUN mkdir -m 1777 /home/user
ENV PATH=/opt/theano_mgpu/bin:$PATH \
    HOME=/home/user \
    KERAS_BACKEND=theano
WORKDIR /work
ENTRYPOINT ["theano-mgpu"]
