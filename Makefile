# make say: a spoken WAV.  make test: set-up and every check.  Both need only Python >= 3.11 and make.
PYTHON ?= python3
BIN := .venv/bin
WORKERS ?= 2

.PHONY: say test lint format clean

.venv/core: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e .
	@touch $@

.venv/dev: .venv/core requirements-oracle.txt
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[serve,train,measure,test]'
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -r requirements-oracle.txt
	$(BIN)/pip install -q --disable-pip-version-check --no-deps qwen-tts==0.1.1
	@touch $@

say: .venv/core
	@mkdir -p out
	$(BIN)/sottovoce say "Hello, this is Sottovoce." --seed 10 -o out/hello.wav

lint: .venv/dev
	$(BIN)/ruff check .
	$(BIN)/lint-imports

test: lint
	$(BIN)/pytest -n $(WORKERS)

format: .venv/dev
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

clean:
	rm -rf .venv out
