# The two commands: `make demo` installs everything into .venv and trains the examples; `make test` is all that CI runs.
# Needed: Linux on x86-64 or aarch64, Rust (rustup), g++, Python 3.11 or newer with venv. Everything else is fetched.

PYTHON ?= python3
VENV   := .venv
OLDEST := .venv-oldest
PY     := $(VENV)/bin/python
UV     := $(VENV)/bin/uv
WHEELS := target/wheels
# Use gets the core fully optimized; clippy, the Rust tests and the Python tests share one quick build with assertions.
PROFILE := release
test test-full check docs test-rust test-object-store test-python test-conformance test-torch-oldest: PROFILE := ci
# What is installed besides; see pyproject.toml.
EXTRAS := examples,test
test test-full test-python: EXTRAS := examples,models,test
# `make test` makes what it needs first, and then its parts make nothing.
PREPARED :=
# What `make test` makes: two at a time, so that one core compiles while the other one waits for the network, fetches and
# unpacks PyTorch, or has one file of C++. Of those that can begin, the first here does; cargo does one thing at a time.
PREPARES := check environment wheel environment-oldest docs-site test-rust install install-oldest test-object-store
# cargo and maturin count their own processes; a share of make's would leave them one core.
COMMA := ,
ALONE := env -u MAKEFLAGS -u MFLAGS
# The part of the Python tests that is repeated with the oldest torch that is supported.
OLDEST_TESTS := tests/test_module_api.py tests/test_import.py tests/test_examples.py tests/test_ops_page.py tests/device/test_rnn.py tests/device/test_sparse.py tests/device/test_interchange.py tests/device/test_func.py tests/device/test_jit_held.py tests/device/test_jit_transforms.py tests/device/test_loops.py::test_gradients tests/device/test_loops.py::test_layers_in_a_loop tests/device/test_while_gradients.py::test_rounds_make_no_program tests/device/test_dynamic_static.py::test_masks_and_unique_of_a_size_stay_on_the_device tests/distributed/test_jitted.py::test_fsdp2_begins_in_a_traced_function
OPS := $(patsubst tests/device/test_%.py,%,$(wildcard tests/device/test_ops_*.py))
# The device tests that are repeated in strict mode: those in which ops meet. What one op gives, what a child process does
# and what sets its mode itself is the same in both.
SAME_IN_STRICT := background buckets cache capacity compile compile_graphs compile_replays compile_training constants fused goldens graphs grouped_mm interchange jit_training linalg numerics offsets $(OPS) overwrite profiler real_models refusals rnn sparse threads trace unfit versions ulps vision loops while_gradients dynamic dynamic_buckets dynamic_compile dynamic_numbers dynamic_static dynamic_training dynamic_loops dynamic_models dynamic_ops dynamic_padding dynamic_parts dynamic_windows warm_up jit_held jit_counts jit_kept jit_moved jit_numbers jit_rates jit_scripts jit_transforms checkpoint func gradients_dropped new_windows jit_elsewhere jit_memory jit_overwritten
# What is repeated with the lowerings of TPUs and GPUs, on the CPU all the same; where GPUs get what TPUs get, once.
# Models have the least effort, as above.
LOWERED_TESTS := tests/device/test_goldens.py tests/device/test_numerics.py
LOWERED_QUICK := tests/device/test_real_models.py
LOWERED_ONCE := tests/device/test_linalg.py tests/device/test_vision.py
# Compiling is most of what tests of the device take, so they take XLA's least effort. What XLA makes of larger programs, and
# how exact they are, these ask, with all effort, and strict mode what is repeated in it.
# PyTorch's own tests, each of which has hundreds of small programs, have the least effort too, and nothing is compiled twice.
ALL_EFFORT := background cache checkpoint constants decompositions dynamic_models fused goldens graphs grouped_mm jit numerics offsets overwrite profiler ulps
# Programs of users. With the oldest torch, the examples have all effort.
QUICK_OTHERS := docs examples integrations
QUICK_TESTS := $(filter-out $(ALL_EFFORT:%=tests/device/test_%.py),$(wildcard tests/device/test_*.py)) $(patsubst %,tests/distributed/test_%.py,collectives jitted libraries programs training) $(QUICK_OTHERS:%=tests/test_%.py)
NO_FMA := $(if $(filter x86_64,$(shell uname -m)),--xla_cpu_max_isa=AVX)
QUICK := XLA_FLAGS="--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1 $(NO_FMA)"
ifdef FULL
QUICK :=
endif
STRICT_TESTS := $(filter-out $(SAME_IN_STRICT:%=tests/device/test_%.py),$(wildcard tests/device/test_*.py))
# `make test` leaves out what takes long and says little more; `make test-full` takes all.
SELECT := -m "not slow"
ifdef FULL
SELECT :=
endif
# Programs that one run has compiled serve the next ones of the same `make`.
TEST_CACHE := $(CURDIR)/target/test-cache
# XLA and PyTorch each start as many threads as there are cores, in each test process. Without bytecode on the disk, which
# some environments ask for, importing PyTorch takes twice as long.
TEST_ENV := OMP_NUM_THREADS=1 PYTHONPATH= PYTHONDONTWRITEBYTECODE= OXITORCH_TEST_CACHE=$(TEST_CACHE)
# Where the plugins of this environment are; the Rust tests do not ask Python.
CPU_PLUGIN := $(CURDIR)/$(VENV)/lib/python3*/site-packages/xla_plugins/xla_cpu_pjrt/xla_cpu_pjrt.so
TPU_PLUGIN := $(CURDIR)/$(VENV)/lib/python3*/site-packages/libtpu/libtpu.so

