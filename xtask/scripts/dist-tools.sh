#!/usr/bin/env bash
# Skips unless artefacts for a processor can be made here. `cargo xtask dist` gives ARCH, TRIPLE, CROSS and EMULATOR.
. "$(dirname "$0")/common.sh"
need dpkg-deb gzip openssl tar "${CROSS}objcopy" "${CROSS}gcc" ${EMULATOR:-}
[[ -d $(rustc --print target-libdir --target "$TRIPLE" 2>/dev/null) ]] || skip "no library of Rust: rustup target add $TRIPLE"
# gcc repeats the name of a file that it does not find.
[[ $("${CROSS}gcc" -print-file-name=libc.a) == /* ]] || skip "no static C library: apt install libc6-dev${CROSS:+-$ARCH-cross}"
# The shell of an image. ldd refuses what needs no library.
[[ -f /usr/bin/busybox ]] && ! ldd /usr/bin/busybox >/dev/null 2>&1 || skip "no static /usr/bin/busybox: install busybox-static"
