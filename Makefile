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
# RETRY=1 runs the tests that failed once more, on a new lab. CI does that because the tests use real
# clocks and networks. Its log has both runs; a test that passes only the second time has a bug.
# Suites that run at once each remember in a folder of their own which tests failed.
suite = $(PYTEST) -o cache_dir=.pytest_cache/$(1)
pytest = $(suite) $(1)$(if $(RETRY), || { [ $$? = 1 ] && echo RETRY: the tests that failed && \
	$(suite) --last-failed $(1); })
LAB := python3 -m lab
LAB_OPTIONS = --nodes $(NODES) $(if $(UNDERLAY),--underlay $(UNDERLAY)) $(if $(K3S),--k3s) \
	$(if $(KUBEADM),--kubeadm) $(if $(HEADSCALE),--headscale $(HEADSCALE)) --vms $(VMS)
# The Debian packages that the lab needs. apt installs only those that are missing.
LAB_PACKAGES := ca-certificates iproute2 mmdebstrap nftables openssh-client slirp4netns \
	systemd-container
VM_PACKAGES := e2fsprogs qemu-system-x86
# Further packages that only the tests need on this machine.
TEST_PACKAGES := curl gcc gpg iptables libc6-dev procps qemu-user
export PATH := $(CURDIR)/.venv/bin:$(PATH)
export ANSIBLE_COLLECTIONS_PATH := $(CURDIR)/collections
# Without this Molecule warns at each run that it prefers the folder extensions/molecule.
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
test: check-lab cache .venv/ready ## everything that CI runs (RETRY=1 runs the tests that failed once more)
	@$(MAKE) --no-print-directory --jobs=3 test-the-code test-the-labs test-the-node

one_by_one = MAKEFLAGS='$(filter-out -j% --jobserver%,$(MAKEFLAGS))' $(MAKE) --no-print-directory
aside = log=$$(mktemp); trap 'cat $$log; rm $$log' EXIT; $(one_by_one) $(1) >$$log 2>&1
# All three run at once: the first needs the CPU, and the others mostly wait for nodes and packets.
# The output of the first two is shown when they have ended.
.PHONY: test-the-code test-the-labs test-the-node
test-the-code:
	@$(call aside,lint docs test-unit test-collection test-sanity test-headscale)
test-the-labs:
	@$(call aside,test-lab)
test-the-node:
	@$(one_by_one) test-cni test-daemon

.PHONY: test-unit
test-unit: .venv/ready ## tests that need neither root nor a lab
	$(call pytest,tests/unit)

.PHONY: test-collection
test-collection: .venv/ready ## build the artifact, install it elsewhere, and resolve its names
	$(call pytest,tests/collection)

.PHONY: test-sanity
test-sanity: .venv/ready ## ansible-test sanity on a copy; the first run creates its environments
	$(PY) tests/support/sanity.py

.PHONY: test-cni
test-cni: cache .venv/ready ## the plugin on this kernel, in its own network namespaces
	$(call pytest,tests/cni)

.PHONY: test-daemon
test-daemon: cache .venv/ready ## the parts of the daemon, on their own labs
	$(call pytest,tests/daemon)

.PHONY: test-headscale
test-headscale: cache .venv/ready ## the Headscale modules against a real Headscale on loopback
	$(call pytest,tests/modules/headscale)

.PHONY: test-lab
test-lab: cache .venv/ready ## the lab itself: boot, faults, leftovers, site.yml
	$(call pytest,tests/lab)

##@ Long tests, from minutes to an hour each (not part of `make test`)
.PHONY: test-modules
test-modules: cache .venv/ready ## all modules and roles, on real nodes too
	$(PYTEST) tests/modules

HEADSCALE_RELEASES := $(shell sed -n 's|.* v\(.*\)/go.mod .*|\1|p' lab/tools/headscale/releases.sum)
.PHONY: test-headscale-versions
test-headscale-versions: cache .venv/ready ## modules, site.yml and verify.yml with each release of Headscale, built first (HEADSCALE=0.27.1 for a single release)
	@for release in $(or $(HEADSCALE),$(HEADSCALE_RELEASES)); do \
	$(LAB) tools headscale-$$release; \
	HEADCNI_HEADSCALE=$$release $(PYTEST) tests/modules/headscale tests/lab/test_headscale_versions.py; done

.PHONY: test-native-shim
test-native-shim: cache .venv/ready ## build the native shim for every architecture, compare and run it, with more fuzzing
	HEADCNI_SHIM_ARCHITECTURES=all HEADCNI_SHIM_EXAMPLES=2000 $(PYTEST) tests/unit/cni/test_shims.py \
		tests/unit/cni/test_native_build.py

.PHONY: test-report
test-report: cache .venv/ready ## the mesh report in headless Chromium, and on nodes with a relayed path (about 10 minutes)
	@lab/packages.sh chromium
	$(PYTEST) tests/report

.PHONY: test-quick-start
test-quick-start: cache .venv/ready ## the commands of README.md and docs/quick-start.md, as printed
	$(PYTEST) -rP tests/quick_start

.PHONY: test-outages
test-outages: cache .venv/ready ## what pods lose when the daemon, tailscaled, Headscale or a link fails
	$(PYTEST) tests/outages

.PHONY: test-firewalls
test-firewalls: cache .venv/ready ## Docker, ufw, firewalld and iptables on six nodes (about 15 minutes)
	$(PYTEST) tests/firewalls

.PHONY: test-broken-nodes
test-broken-nodes: cache .venv/ready ## a node with one fault at a time: diagnose names it, and its advice repairs it
	$(PYTEST) tests/broken_nodes

