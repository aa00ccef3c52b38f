# Entry points for users and CI; `make help` lists them.

CARGO ?= cargo
HISTORIES ?= 20
SEED ?=
SEEDS ?= 100000
FROM ?= 0
FUZZ_SECONDS ?= 60
CUTS ?= 50
ONLY ?=
# Where cargo puts programs.
TARGET = $(abspath $(or $(CARGO_TARGET_DIR),target))
# Cargo chooses the features of libraries by the packages of a command. With the same packages everywhere, commands share what is compiled;
# all of them but the simulator, whose planted bugs are features.
# Tests cannot share that: they unwind, and release programs abort. A test that measures no times is built as in `make test`.
RELEASE = --release --workspace --exclude weir-sim

.PHONY: help setup build release demo cluster-demo test fmt clippy doc unit sim-soak sim-bugs confusion bench bench-short soak etcd-faults lun-faults snapshots drain \
  histories heal join fill-picture neighbours \
  power-soak fsx fuzz deny clean clean-room

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## install the Debian packages that tests and demo need
	@scripts/setup

build: ## debug build of the `weir` binary
	$(CARGO) build -p weir

release: ## optimised build of the `weir` binary
	$(CARGO) build $(RELEASE) --bin weir

demo: setup release ## three nodes, a killed owner, nothing lost: about three minutes
	$(TARGET)/release/weir demo

cluster-demo: setup release ## three hosts, an etcd of three members with TLS, one fault after the other: about three minutes (as root)
	$(CARGO) build $(RELEASE) --bin weir-lab-guest --bin weir-lab-greeting
	scripts/cluster-demo

# The lints run beside the tests, most of which wait for something.
test: LINTS = clippy doc
test: setup fmt unit ## all checks that a change must pass: formatting, lints, documentation, tests

fmt: ## formatting
	$(CARGO) fmt --all --check

clippy: ## lints, as errors, of the fuzz targets, too
	$(CARGO) clippy --workspace --all-targets -- -D warnings

# Documents private items, too, so that links to them resolve.
doc: ## documentation builds without a warning
	RUSTDOCFLAGS="-D warnings -A rustdoc::private_intra_doc_links" $(CARGO) doc --workspace --no-deps --document-private-items

# The tests of the lab run the `weir` that this build made; each of them alone would build it again with other features.
unit: ## unit, property and end-to-end tests, some hundred simulated seeds among them
	WEIR_PROGRAM=$(TARGET)/debug/weir LINTS="$(LINTS)" scripts/run-tests

sim-soak: ## SEEDS=100000 simulated clusters, and as many shared volumes: protocol, shells, and who coordinates; from seed FROM=0
	$(CARGO) run --profile sim -p weir-sim -- many --seeds $(SEEDS) --from $(FROM)
	$(CARGO) run --profile sim -p weir-sim -- volume many --seeds $(SEEDS) --from $(FROM)
	$(CARGO) run --profile sim -p weir-sim -- shells many --seeds $(SEEDS) --from $(FROM)
	$(CARGO) run --profile sim -p weir-sim -- claims many --seeds $(SEEDS) --from $(FROM)

sim-bugs: ## every planted bug, and the number of 10 000 seeds that find it (of 2 000 whole nodes for those in node states)
	$(CARGO) run --profile sim -p weir-sim -- bugs --seeds 10000
	$(CARGO) run --profile sim -p weir-sim -- states bugs --seeds 2000
	$(CARGO) run --profile sim -p weir-sim -- volume bugs --seeds 3000
	$(CARGO) run --profile sim -p weir-sim -- shells bugs --seeds 1000
	$(CARGO) run --profile sim -p weir-sim -- claims bugs --seeds 100000

confusion: ## planted faults, and the causes that weir diagnose names: about fourteen minutes (as root)
	$(CARGO) build $(RELEASE) --bin weir --bin weir-lab-node --bin weir-lab-confusion
	$(TARGET)/release/weir-lab-confusion

bench: setup release ## measure beside qemu-storage-daemon, nbdkit and fio: about twenty-five minutes; ONLY=profile for a part
	$(CARGO) build $(RELEASE) --bin weir-peers
	$(TARGET)/release/weir-peers --weir $(TARGET)/release/weir --only "$(ONLY)"

bench-short: setup build ## every section of make bench once with debug binaries: shows that all of it runs (part of make test)
	$(CARGO) run -p weir-peers -- --short --only "$(ONLY)" --weir $(TARGET)/debug/weir --out target/bench/short.json

soak: ROUNDS ?= 500
soak: setup ## ROUNDS=500 rounds of SIGKILL, SIGSTOP and partitions (half outlast the fence grace), half on etcd; then `make histories` (as root)
	WEIR_ROUNDS=$(ROUNDS) $(CARGO) test --release -p weir-lab --test crash --test partition --test right -- --nocapture
	$(MAKE) histories

