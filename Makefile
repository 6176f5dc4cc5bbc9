# make demo   transcribe a recording end to end and show where the time went
# make test   all default tests
# make check  lint, types, layers and tests

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
AUDIO ?= tests/recordings/demo.flac
export THIMBLE_DATA_DIR ?= $(CURDIR)/.thimble
MODEL ?= tiny.en

.PHONY: demo test check run lint types layers test-slow test-parity test-arm test-arm-full test-image model clean

demo: $(VENV)/.installed model
	$(BIN)/python deploy/demo.py "$(AUDIO)"

test: $(VENV)/.tested model
	@$(BIN)/thimble fetch $(MODEL) --weights f16
	$(BIN)/python -m pytest -m "not slow and not parity and not image"

check: lint types layers test

run: $(VENV)/.installed model
	@echo 'curl -F file=@$(AUDIO) http://127.0.0.1:$${THIMBLE_PORT:-8000}/transcribe'
	$(BIN)/python -m service

lint: $(VENV)/.checked
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.checked
	$(BIN)/mypy

layers: $(VENV)/.checked
	$(BIN)/lint-imports

# Long (fifty requests against fifty workers), or in need of packages that the default run does not install (torch, transformers).
test-slow: $(VENV)/.tested model
	$(BIN)/python -m pytest -m slow

# Against recordings and answers beside the project (THIMBLE_SHARED, by default ../shared).
test-parity: $(VENV)/.tested model
	@$(BIN)/thimble fetch $(MODEL) --weights f16
	@$(BIN)/thimble fetch base
	$(BIN)/python -m pytest -m parity

# The engine's tests on the boards' processors, emulated side by side; then the shortest recording (or all of them: half an
# hour), token for token what x86-64 hears. Not in it: downloads, which are the same everywhere, and long loops.
ARM_SKIPS := --ignore tests/engine/test_fetch.py --deselect tests/engine/test_audio.py::test_a37_memory_does_not_grow_with_the_recording
ARM_TESTS := tests/engine -m "not weights and not slow" $(ARM_SKIPS)
ARM_TOKENS := tests/engine/test_tokens.py -k digits

test-arm: $(VENV)/.tested model
	@tests/arm/both.sh $(ARM_TESTS)
	@tests/arm/both.sh $(ARM_TOKENS)

test-arm-full: ARM_TOKENS := tests/engine/test_tokens.py
test-arm-full: test-arm

# The image and its compose file, with Docker.
test-image: $(VENV)/.tested
	$(BIN)/python -m pytest -m image tests/image

model: $(VENV)/.installed
	@$(BIN)/thimble fetch $(MODEL)

clean:
	rm -rf $(VENV) .thimble

# Each stamp is newer than pyproject.toml once its extras are installed; nothing is asked of the network after that.
$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed; set PYTHON="; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { echo "venv is missing: sudo apt install python3-venv"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml | $(VENV)/bin/python
	$(BIN)/pip install --quiet --editable .
	@touch $@

$(VENV)/.tested: pyproject.toml $(VENV)/.installed
	$(BIN)/pip install --quiet --editable '.[test,measure]'
	@touch $@

$(VENV)/.checked: pyproject.toml $(VENV)/.tested
	$(BIN)/pip install --quiet --editable '.[test,measure,check]'
	@touch $@
