# kvgate in a container: docs/operate.md#containers.
#   docker build --target cpu -t kvgate:cpu .          the pipeline and MLflow's server on any CPU
#   docker build --target trtllm -t kvgate:trtllm .    the pipeline and TensorRT-LLM 1.2.1, for backend=trtllm
# To pin an image by digest: --build-arg PYTHON_IMAGE=python@sha256:... (or TRTLLM_IMAGE=...).
ARG PYTHON_IMAGE=python:3.11.14-slim-bookworm
ARG TRTLLM_IMAGE=nvcr.io/nvidia/tensorrt-llm/release:1.2.1

# Every package is locked by version and SHA-256 (requirements/lock); torch is locked by version only, because its build depends on the machine.
FROM ${PYTHON_IMAGE} AS wheel
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
COPY requirements/build.lock /build/
RUN pip install --require-hashes -r /build/build.lock
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY pipeline pipeline
COPY stages stages
COPY plugins plugins
COPY conf conf
RUN pip wheel --no-deps --no-build-isolation --wheel-dir /dist .

FROM ${PYTHON_IMAGE} AS cpu-venv
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
COPY requirements/build.lock requirements/run.lock /build/
COPY --from=wheel /dist /build/dist
RUN python -m venv /opt/kvgate
ENV PATH=/opt/kvgate/bin:$PATH
# The build tools of the one package without a wheel come first.
RUN pip install --require-hashes -r /build/build.lock \
    && pip install --no-deps torch==2.13.0 --extra-index-url https://download.pytorch.org/whl/cpu \
    && pip install --no-deps --no-build-isolation --require-hashes -r /build/run.lock \
    && pip install --no-deps /build/dist/kvgate-*.whl \
    && pip check

FROM ${PYTHON_IMAGE} AS cpu
# A fresh volume gets the owner of the directory that it is mounted on. MLflow's server keeps its files in /artifacts.
RUN useradd --uid 10001 --user-group --no-create-home kvgate && install -d -o 10001 -g 10001 /work /artifacts
COPY --from=cpu-venv /opt/kvgate /opt/kvgate
# `docker run --user` may name a user without an entry in /etc/passwd, who would otherwise lack HOME and USER.
ENV PATH=/opt/kvgate/bin:$PATH HOME=/tmp USER=kvgate
USER 10001:10001
WORKDIR /work
HEALTHCHECK --interval=30s --timeout=20s --start-period=10s --retries=3 CMD ["python", "-P", "-m", "pipeline", "--version"]
# -P keeps the working directory off the import path, because it may contain a folder with the name of a kvgate package.
ENTRYPOINT ["python", "-P", "-m", "pipeline", "workdir=/work"]
CMD ["--help"]

FROM ${TRTLLM_IMAGE} AS trtllm
USER 0
COPY requirements/build.lock requirements/run.lock /build/
COPY --from=wheel /dist /build/dist
# The image's own Python (3.12) belongs to TensorRT-LLM, and the image constrains what pip may install for it. The pipeline
# gets a separate environment. Ubuntu's Python has no ensurepip, so virtualenv installs pip.
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
RUN PIP_CONSTRAINT='' /usr/bin/python3 -m pip install --target /build/virtualenv virtualenv==20.35.4 \
    && PYTHONPATH=/build/virtualenv /usr/bin/python3 -m virtualenv /opt/kvgate \
    && export PIP_CONSTRAINT='' \
    && /opt/kvgate/bin/pip install --require-hashes -r /build/build.lock \
    && /opt/kvgate/bin/pip install --no-deps torch==2.13.0 --extra-index-url https://download.pytorch.org/whl/cpu \
    && /opt/kvgate/bin/pip install --no-deps --no-build-isolation --require-hashes -r /build/run.lock \
    && /opt/kvgate/bin/pip install --no-deps /build/dist/kvgate-*.whl \
    && /opt/kvgate/bin/pip check \
    && rm -r /build
RUN useradd --uid 10001 --user-group --no-create-home kvgate && install -d -o 10001 -g 10001 /work
# backend.python is TensorRT-LLM's interpreter unless the command line says otherwise.
ENV PATH=/opt/kvgate/bin:$PATH HOME=/tmp USER=kvgate KVGATE_TRTLLM_PYTHON=/usr/bin/python3
USER 10001:10001
WORKDIR /work
HEALTHCHECK --interval=30s --timeout=20s --start-period=10s --retries=3 CMD ["python", "-P", "-m", "pipeline", "--version"]
ENTRYPOINT ["python", "-P", "-m", "pipeline", "workdir=/work"]
CMD ["--help"]
