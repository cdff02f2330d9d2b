#!/usr/bin/env bash
# binary.sh BUILD OUT NAME [BINARY]: builds the static `adit` with cargo's target folder BUILD, or takes BINARY, and splits it into the
# program OUT/NAME and its debug information. No folder of this machine is named in it. `cargo xtask dist` gives EPOCH, COMMIT, DAY,
# TRIPLE, FEATURES, REGISTRIES (where cargo has unpacked crates), and CROSS, the prefix of tools for another processor.
. "$(dirname "$0")/common.sh"
build=$1 out=$2 name=$3 binary=${4:-}

# Folders of this machine, and what the binary calls them. Later ones win where one is below another. Without the last one, a toolchain
# with rust-src would undo the name that the prebuilt library has for its sources.
sysroot=$(rustc --print sysroot)
prefixes=("${CARGO_HOME:-$HOME/.cargo}=/cargo")
for folder in $REGISTRIES; do prefixes+=("$folder=/cargo/registry"); done
prefixes+=("$sysroot=/rust" "$sysroot/lib/rustlib/src/rust=/rustc/$(rustc -vV | sed -n 's/^commit-hash: //p')")
prefixes+=("$root=/adit" "$build=/build")
for prefix in "${prefixes[@]}"; do
  [[ ${prefix%=*} != *[[:space:]\'=]* ]] || fail "${prefix%=*}: C compilers cannot be told of such a name; build elsewhere"
done

if [[ -z $binary ]]; then
  # Cargo calls it instead of rustc: flags of this machine are not hashed into names, which would differ from machine to machine.
  mkdir -p "$build"
  printf '#!/bin/sh\nexec "$@"' >"$build/rustc"
  printf " '--remap-path-prefix=%s'" "${prefixes[@]}" >>"$build/rustc"
  chmod 755 "$build/rustc"
  variable=${TRIPLE//-/_}
  export "CFLAGS_$variable=$(printf -- '-ffile-prefix-map=%s ' "${prefixes[@]}")"
  if [[ $CROSS ]]; then
    export "CARGO_TARGET_${variable^^}_LINKER=${CROSS}gcc" "CC_$variable=${CROSS}gcc"
  fi
  # Line tables make backtraces readable; the rest of debug information is several times as large.
  env --unset=CARGO_ENCODED_RUSTFLAGS CARGO_TARGET_DIR="$build" RUSTC_WRAPPER="$build/rustc" SOURCE_DATE_EPOCH="$EPOCH" \
    RUSTFLAGS='-C target-feature=+crt-static' ADIT_COMMIT="$COMMIT" ADIT_COMMIT_DATE="$DAY" \
    cargo build --quiet --locked --release --package adit --bin adit --no-default-features --features "$FEATURES" --target "$TRIPLE" \
    --config 'profile.release.debug="line-tables-only"' --config profile.release.strip=false
  binary=$build/$TRIPLE/release/adit
  # Shorter ones, such as / or /root, are names that any program has.
  [[ $HOME != /*/* ]] || prefixes+=("$HOME=")
  for prefix in "${prefixes[@]}"; do
    ! grep --quiet --text --fixed-strings -- "${prefix%=*}" "$binary" || fail "$binary names a folder of this machine: ${prefix%=*}"
  done
fi

binary=$(realpath "$binary")
# The link from one to the other is a name without a folder.
cd "$out"
"${CROSS}objcopy" --only-keep-debug --compress-debug-sections "$binary" "$name.debug"
"${CROSS}objcopy" --strip-all "$binary" "$name"
"${CROSS}objcopy" "--add-gnu-debuglink=$name.debug" "$name"
chmod 644 "$name.debug"
chmod 755 "$name"
! grep --quiet --text --fixed-strings /ld-linux "$name" || fail "$out/$name needs a dynamic linker: it is to be static"
