# Everything a newcomer needs: `make demo` and `make test`. Both make .venv first and leave an existing one alone.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
export OMP_NUM_THREADS ?= 1

.PHONY: demo test check clean

# CPU torch comes first, from the index that has only CPU builds where it can be reached: an unbounded one is several GB of CUDA.
$(VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --retries 1 torch==2.13.0 --extra-index-url https://download.pytorch.org/whl/cpu
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[test]'
	touch $@

# The main job: five quantized caches of the tiny model, each built, judged against FP16 and tracked; the graphs that were judged
# become TensorRT plans; the best is promoted.
demo: $(VENV)/installed
	$(BIN)/python -m pipeline -m experiment=demo
	$(BIN)/python -m pipeline -m experiment=demo stage=build backend=tensorrt_rtx backend.compute_dtype=float32
	$(BIN)/python -m pipeline stage=promote

test: check
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile

check: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) work