.PHONY: test-soak
test-soak: cache .venv/ready ## one hour of pods that come and go while firewalls reload and disks fill
	$(PYTEST) -s tests/soak

.PHONY: test-day2
test-day2: cache .venv/ready ## switch modes, upgrade and uninstall while pods talk
	$(PYTEST) tests/day2

.PHONY: test-molecule
test-molecule: cache .venv/ready ## all Molecule scenarios except vm, one after the other (SCENARIO=default for a single scenario)
	@for scenario in $(SCENARIO); do molecule test --scenario-name $$scenario; done

.PHONY: test-k8s
test-k8s: cache .venv/ready ## a real k3s on the lab; the first build takes about 15 minutes
	@$(LAB) tools k3s coredns
	$(PYTEST) tests/k8s

.PHONY: test-k8s-setups
test-k8s-setups: cache .venv/ready ## k3s on tailnet addresses, with two address families, and moved from flannel
	@$(LAB) tools k3s coredns flannel
	$(PYTEST) tests/k8s_setups

.PHONY: test-runtimes
test-runtimes: cache .venv/ready ## the networking specs of critest with containerd, and podman's CNI back end
	@$(LAB) tools critest
	$(PYTEST) tests/runtimes

.PHONY: test-kube-api
test-kube-api: .venv/ready ## the daemon's identity at a real kube-apiserver; the first build takes about 10 minutes
	@$(LAB) tools kubernetes
	$(PYTEST) tests/kube_api

.PHONY: test-kubeadm
test-kubeadm: test-kube-api ## Kubernetes by kubeadm on the lab, after test-kube-api
	@$(LAB) tools kubernetes coredns
	HEADCNI_CLUSTER=kubeadm $(PYTEST) tests/k8s

.PHONY: test-e2e
test-e2e: cache .venv/ready ## the upstream network specs with Kubernetes by kubeadm
	@$(LAB) tools kubernetes coredns e2e
	$(PYTEST) tests/e2e

.PHONY: test-vm
test-vm: VMS := 2
test-vm: cache .venv/ready ## a Debian 12 and a Debian 13 virtual machine with their own kernels, beside a node
	@molecule test --scenario-name vm

##@ Benchmarks
.PHONY: bench
bench: cache .venv/ready ## compare with the Go plugins, measured in the same run (ONLY="cni ipam")
	@$(if $(filter k8s,$(ONLY)),$(LAB) tools k3s coredns)
	$(PY) -m bench $(ONLY)

##@ The code
PYTHON_SOURCES := bench docs/site molecule lab plugins tests inventories/lab
.PHONY: lint
lint: .venv/ready ## ruff, mypy, ansible-lint (production)
	ruff format --check $(PYTHON_SOURCES)
	ruff check $(PYTHON_SOURCES)
	mypy
	ansible-lint --offline --strict

.PHONY: fmt
fmt: .venv/ready ## format the Python code and fix what ruff can fix
	ruff format $(PYTHON_SOURCES)
	ruff check --fix $(PYTHON_SOURCES)

.PHONY: docs
docs: .venv/ready .venv-docs/ready ## build the documentation site into dist/docs, and check every link
	@# Not --quiet: with it, --strict does not fail on warnings.
	@NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict
	@echo "  ✓ dist/docs: .venv-docs/bin/mkdocs serve shows it at http://127.0.0.1:8000"

.PHONY: reference
reference: .venv/ready ## update the parts of docs/ that are generated from the code
	@$(PY) tests/support/generated_pages.py

.PHONY: captures
captures: .venv/ready ## write the terminal captures of docs/captures.md, from the running lab
	@python3 -m lab.captures

.PHONY: lock
lock: .venv/ready ## update the lock file of every requirements.in
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
	$(PY) -m piptools compile --quiet --upgrade --generate-hashes --strip-extras --allow-unsafe \
		--no-header --no-emit-index-url --no-emit-find-links --no-emit-trusted-host \
		--output-file docs/site/requirements.lock docs/site/requirements.in

.PHONY: checksums
checksums: ## record the SHA-256 sums of a Tailscale version's tarballs, from Tailscale's site (TAILSCALE=1.102.5)
	python3 tests/support/tailscale_checksums.py $(TAILSCALE)

.PHONY: native-shim
native-shim: .venv/ready ## build plugins/cni/native for all architectures, if its sources have changed
	@$(PY) plugins/cni/native/build.py

.PHONY: release
release: native-shim ## build dist/headcni-runtime-VERSION.tar.gz, which nodes install
	@$(PY) plugins/cni/release.py --output dist

.PHONY: clean
clean: ## delete the venv and the files that tools left in the checkout, but not the cache
	rm -rf .venv .venv-docs .mypy_cache .ruff_cache .pytest_cache .ansible .hypothesis dist

# Targets that the targets above depend on.
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

.venv-docs/ready: docs/site/requirements.lock docs/site/mermaid.lock
	@echo "  … installing the documentation's requirements into .venv-docs"
	@rm -rf .venv-docs
	@python3 -m venv .venv-docs
	@.venv-docs/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes \
		-r docs/site/requirements.lock
	@.venv-docs/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes \
		--no-deps -r docs/site/mermaid.lock
	@touch $@

.PHONY: help
help:
	@awk 'BEGIN {FS = ":.*## "} \
		/^##@/ {printf "\n%s\n", substr($$0, 5)} \
		/^[a-z0-9-]+:.*## / {printf "  make %-24s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo
