# make demo: profile, search and emit on a real server with a real model
# make test: every check and test, real servers included

VENV ?= .venv
MODEL ?=
DEMO_DIR ?= kvtune-demo
SMALL_MODEL := .model/SmolLM2-135M-Instruct

.PHONY: demo test check fast integration install install-test model clean

demo: install
	@VENV=$(VENV) MODEL="$(MODEL)" DEMO_DIR="$(DEMO_DIR)" SMALL_MODEL=$(SMALL_MODEL) demo/run

test: check fast integration

install:
	@requirements/install $(VENV)

install-test:
	@requirements/install $(VENV) test

model: install
	@$(VENV)/bin/python demo/fetch_model.py $(SMALL_MODEL)

check: install-test
	@VENV=$(VENV) tests/check

fast: install-test
	$(VENV)/bin/pytest -m "not integration" -n 3 --dist worksteal

integration: install-test model
	KVTUNE_TEST_MODEL="$(or $(MODEL),$(CURDIR)/$(SMALL_MODEL))" $(VENV)/bin/pytest -m integration

clean:
	rm -rf build $(DEMO_DIR)
