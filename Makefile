# Umbra: build, test and try it. Every target first makes sure that what it needs is installed (scripts/setup.sh).

CARGO ?= cargo
export PATH := $(PATH):$(HOME)/.cargo/bin

# Open MPI refuses to start as root unless both of these say that it is meant (containers, CI).
ifeq ($(shell id -u),0)
export OMPI_ALLOW_RUN_AS_ROOT := 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM := 1
endif

.DEFAULT_GOAL := help
.PHONY: help build test demo bench matrix matrix-mutation soak

help: ## say what can be made
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 24

build: ## build target/release/umbra
	@scripts/setup.sh
	$(CARGO) build --release

# One profile and one target directory for everything: the tests run what `make build` builds. The test runner comes last,
# so that its summary ends the output.
test: ## formatting, lints, a build without MPI, then every test
	@scripts/setup.sh --test
	$(CARGO) fmt --all --check
	$(CARGO) clippy --workspace --all-targets --release -- -D warnings
	$(CARGO) check -p umbra --no-default-features --release
	$(CARGO) build --release
	$(CARGO) test --workspace --release --no-fail-fast

demo: build ## three precision policies on four ranks, side by side: a table and demo-out/loss.svg
	@scripts/demo.sh

bench: build ## tokens per second of a 32M model on two ranks, beside its matrix products alone
	@scripts/bench.sh

# Without -p, so that every crate is built with the features it has in the tests.
matrix: build ## train every recipe on every layout and compare the bits (many minutes); `make test` runs a part of it
	$(CARGO) test --release --test suite -- --ignored --exact --nocapture matrix::the_whole

matrix-mutation: ## break sums on purpose in a copy of the tree and expect the matrix to notice
	@scripts/setup.sh
	@scripts/matrix_mutants.sh

soak: build ## 100 runs killed at a random moment, each started again (SOAK_KILLS, SOAK_SEED)
	$(CARGO) test --release --test suite -- --ignored --exact --nocapture kills::many_kills_change_nothing
