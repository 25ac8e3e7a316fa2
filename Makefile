# Everything from a bare checkout: no activated environment, nothing installed beforehand but Python and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --constraint constraints.txt

# What the caller's shell carries must not reach into the environment built here.
unexport PYTHONPATH PYTHONHOME VIRTUAL_ENV
export PIP_USER := 0
export PIP_DISABLE_PIP_VERSION_CHECK := 1

# Minutes of `make fuzz`, over all formats; INPUTS=300 ends each format after so many, the same in every run.
MINUTES ?= 10

.PHONY: picture help demo test test-slow test-all test-drivers fuzz check format runner wheel clean

help:
	@echo "make demo       predict the training step of a ResNet-50 on a Jetson TX2"
	@echo "make test       run the main tests (five to eight minutes)"
	@echo "make test-slow  run the tests that make test leaves out (about fifty minutes)"
	@echo "make test-all   run every test, all with optimized kernels"
	@echo "make test-drivers  run the drivers' suite on every OpenCL device at hand, and print a table"
	@echo "make fuzz       mutate files of every format for MINUTES=$(MINUTES) (Linux on x86-64)"
	@echo "make check      ruff, mypy and import-linter"
	@echo "make picture    draw the report of docs/images again (needs chromium)"
	@echo "make format     let ruff rewrite what it can"
	@echo "make runner     build the native runner into build/runner/ (needs cmake, a C++17 compiler, nlohmann-json, OpenSSL)"
	@echo "make wheel      build sdist and wheel into dist/"
	@echo "make clean      remove the environment, caches and builds"

demo: $(VENV)/demo.stamp
	$(BIN)/torchedge predict resnet50 --batch-size 32 --device jetson-tx2

test: $(VENV)/dev.stamp
	$(BIN)/python -m pytest

test-slow: $(VENV)/dev.stamp
	$(BIN)/python -m pytest -m slow

test-all: $(VENV)/dev.stamp
	$(BIN)/python -m pytest -m 'slow or not slow'

test-drivers: $(VENV)/dev.stamp
	$(BIN)/python tests/drivers/run.py $(DRIVERS)

fuzz: $(VENV)/dev.stamp
	$(BIN)/python tests/fuzzing/run.py --minutes $(MINUTES) $(if $(INPUTS),--inputs $(INPUTS))

check: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

picture: $(VENV)/dev.stamp
	mkdir -p build
	$(BIN)/torchedge report resnet50 --batch-size 32 --device jetson-tx2 --html build/report.html
	chromium --headless --no-sandbox --disable-gpu --hide-scrollbars --window-size=1000,1130 \
		--screenshot=build/report.png file://$(CURDIR)/build/report.html
	$(BIN)/python -c "from PIL import Image; Image.open('build/report.png').convert('P', palette=1, colors=64).save('docs/images/report.png', optimize=True)"

format: $(VENV)/dev.stamp
	$(BIN)/ruff check --fix --exit-zero .
	$(BIN)/ruff format .

# Needs no Python. Debian: apt-get install g++ cmake nlohmann-json3-dev libssl-dev; what is missing CMake fetches.
runner:
	@command -v cmake >/dev/null || { echo "make: no cmake found; install it (Debian: apt-get install g++ cmake nlohmann-json3-dev libssl-dev)" >&2; exit 1; }
	cmake -S export/runner -B build/runner
	cmake --build build/runner --parallel
	@echo "build/runner/torchedge-run --help; docs/runner.md"

wheel: $(VENV)/dev.stamp
	rm -rf dist
	$(BIN)/python -m build --no-isolation

clean:
	rm -rf $(VENV) dist build .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A stamp is older than what it depends on: install again. A half-built environment is built afresh.
$(VENV)/python.stamp:
	@command -v "$(PYTHON)" >/dev/null || { \
	  echo "make: no '$(PYTHON)' found; torchedge needs Python 3.10 or newer: install it, or name one: make PYTHON=python3.12 ..." >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "make: '$(PYTHON)' is $$("$(PYTHON)" --version 2>&1); torchedge needs Python 3.10 or newer: make PYTHON=python3.12 ..." >&2; exit 1; }
	@"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "make: '$(PYTHON)' cannot make virtual environments; install its venv package (Debian, Ubuntu: apt install python3-venv)" >&2; exit 1; }
	"$(PYTHON)" -m venv --clear $(VENV)
	@touch $@

$(VENV)/demo.stamp: $(VENV)/python.stamp pyproject.toml constraints.txt
	@echo "Installing torchedge into $(VENV) (a minute or two) ..."
	$(PIP) --editable '.[vision]'
	@touch $@

$(VENV)/dev.stamp: $(VENV)/python.stamp pyproject.toml constraints.txt
	@echo "Installing torchedge with all extras into $(VENV) (a few minutes) ..."
	$(PIP) --editable '.[all,dev]'
	@touch $@ $(VENV)/demo.stamp
