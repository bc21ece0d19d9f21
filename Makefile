# The targets do all set-up on a fresh machine; the commands themselves live in scripts/.
# `make test EXTRAS=dev,eval,ray,gpu` also runs the tests of lm-eval, of Ray Serve and of Triton, and after `scripts/clients`
# those of LangChain, LiteLLM and instructor.
PYTHON ?= python3
EXTRAS ?= dev

.PHONY: demo test check suite thorough soak docs
demo: .venv/installed-lab
	scripts/demo
test: check suite
suite: .venv/installed-$(EXTRAS)
	scripts/test
check: .venv/installed-$(EXTRAS)
	scripts/check
thorough: .venv/installed-$(EXTRAS)
	scripts/thorough
soak: .venv/installed-$(EXTRAS)
	scripts/soak
docs: .venv/installed-$(EXTRAS)
	scripts/docs

# One stamp for each set of extras. All sets go into one environment, so an installed set stays.
.venv/installed-%: pyproject.toml constraints.txt
	@echo "Installing remask with PyTorch and the extras '$*' into .venv. This happens once, and takes minutes."
	test -x .venv/bin/python || $(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --constraint constraints.txt --editable '.[$*]'
	touch $@