.PHONY: help demo test test-full bench conformance conformance-aot pytorch-tests environment environment-oldest install install-oldest wheel release-wheel check test-rust test-object-store test-python test-conformance test-torch-oldest docs docs-site clean

help:
	@echo 'make demo         install everything into $(VENV) and train the examples'
	@echo 'make test         everything that CI runs'
	@echo 'make test-full    the same with the tests that take long'
	@echo 'make bench        measure against stock PyTorch on this machine'
	@echo 'make conformance  run all samples of PyTorch'"'"'s databases'
	@echo 'make conformance-aot  compile those samples for TPUs and GPUs that need not be there'
	@echo 'make pytorch-tests DIR=pytorch/test  run PyTorch'"'"'s own test files, read from DIR'
	@echo 'make docs         write the generated pages again'
	@echo 'make docs-site    build the site of the pages into target/site'
	@echo 'make release-wheel  the wheel for everybody: for glibc 2.28, with a shim for each PyTorch'
	@echo 'make clean        remove the virtual environments and build outputs'

demo: install
	$(PY) examples/digits.py --checkpoint $(VENV)/digits.pt
	$(PY) examples/charlm.py --checkpoint $(VENV)/charlm.pt
	$(VENV)/bin/oxitorch doctor

test:
	$(MAKE) --no-print-directory -j2 -Oline PREPARED= ORDERED=1 PROFILE=$(PROFILE) EXTRAS=$(EXTRAS) $(PREPARES)
	$(MAKE) --no-print-directory -j1 PREPARED=1 test-python test-conformance test-torch-oldest

test-full:
	$(MAKE) --no-print-directory FULL=1 test

ifdef ORDERED
wheel: | check
test-rust: | wheel
test-object-store: | test-rust
docs-site: | environment
endif

bench: install
	$(PY) benches/eager.py
	$(PY) benches/workloads.py
	$(PY) benches/varying.py slices
	$(PY) benches/copies.py
	$(PY) benches/sparse.py --check

conformance: install
	$(TEST_ENV) $(PY) -m tests.conformance

# What they make, compiled for TPUs and GPUs that need not be there: hours on two cores.
conformance-aot: install
	$(TEST_ENV) $(PY) -m tests.conformance.aot

# DIR is the folder `test` of PyTorch's sources, near the version of torch that is installed.
pytorch-tests: install
	$(TEST_ENV) $(QUICK) OXITORCH_BACKGROUND_COMPILE=0 $(PY) -m tests.pytorch_tests $(DIR)

# uv installs torch's gigabytes several times faster than pip.
$(UV):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo 'Python 3.11 or newer is needed; make PYTHON=python3.12 picks one'; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { echo 'no venv module: on Debian, apt-get install python3-venv'; exit 1; }
	$(PY) -m pip install -q --disable-pip-version-check 'uv>=0.7' 'maturin>=1.9,<2' 'ruff==0.17.5'

# What is installed beside the wheel. PyTorch brings gigabytes along.
environment: $(UV)
	$(UV) pip install -q --python $(PY) -r pyproject.toml $(patsubst %,--extra %,$(subst $(COMMA), ,$(EXTRAS)))

wheel: $(UV)
	rm -rf $(WHEELS)
	$(ALONE) $(VENV)/bin/maturin build -q --locked --profile $(PROFILE) --interpreter $(PY) --out $(WHEELS)

# Fetches five PyTorch wheels, half a gigabyte each, for their headers. ARGS=--check tries it in environments of its own.
release-wheel: $(UV)
	$(UV) pip install -q --python $(PY) --group release
	$(PY) build_backend/release_wheel.py $(ARGS)

