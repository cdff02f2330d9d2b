#!/usr/bin/env bash
# ebpf.sh write | check | fresh | toolchain | hash: the eBPF object that the daemon embeds. It is committed, so that building Adit does not need this
# toolchain: a nightly one with the sources of the standard library, and bpf-linker. `write` builds the object with the pinned versions.
# `check` builds nothing, and fails when sources, lock file, pins, object and manifest do not belong together. `fresh` builds with any
# versions beside the committed object, and prints the path. `toolchain` and `hash` print the rustup name of the pinned compiler and the
# hash of the committed object.
. "$(dirname "$0")/common.sh"
programs=ebpf-programs/programs lock=ebpf-programs/programs/Cargo.lock pins=ebpf-programs/toolchain.toml
object=ebpf-programs/prebuilt/adit-ebpf.o manifest=ebpf-programs/prebuilt/manifest.toml
# Tells cargo where the standard library's sources are if the toolchain lacks them.
library=${__CARGO_TESTS_ONLY_SRC_ROOT:-}

value() {
  sed -n "s/^$1 = \"\(.*\)\"$/\1/p" "$2"
}

hash() {
  sha256sum "$1" | cut -d' ' -f1
}

# One hash over paths, lengths and contents of all compiled sources of both packages.
sources() {
  local package file
  for package in ebpf-programs/abi "$programs"; do
    find "$package" -name target -prune -o -type f ! -path "$lock" -print | sort
  done | while read -r file; do
    printf '%s\0' "$file"
    # The length, with its lowest byte first.
    printf "$(printf %016x "$(stat --format=%s "$file")" | grep --only-matching .. | tac | sed 's/^/\\x/' | tr -d '\n')"
    cat "$file"
  done | sha256sum | cut -d' ' -f1
}

# The manifest of an object that these versions of rustc and bpf-linker have built of the present sources.
described() {
  cat <<END
# Made by \`cargo xtask ebpf\`; do not edit.
object = "$(hash "$object")"
sources = "$(sources)"
lock = "$(hash "$lock")"
rustc = "$1"
bpf-linker = "$2"
END
}

with_toolchain() {
  env -u CARGO -u RUSTUP_TOOLCHAIN -u RUSTC -u RUSTDOC rustup run "$@"
}

# The rustup name of the pinned compiler, since another one builds another object. `nightly` is the latest; the pinned one may be
# installed under its date.
pinned_toolchain() {
  local name
  for name in nightly $(rustup toolchain list | cut -d' ' -f1 | grep ^nightly-2); do
    [[ $(with_toolchain "$name" rustc --version 2>/dev/null) != "rustc $(value rustc "$pins")" ]] || { echo "$name" && return; }
  done
  echo nightly
}

# Sets the versions that a toolchain would use for an object, or what is missing and how to get it.
look_at() {
  local sysroot
  why="no nightly toolchain: \`rustup toolchain install $1 --profile minimal --component rust-src\`"
  rustc=$(with_toolchain "$1" rustc --version 2>/dev/null) || return 1
  rustc=${rustc#rustc }
  why="no sources of the standard library: \`rustup component add rust-src --toolchain $1\`, or name those of your distribution's"
  why+=" package in __CARGO_TESTS_ONLY_SRC_ROOT"
  sysroot=$(with_toolchain "$1" rustc --print sysroot)
  [[ $library || -f $sysroot/lib/rustlib/src/rust/library/Cargo.lock ]] || return 1
  why='no bpf-linker on PATH: `cargo install bpf-linker`'
  linker=$(bpf-linker --version 2>/dev/null) || return 1
  linker=${linker#bpf-linker }
}

# Builds the programs with a toolchain, little-endian as all supported machines are. No path of this machine is in the object. The
# library needs the architecture flag; this project's programs do not.
build() {
  local flags
  printf -v flags '%s\x1f' '--cfg=bpf_target_arch="x86_64"' -Cdebuginfo=2 -Clink-arg=--btf "--remap-path-prefix=$root=." \
    "--remap-path-prefix=${CARGO_HOME:-$HOME/.cargo}=cargo" ${library:+"--remap-path-prefix=$library=library"}
  built=$target/ebpf/bpfel-unknown-none/release/adit-ebpf
  (
    cd "$programs"
    unset RUSTFLAGS
    export CARGO_ENCODED_RUSTFLAGS=${flags%?}
    with_toolchain "$1" cargo build --quiet --locked --release -Z build-std=core --target bpfel-unknown-none --target-dir "$target/ebpf"
  )
  [[ -f $built ]] || fail "the build left no $built"
}

case $1 in
  write)
    toolchain=$(pinned_toolchain)
    look_at "$toolchain" || fail "$why"
    # Before the build, which takes minutes: an object of other versions must not be committed.
    [[ "$rustc $linker" == "$(value rustc "$pins") $(value bpf-linker "$pins")" ]] ||
      fail "$pins pins rustc $(value rustc "$pins") and bpf-linker $(value bpf-linker "$pins"), but here is rustc $rustc and bpf-linker" \
        "$linker: install the pinned versions as ebpf-programs/README.md says, build beside the committed object with \`--fresh\`, or" \
        "change the pins in a commit of their own"
    build "$toolchain"
    mkdir -p ebpf-programs/prebuilt
    cp "$built" "$object"
    chmod 644 "$object"
    echo "$object: $(stat --format=%s "$object") bytes"
    described "$rustc" "$linker" >"$manifest"
    ;;
  check)
    now=$(described "$(value rustc "$pins")" "$(value bpf-linker "$pins")")
    changed=$(diff <(echo "$now") "$manifest" | sed -n 's/^< \([a-z-]*\) = .*/\1/p' | paste --serial --delimiters=,) || true
    [[ $now == "$(cat "$manifest")" ]] ||
      fail "changed since the object in ebpf-programs/prebuilt was built: $changed; run \`cargo xtask ebpf\`"
    ;;
  fresh)
    toolchain=nightly
    look_at nightly || toolchain=$(pinned_toolchain)
    look_at "$toolchain" || skip "$why"
    build "$toolchain"
    echo "$built"
    ;;
  toolchain) pinned_toolchain ;;
  hash)
    [[ $(value object "$manifest") == "$(hash "$object")" ]] || fail "$manifest is of another object than $object: run \`cargo xtask ebpf\`"
    hash "$object"
    ;;
  *) fail "no mode $1" ;;
esac
