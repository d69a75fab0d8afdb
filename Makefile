# HeadCNI. `make` alone lists the targets.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

NODES ?= 3
UNDERLAY ?=
KEEP ?=
K3S ?=
KUBEADM ?=
HEADSCALE ?=
VMS ?= 0
ONLY ?=
RETRY ?=
NODE ?= node1
SCENARIO ?= $(filter-out vm,$(sort $(notdir $(patsubst %/,%,$(dir $(wildcard molecule/*/molecule.yml))))))

PY := .venv/bin/python
PYTEST := $(PY) -m pytest
# RETRY=1: what failed is run once more, on a lab of its own. CI does that, since the tests have
# real clocks and networks; both runs are in its log, and a test that passed only then has a bug.
pytest = $(PYTEST) $(1)$(if $(RETRY), || { [ $$? = 1 ] && echo RETRY: what failed && \
	$(PYTEST) --last-failed $(1); })
LAB := python3 -m lab
LAB_OPTIONS = --nodes $(NODES) $(if $(UNDERLAY),--underlay $(UNDERLAY)) $(if $(K3S),--k3s) \
	$(if $(KUBEADM),--kubeadm) $(if $(HEADSCALE),--headscale $(HEADSCALE)) --vms $(VMS)
# What the lab needs of Debian; apt is asked only for what is missing.
LAB_PACKAGES := ca-certificates iproute2 mmdebstrap nftables openssh-client slirp4netns \
	systemd-container
VM_PACKAGES := e2fsprogs qemu-system-x86
# What only the tests run on this machine, beside those.
TEST_PACKAGES := curl gcc gpg iptables libc6-dev procps qemu-user
export PATH := $(CURDIR)/.venv/bin:$(PATH)
export ANSIBLE_COLLECTIONS_PATH := $(CURDIR)/collections
# Without it Molecule warns at each run that it prefers the folder extensions/molecule.
export MOLECULE_GLOB := molecule/*/molecule.yml

##@ The lab
.PHONY: up
up: check-lab packages .venv/ready ## build the lab, run site.yml and verify.yml on it (NODES=3 VMS=0 UNDERLAY= KEEP= K3S= KUBEADM= HEADSCALE=)
	@$(LAB) up $(LAB_OPTIONS) $(if $(KEEP),--keep) --playbook lab/up.yml

.PHONY: down
down: ## remove every trace of the lab
	@$(LAB) down

.PHONY: status
status: ## show the lab's machines
	@$(LAB) status

.PHONY: shell
shell: ## log in to a machine (NODE=node1)
	@$(LAB) shell $(NODE)

##@ Tests
.PHONY: test
test: check-lab cache .venv/ready ## everything that CI runs (RETRY=1: once more, what failed)
	@$(MAKE) --no-print-directory --jobs=2 test-the-code test-the-machine

one_by_one = MAKEFLAGS='$(filter-out -j% --jobserver%,$(MAKEFLAGS))' $(MAKE) --no-print-directory
# Both at once: the first is busy, and the second waits most of its time, for nodes. What the first
# has to say comes when it is done.
.PHONY: test-the-code test-the-machine
test-the-code:
	@log=$$(mktemp); trap 'cat $$log; rm $$log' EXIT; \
	$(one_by_one) lint test-unit test-collection test-sanity test-headscale >$$log 2>&1
test-the-machine:
	@$(one_by_one) test-cni test-daemon test-lab

.PHONY: test-unit
test-unit: .venv/ready ## tests that need neither root nor a lab
	$(call pytest,tests/unit)

.PHONY: test-collection
test-collection: .venv/ready ## the artifact builds, installs elsewhere and resolves by its name
	$(call pytest,tests/collection)

.PHONY: test-sanity
test-sanity: .venv/ready ## ansible-test sanity on a staged copy; the first run makes its environments
	$(PY) tests/support/sanity.py

.PHONY: test-cni
test-cni: cache .venv/ready ## the plugin on this kernel, in namespaces of its own
	$(call pytest,tests/cni)

.PHONY: test-daemon
test-daemon: cache .venv/ready ## the daemon's parts, one by one, on labs of their own
	$(call pytest,tests/daemon)

HEADSCALE_MODULE_TESTS := $(filter-out %_bad_input.py %_role.py,$(wildcard tests/modules/test_headscale_*.py))
.PHONY: test-headscale
test-headscale: cache .venv/ready ## the modules of Headscale at a real one, on loopback
	$(call pytest,$(HEADSCALE_MODULE_TESTS))

.PHONY: test-modules
test-modules: cache .venv/ready ## all modules and roles, on real nodes too (not in `test`)
	$(PYTEST) tests/modules

HEADSCALE_RELEASES := $(shell sed -n 's|.* v\(.*\)/go.mod .*|\1|p' lab/tools/headscale/releases.sum)
.PHONY: test-headscale-versions
test-headscale-versions: cache .venv/ready ## modules, site.yml and verify.yml at each release of Headscale, built first (HEADSCALE=0.27.1 for one; not in `test`)
	@for release in $(or $(HEADSCALE),$(HEADSCALE_RELEASES)); do \
	$(LAB) tools headscale-$$release; \
	HEADCNI_HEADSCALE=$$release $(PYTEST) $(HEADSCALE_MODULE_TESTS) tests/lab/test_headscale_versions.py; done

.PHONY: test-native-shim
test-native-shim: cache .venv/ready ## every architecture built from nothing, compared and run; more fuzzing (not in `test`)
	HEADCNI_SHIM_ARCHITECTURES=all HEADCNI_SHIM_EXAMPLES=2000 $(PYTEST) tests/unit/cni/test_shims.py \
		tests/unit/cni/test_native_build.py

.PHONY: test-lab
test-lab: cache .venv/ready ## the lab itself: boot, faults, leftovers, site.yml
	$(call pytest,tests/lab --ignore tests/lab/test_runtimes.py)

.PHONY: test-quick-start
test-quick-start: cache .venv/ready ## the commands of README.md and docs/quick-start.md, as printed (not in `test`)
	$(PYTEST) -rP tests/quick_start

.PHONY: test-outages
test-outages: cache .venv/ready ## what pods lose when daemon, tailscaled, Headscale or link go (not in `test`)
	$(PYTEST) tests/outages

.PHONY: test-firewalls
test-firewalls: cache .venv/ready ## Docker, ufw, firewalld and iptables on six nodes, some 15 minutes (not in `test`)
	$(PYTEST) tests/firewalls

.PHONY: test-soak
test-soak: cache .venv/ready ## an hour of pods that come and go while firewalls reload and disks fill (not in `test`)
	$(PYTEST) -s tests/soak

.PHONY: test-day2
test-day2: cache .venv/ready ## switching modes, upgrading, leaving, with pods talking meanwhile (not in `test`)
	$(PYTEST) tests/day2

.PHONY: test-molecule
test-molecule: cache .venv/ready ## the Molecule scenarios but vm, one after the other (SCENARIO=default for one; not in `test`)
	@for scenario in $(SCENARIO); do molecule test --scenario-name $$scenario; done

.PHONY: test-k8s
test-k8s: cache .venv/ready ## a real k3s on the lab; building it takes some 15 minutes (not in `test`)
	@$(LAB) tools k3s coredns
	$(PYTEST) tests/k8s

.PHONY: test-k8s-setups
test-k8s-setups: cache .venv/ready ## k3s on tailnet addresses, with two families, moved from flannel (not in `test`)
	@$(LAB) tools k3s coredns flannel
	$(PYTEST) tests/k8s_setups

.PHONY: test-runtimes
test-runtimes: cache .venv/ready ## critest's specs of networking at containerd, and podman's CNI back end (not in `test`)
	@$(LAB) tools critest
	$(PYTEST) tests/lab/test_runtimes.py

.PHONY: test-kubeadm
test-kubeadm: cache .venv/ready ## Kubernetes by kubeadm on the lab; building it takes some 10 minutes (not in `test`)
	@$(LAB) tools kubernetes coredns
	HEADCNI_CLUSTER=kubeadm $(PYTEST) tests/k8s

.PHONY: test-e2e
test-e2e: cache .venv/ready ## upstream's specs of the network at Kubernetes by kubeadm (not in `test`)
	@$(LAB) tools kubernetes coredns e2e
	$(PYTEST) tests/e2e

.PHONY: test-vm
test-vm: VMS := 2
test-vm: cache .venv/ready ## a Debian 12 and a Debian 13 with kernels of their own, beside a node (not in `test`)
	@molecule test --scenario-name vm

.PHONY: bench
bench: cache .venv/ready ## ratios against the Go plugins, in the same run (ONLY="cni ipam")
	@$(if $(filter k8s,$(ONLY)),$(LAB) tools k3s coredns)
	$(PY) -m bench $(ONLY)

##@ The code
PYTHON_SOURCES := bench molecule lab plugins tests inventories/lab
.PHONY: lint
lint: .venv/ready ## ruff, mypy, ansible-lint (production)
	ruff format --check $(PYTHON_SOURCES)
	ruff check $(PYTHON_SOURCES)
	mypy
	ansible-lint --offline --strict

.PHONY: fmt
fmt: .venv/ready ## put the code in shape
	ruff format $(PYTHON_SOURCES)
	ruff check --fix $(PYTHON_SOURCES)

.PHONY: lock
lock: .venv/ready ## pin every requirements.in anew
	$(PY) -m pip install --quiet pip-tools
	$(PY) -m piptools compile --quiet --upgrade --generate-hashes --strip-extras --allow-unsafe \
		--no-header --no-emit-index-url --no-emit-find-links --no-emit-trusted-host \
		--output-file requirements.lock requirements.in
	$(PY) -m piptools compile --quiet --upgrade --generate-hashes --strip-extras --allow-unsafe \
		--no-header --no-emit-index-url --no-emit-find-links --no-emit-trusted-host \
		--output-file plugins/cni/requirements.lock plugins/cni/requirements.in
	$(PY) -m piptools compile --quiet --upgrade --generate-hashes --strip-extras --allow-unsafe \
		--no-header --no-emit-index-url --no-emit-find-links --no-emit-trusted-host \
		--output-file plugins/cni/native/requirements.lock plugins/cni/native/requirements.in

.PHONY: checksums
checksums: ## note the SHA-256 of a version's tarballs, from Tailscale's site (TAILSCALE=1.102.5)
	python3 tests/support/tailscale_checksums.py $(TAILSCALE)

.PHONY: native-shim
native-shim: .venv/ready ## build plugins/cni/native for all architectures, if its sources have changed
	@$(PY) plugins/cni/native/build.py

.PHONY: release
release: native-shim ## build dist/headcni-runtime-VERSION.tar.gz, what a node installs
	@$(PY) plugins/cni/release.py --output dist

.PHONY: clean
clean: ## forget the venv and what tools left in the checkout; the cache stays
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .ansible .hypothesis dist

# What the targets above stand on.
.PHONY: check-lab
check-lab:
	@$(LAB) check $(LAB_OPTIONS)

.PHONY: packages
packages:
	@lab/packages.sh $(LAB_PACKAGES) $(if $(filter-out 0,$(VMS)),$(VM_PACKAGES))

.PHONY: cache
cache: check-lab packages
	@lab/packages.sh $(TEST_PACKAGES)
	@$(LAB) cache --vms $(VMS) --suites bullseye,trixie

.venv/ready: requirements.lock lab/packages.sh
	@python3 -c 'import ensurepip, venv' 2>/dev/null || lab/packages.sh python3-venv
	@echo "  … installing Python requirements into .venv"
	@rm -f $@
	@python3 -m venv .venv
	@$(PY) -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	@touch $@
	@echo "  ✓ Python requirements installed"

.PHONY: help
help:
	@awk 'BEGIN {FS = ":.*## "} \
		/^##@/ {printf "\n%s\n", substr($$0, 5)} \
		/^[a-z0-9-]+:.*## / {printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo
