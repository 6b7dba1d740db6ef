# The embedded engine and the pipeline on a CPU. docker build -t kvgate . && docker run --user "$(id -u)" -v "$PWD/work:/work" kvgate kv=fp8
FROM python:3.11-slim-bookworm AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
RUN python -m venv /opt/kvgate
ENV PATH=/opt/kvgate/bin:$PATH
# The CPU build of torch first: nothing after it may replace it by several GB of CUDA.
RUN pip install torch==2.13.0 --extra-index-url https://download.pytorch.org/whl/cpu
WORKDIR /src
COPY pyproject.toml README.md ./
COPY pipeline pipeline
COPY stages stages
COPY plugins plugins
COPY conf conf
RUN pip install .

FROM python:3.11-slim-bookworm
RUN useradd --create-home --uid 1000 kvgate && install -d -o kvgate /work
COPY --from=build /opt/kvgate /opt/kvgate
ENV PATH=/opt/kvgate/bin:$PATH OMP_NUM_THREADS=1
USER kvgate
# -P: a folder of the user's that is named like ours is not ours
ENTRYPOINT ["python", "-P", "-m", "pipeline", "workdir=/work"]
CMD ["--help"]
