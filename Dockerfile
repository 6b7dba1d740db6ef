# kvgate in a container: docs/docker.md.
#   docker build --target cpu -t kvgate:cpu .          the pipeline and MLflow's server on any CPU
#   docker build --target trtllm -t kvgate:trtllm .    the pipeline beside TensorRT-LLM 1.2.1, for backend=trtllm
# A digest in place of a tag: --build-arg PYTHON_IMAGE=python@sha256:... (or TRTLLM_IMAGE=...).
ARG PYTHON_IMAGE=python:3.11.14-slim-bookworm
ARG TRTLLM_IMAGE=nvcr.io/nvidia/tensorrt-llm/release:1.2.1

# Two variables pin what builds a wheel (setuptools): pip 24 reads the first, pip 26 only the second.
FROM ${PYTHON_IMAGE} AS wheel
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
ENV PIP_CONSTRAINT=/build/constraints.txt PIP_BUILD_CONSTRAINT=/build/constraints.txt
COPY docs/docker/constraints.txt /build/
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY pipeline pipeline
COPY stages stages
COPY plugins plugins
COPY conf conf
RUN pip wheel --no-deps --wheel-dir /dist .

FROM ${PYTHON_IMAGE} AS cpu-venv
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
ENV PIP_CONSTRAINT=/build/constraints.txt PIP_BUILD_CONSTRAINT=/build/constraints.txt
COPY docs/docker/constraints.txt /build/
COPY --from=wheel /dist /build/dist
RUN python -m venv /opt/kvgate
ENV PATH=/opt/kvgate/bin:$PATH
# The CPU build of torch first: nothing after it may replace it by several GB of CUDA.
RUN pip install torch==2.13.0 --extra-index-url https://download.pytorch.org/whl/cpu
RUN pip install "$(echo /build/dist/kvgate-*.whl)[postgres]"

FROM ${PYTHON_IMAGE} AS cpu
# A fresh volume gets the owner of the directory that it is mounted on. MLflow's server keeps its files in /artifacts.
RUN useradd --uid 10001 --user-group --no-create-home kvgate && install -d -o 10001 -g 10001 /work /artifacts
COPY --from=cpu-venv /opt/kvgate /opt/kvgate
# `docker run --user` may name a user without an entry in /etc/passwd, who would have neither HOME nor USER.
ENV PATH=/opt/kvgate/bin:$PATH HOME=/tmp USER=kvgate
USER 10001:10001
WORKDIR /work
HEALTHCHECK --interval=30s --timeout=20s --start-period=10s --retries=3 CMD ["python", "-P", "-m", "pipeline", "--version"]
# -P keeps the working directory off the import path: a folder in it may have the name of one of kvgate's packages.
ENTRYPOINT ["python", "-P", "-m", "pipeline", "workdir=/work"]
CMD ["--help"]

FROM ${TRTLLM_IMAGE} AS trtllm
USER 0
COPY docs/docker/constraints.txt /build/
COPY --from=wheel /dist /build/dist
# The image's own Python (3.12) belongs to TensorRT-LLM, and the image constrains what pip may install for it. The pipeline
# gets an environment of its own, made without touching that one: Ubuntu's Python has no ensurepip, virtualenv brings pip.
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
RUN PIP_CONSTRAINT='' /usr/bin/python3 -m pip install --target /build/virtualenv virtualenv==20.35.4 \
    && PYTHONPATH=/build/virtualenv /usr/bin/python3 -m virtualenv /opt/kvgate \
    && export PIP_CONSTRAINT=/build/constraints.txt PIP_BUILD_CONSTRAINT=/build/constraints.txt \
    && /opt/kvgate/bin/pip install \
        torch==2.13.0 --extra-index-url https://download.pytorch.org/whl/cpu \
    && /opt/kvgate/bin/pip install "$(echo /build/dist/kvgate-*.whl)[postgres]" \
    && rm -r /build
RUN useradd --uid 10001 --user-group --no-create-home kvgate && install -d -o 10001 -g 10001 /work
# backend.python is TensorRT-LLM's interpreter unless the command line says otherwise.
ENV PATH=/opt/kvgate/bin:$PATH HOME=/tmp USER=kvgate KVGATE_TRTLLM_PYTHON=/usr/bin/python3
USER 10001:10001
WORKDIR /work
HEALTHCHECK --interval=30s --timeout=20s --start-period=10s --retries=3 CMD ["python", "-P", "-m", "pipeline", "--version"]
ENTRYPOINT ["python", "-P", "-m", "pipeline", "workdir=/work"]
CMD ["--help"]
