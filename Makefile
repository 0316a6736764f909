# Penstock: two commands do everything from nothing: `make run` and `make test`.

PYTHON ?= python3
UV_VERSION := 0.13.7
UV := $(shell command -v uv 2>/dev/null || echo .tools/bin/uv)
BIN := .venv/bin

.PHONY: help run test soak fuzz check format docs wheel lock clean chromium
.DEFAULT_GOAL := help

help: ## list what can be made
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## (.*)/  make \1\t\2/' | expand -t 16

run: .venv/ready ## run the RSVP analyzer: Kafka, Spark, Redis, a lake and a live page
	@$(BIN)/penstock demo

test: .venv/ready chromium ## run all tests, with the real parts
	@$(BIN)/python -m pytest --numprocesses 2 --no-loadscope-reorder

soak: .venv/ready ## run the long tests in their full sizes: an hour, and a table of figures
	@PENSTOCK_SOAK=1 $(BIN)/python -m pytest tests/soak --timeout 3600
	@PENSTOCK_SOAK=1 $(BIN)/python -m pytest tests/collect -k Killed --timeout 3600

fuzz: .venv/ready ## look for inputs that break a framing, PENSTOCK_FUZZ_SECONDS (60) for each
	@mkdir -p .penstock/fuzz
	@for target in $$($(BIN)/python -m tests.fuzz.run); do \
	    log=.penstock/fuzz/$$target.log; \
	    $(BIN)/python -m tests.fuzz.run $$target -max_total_time=$${PENSTOCK_FUZZ_SECONDS:-60} >$$log 2>&1 \
	        || { tail -40 $$log; exit 1; }; \
	    rmdir --ignore-fail-on-non-empty tests/fuzz/corpus/$$target; \
	    echo "$$target: $$(grep -a 'DONE ' $$log)"; \
	done

check: .venv/ready ## check formatting, lint and types
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/ruff check --quiet .
	@$(BIN)/mypy --no-error-summary
	@echo "formatting, lint and types are in order"

format: .venv/ready ## format the code
	@$(BIN)/ruff format --quiet .
	@$(BIN)/ruff check --quiet --fix .

docs: .venv/ready ## build the documentation site (site/)
	@$(BIN)/python docs/generate.py
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "site/index.html"

wheel: | uv ## build the package (dist/)
	@$(UV) build --quiet --wheel

lock: .venv/ready ## resolve the dependencies anew (requirements.lock)
	@$(UV) pip compile --quiet --universal --all-extras --group dev --generate-hashes --no-annotate --no-header \
	    --upgrade --output-file requirements.lock pyproject.toml

clean: ## remove the environment and the state of the demo
	@rm -rf .venv .tools .penstock dist site .mypy_cache .ruff_cache .pytest_cache

# The environment, from the lock alone. Compiled at once: many processes start from it, and each would do it again.
.venv/ready: requirements.lock pyproject.toml | uv
	@echo "making the environment (.venv)"
	@$(UV) venv --quiet --allow-existing --python ">=3.11" .venv
	@$(UV) pip sync --quiet --python $(BIN)/python --compile-bytecode --require-hashes requirements.lock
	@$(UV) pip install --quiet --python $(BIN)/python --no-deps --editable .
	@touch $@

.PHONY: uv
uv:
	@command -v $(UV) >/dev/null 2>&1 || { \
	    echo "installing uv $(UV_VERSION) (.tools)"; \
	    $(PYTHON) -m venv .tools && .tools/bin/pip install --quiet uv==$(UV_VERSION); \
	} || { echo "Python 3.11 or later with its venv module is needed; on Debian: apt install python3-venv"; exit 1; }

# The page is tested in a real browser.
chromium:
	@command -v chromium >/dev/null 2>&1 || command -v chromium-browser >/dev/null 2>&1 || command -v google-chrome >/dev/null 2>&1 || { \
	    if command -v apt-get >/dev/null 2>&1 && [ "$$(id -u)" = 0 ]; then \
	        echo "installing chromium"; \
	        apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq --yes chromium >/dev/null; \
	    else \
	        echo "the tests need a browser: install chromium, on Debian with: sudo apt install chromium"; exit 1; \
	    fi; \
	}
