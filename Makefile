# `make demo` and `make test` do all set-up on a fresh machine; the commands themselves live in scripts/.
PYTHON ?= python3

.PHONY: demo test check soak
demo: .venv/installed
	scripts/demo
test: .venv/installed
	scripts/check
	scripts/test
check: .venv/installed
	scripts/check
soak: .venv/installed
	scripts/soak

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@