# The wheel goes last and without its dependencies, so that a changed one replaces the one before.
install: wheel environment
	$(UV) pip install -q --python $(PY) --no-deps --force-reinstall $(WHEELS)/oxitorch-*.whl
	$(PY) -c 'import torch; print("oxitorch on", torch.tpu.get_device_name())'

# `--bin xtask` and not `-p xtask`: for one package alone cargo would compile what it shares with the wheel once more, with
# fewer features.
check: $(UV)
	cargo fmt --all --check
	rustfmt --edition 2024 --check crates/aten/src/families/*.rs # modules that a macro declares, which cargo does not see
	$(VENV)/bin/ruff check -q .
	$(VENV)/bin/ruff format -q --check .
	$(ALONE) cargo clippy -q --profile $(PROFILE) --workspace --all-targets --locked -- -D warnings
	$(ALONE) cargo run -q --profile $(PROFILE) --locked --bin xtask -- claims

# Of the environment it needs the plugins.
test-rust: environment
	@unset MAKEFLAGS MFLAGS; export OXITORCH_CPU_PLUGIN="$$(echo $(CPU_PLUGIN))" OXITORCH_TPU_PLUGIN="$$(echo $(TPU_PLUGIN))"; if cargo nextest --version >/dev/null 2>&1; then cargo nextest run --no-fail-fast --cargo-profile $(PROFILE) --workspace --locked; else cargo test -q --profile $(PROFILE) --workspace --locked; fi

# The wheel has no object stores, so they are tested here: less than a minute on two cores with the build. What the crate does
# without them is in `test-rust`.
test-object-store:
	$(ALONE) cargo test -q --profile $(PROFILE) -p oxitorch-cache --features object-store --locked --lib --test objects

ifndef PREPARED
test-python test-conformance: install
test-torch-oldest: install-oldest
endif

test-python:
	rm -rf $(TEST_CACHE)
	$(TEST_ENV) $(PY) -m pytest -q -n 2 --dist worksteal $(SELECT) tests $(QUICK_TESTS:%=--ignore %)
	$(TEST_ENV) $(QUICK) $(PY) -m pytest -q -n 2 --dist worksteal $(SELECT) $(QUICK_TESTS)
	$(TEST_ENV) $(PY) -m pytest -q -n 2 --dist worksteal $(SELECT) --mode strict $(STRICT_TESTS)
	$(TEST_ENV) OXITORCH_LOWER_FOR=cuda $(PY) -m pytest -q -n 2 --dist worksteal $(SELECT) $(LOWERED_TESTS)
	$(TEST_ENV) OXITORCH_LOWER_FOR=cuda $(QUICK) $(PY) -m pytest -q -n 2 --dist worksteal $(SELECT) $(LOWERED_QUICK)
	$(TEST_ENV) OXITORCH_LOWER_FOR=tpu $(PY) -m pytest -q -n 2 --dist worksteal $(SELECT) $(LOWERED_TESTS)
	$(TEST_ENV) OXITORCH_LOWER_FOR=tpu $(QUICK) $(PY) -m pytest -q -n 2 --dist worksteal $(SELECT) $(LOWERED_QUICK) $(LOWERED_ONCE)

# A few samples of every entry of PyTorch's databases; `make conformance` runs all of them.
test-conformance:
	$(TEST_ENV) $(PY) -m tests.conformance --smoke --jobs 2
	$(TEST_ENV) OXITORCH_LOWER_FOR=tpu $(PY) -m tests.conformance --smoke --jobs 2
	$(TEST_ENV) $(PY) -m tests.conformance.aot --smoke --jobs 2 --slice v5e-1 --slice cuda:h200

environment-oldest: $(UV)
	@test -x $(OLDEST)/bin/python || $(PYTHON) -m venv --without-pip $(OLDEST)
	$(UV) pip install -q --python $(OLDEST)/bin/python 'torch==2.11.*' -r pyproject.toml --extra examples --extra test

install-oldest: wheel environment-oldest
	$(UV) pip install -q --python $(OLDEST)/bin/python --no-deps --force-reinstall $(WHEELS)/oxitorch-*.whl
	$(OLDEST)/bin/python -c 'import torch; print("oxitorch with torch", torch.__version__, "on", torch.tpu.get_device_name())'

test-torch-oldest:
	$(TEST_ENV) $(OLDEST)/bin/python -m pytest -q -n 2 --dist worksteal $(SELECT) $(OLDEST_TESTS)

docs: $(UV)
	cargo run -q --profile $(PROFILE) --locked --bin xtask -- pages

# Links and anchors that lead nowhere end the build. The variable keeps an announcement of the theme's away.
docs-site: $(UV)
	$(UV) pip install -q --python $(PY) --group docs
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build -q --strict

clean:
	rm -rf $(VENV) $(OLDEST) target
