# `make demo` and `make test` do all set-up on a fresh machine; the commands themselves live in scripts/.
PYTHON ?= python3

.PHONY: demo test check soak docs
demo: .venv/installed
	scripts/demo
test: .venv/installed
	scripts/check
	scripts/test
check: .venv/installed
	scripts/check
soak: .venv/installed
	scripts/soak
docs: .venv/installed
	scripts/docs

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@
