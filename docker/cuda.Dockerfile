# theano_mgpu on a machine with NVIDIA GPUs. The host needs only NVIDIA's driver and container toolkit. The toolkit brings
# the driver into the container. NVRTC and cuBLAS come from PyPI.
#
#   docker build -f docker/cuda.Dockerfile -t theano_mgpu:cuda .
#   docker run --rm --gpus all theano_mgpu:cuda doctor                               # does each GPU compute?
#   docker run --rm --gpus all -v "$PWD:/work" theano_mgpu:cuda run train.py         # a script of this folder
#
# docs/guide/docker.md says more.
FROM debian:12-slim

# hadolint ignore=DL3008
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        g++ gcc libopenblas-dev python3-dev python3-venv \
        libgpuarray-dev python3-pygpu \
        openmpi-bin python3-mpi4py \
    && rm -rf /var/lib/apt/lists/*

# cuda13 for a driver that supports CUDA 13. NVRTC must not be newer than the driver: nvidia-smi shows "CUDA Version".
ARG CUDA=cuda12
ARG NVRTC=nvidia-cuda-nvrtc-cu12<12.5

COPY . /tmp/theano_mgpu
# The environment sees Debian's pygpu, which is compiled for Debian's NumPy, so it keeps this NumPy. The range of setuptools
# is the same as in pyproject.toml. Theano 1.0.5 is built with this setuptools, too.
RUN python3 -m venv --system-site-packages /opt/theano_mgpu \
    && numpy=$(python3 -c 'import numpy; print(numpy.__version__)') \
    && /opt/theano_mgpu/bin/pip install --no-cache-dir 'setuptools>=64,<81' 'wheel<1' \
    && /opt/theano_mgpu/bin/pip install --no-cache-dir --no-build-isolation --use-pep517 "numpy==$numpy" \
        "/tmp/theano_mgpu[keras,tensorboard,bench,nvidia,$CUDA]" "$NVRTC" \
    && rm -rf /tmp/theano_mgpu

# Any user may run the image, as with `docker run --user`. Theano keeps compiled code in HOME.
RUN mkdir -m 1777 /home/user
# These variables tell the container toolkit which devices and driver libraries to add.
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    PATH=/opt/theano_mgpu/bin:$PATH \
    HOME=/home/user \
    KERAS_BACKEND=theano
WORKDIR /work
ENTRYPOINT ["theano-mgpu"]