# The logs tell which watches met a compaction.
etcd-faults: ROUNDS ?= 200
etcd-faults: setup release ## ROUNDS=200 rounds of faults of an etcd under verified load, SEED=n; then etcd beside the embedded registry (as root)
	$(CARGO) build $(RELEASE) --example etcd_faults
	WEIR_LOG=info,weir_cluster::view=debug WEIR_PROGRAM=$(TARGET)/release/weir \
	  $(TARGET)/release/examples/etcd_faults --rounds $(ROUNDS) $(if $(SEED),--seed $(SEED))

lun-faults: ROUNDS ?= 100
lun-faults: setup release ## ROUNDS=100 random faults of a volume on a LUN, on XFS and on ext4, under verified load, SEED=n (as root)
	$(CARGO) build $(RELEASE) --example lun_faults
	WEIR_PROGRAM=$(TARGET)/release/weir \
	  $(TARGET)/release/examples/lun_faults --rounds $(ROUNDS) $(if $(SEED),--seed $(SEED))

snapshots: ROUNDS ?= 200
snapshots: setup release ## ROUNDS=200 clones of an image in 1,024 extents (5 s), and snapshots under verified load (p99 of the pause 100 ms; as root)
	WEIR_ROUNDS=$(ROUNDS) WEIR_PROGRAM=$(TARGET)/release/weir \
	  $(CARGO) test $(RELEASE) --test snapshots -- --nocapture a_disk_under_load a_golden_image

drain: DISKS ?= 200
drain: setup release ## a node with DISKS=200 disks under load is drained and resumed: times, and the longest stall of each guest
	$(CARGO) build $(RELEASE) --example drain
	WEIR_PROGRAM=$(TARGET)/release/weir $(TARGET)/release/examples/drain --disks $(DISKS)

histories: OPERATIONS ?= 100000
histories: setup ## HISTORIES=20 of OPERATIONS=100000 requests, with random faults, checked to be linearizable (as root)
	WEIR_HISTORIES=$(HISTORIES) WEIR_OPERATIONS=$(OPERATIONS) $(CARGO) test --release -p weir-lab --test histories -- --nocapture

# The program behind `make heal`, `join`, `fill-picture` and `neighbours`; needs root.
BEHAVIOUR = $(CARGO) build $(RELEASE) --example behaviour && \
  WEIR_PROGRAM=$(TARGET)/release/weir $(TARGET)/release/examples/behaviour

heal: setup release ## a replica is lost, another one added: stall, time to restore, throughput (as root)
	$(BEHAVIOUR) heal

join: setup release ## a second replica is added under load, five times: the share of throughput that remains (as root)
	$(BEHAVIOUR) join

fill-picture: setup release ## latency while a log fills: target/fill.svg and .csv (as root)
	$(BEHAVIOUR) fill-picture

neighbours: setup release ## a polite guest beside a greedy one, and beside hostile clients; a new client beside silent ones (as root)
	$(BEHAVIOUR) neighbours
	$(BEHAVIOUR) hostile

power-soak: setup ## CUTS=50 power cuts of each kind, as root: load, ext4, XFS, PostgreSQL
	WEIR_POWER_CUTS=$(CUTS) $(CARGO) test --release -p weir-lab --test power_cut -- --nocapture

clean-room: ## make test and make demo on a bare Debian 12 in separate namespaces: finds missing dependencies (as root)
	@scripts/clean-room

fsx: OPERATIONS ?= 1000000
fsx: setup release ## OPERATIONS=1000000 operations of fsx on a disk's file, write-back and write-through each, SEED=n (as root; needs fsx)
	@command -v fsx >/dev/null || { echo "make fsx needs fsx: cargo install --locked fsx"; exit 1; }
	WEIR_FSX=$(OPERATIONS) $(if $(SEED),WEIR_SEED=$(SEED)) WEIR_PROGRAM=$(TARGET)/release/weir \
	  $(CARGO) test --workspace --test files -- --ignored --nocapture fsx_reads_what_it_wrote

fuzz: ## each fuzz target for a minute (nightly Rust and cargo-fuzz)
	@command -v cargo-fuzz >/dev/null || { echo "make fuzz needs cargo-fuzz: cargo install --locked cargo-fuzz"; exit 1; }
	for target in fuzz/fuzz_targets/*.rs; do \
	  CARGO_PROFILE_RELEASE_LTO=off $(CARGO) +nightly fuzz run --features link $$(basename $$target .rs) -- -max_total_time=$(FUZZ_SECONDS) || exit 1; \
	done

deny: ## licences and banned crates (needs cargo-deny)
	@command -v cargo-deny >/dev/null || { echo "make deny needs cargo-deny: cargo install --locked cargo-deny"; exit 1; }
	$(CARGO) deny check licenses bans

clean: ## remove build output
	$(CARGO) clean
