#!/usr/bin/env bash
# initramfs.sh programs ROOT OUT [PATH=PROGRAM...] | modules KERNEL OUT NAME...: packs a first file system of a virtual machine; a kernel unpacks
# concatenated ones. `programs` takes what is in ROOT, and adds these programs, and those of the host, each with its libraries where it
# looks for them. `modules` takes the kernel's configuration and these modules, in loading order behind those that they need; one that is
# built in or missing shows in what needs it; with `-` for OUT
# their files are only listed.
. "$(dirname "$0")/common.sh"
kind=$1 tree=$2 out=$3
shift 3

# Adds a program at a path, without debug information if binutils are there. The first one at a path wins.
add() {
  local to=$tree$1 library libraries
  [[ ! -e $to ]] || return 0
  mkdir -p "$(dirname "$to")"
  strip --strip-debug -o "$to" "$2" 2>/dev/null || cp "$2" "$to"
  libraries=$(ldd "$2" 2>/dev/null) || return 0
  [[ $libraries != *"not found"* ]] || fail "a library of $2 is missing: $libraries"
  # The loader is a path; names without one belong to the kernel's vDSO.
  for library in $(grep --only-matching '/[^ ]*' <<<"$libraries"); do
    [[ -e $tree$library ]] || install -D --mode=755 "$library" "$tree$library"
  done
}

# Path of a program of the host.
of_host() {
  PATH=/usr/bin:/bin:/usr/sbin:/sbin command -v "$1" || skip "$1 is not installed: it comes with $2"
}

# Adds a module behind those that it needs, which its description has as `depends=a,b`.
load() {
  local file=${files[$1]:-} code need
  [[ $file && -z ${loaded[$1]:-} ]] || return 0
  code=$work/$1
  case $file in
    *.xz) xz -dc "$file" ;;
    *.zst) zstd -dcq "$file" ;;
    *.gz) gzip -dc "$file" ;;
    *) cat "$file" ;;
  esac >"$code"
  for need in $(tr '\0' '\n' <"$code" | sed -n 's/^depends=//p' | tr ',-' ' _'); do load "$need"; done
  printf -v code '%02d-%s.ko' "${#loaded[@]}" "$1"
  loaded[$1]=yes
  mv "$work/$1" "$tree/modules/$code"
}

if [[ $kind == modules ]]; then
  kernel=$tree work=$(mktemp -d)
  trap 'rm -rf "$work"' EXIT
  tree=$work/tree
  mkdir -p "$tree/modules" "$tree/boot"
  cp "$kernel/config" "$tree/boot/config"
  declare -A files=() loaded=()
  while read -r file; do
    name=${file##*/} name=${name%%.ko*}
    files[${name//-/_}]=$file
  done < <(find "$kernel" -name '*.ko*')
  for name; do load "$name"; done
  if [[ $out == - ]]; then
    ls "$tree/modules"
    exit
  fi
else
  # The first process runs before a loader exists: a dynamic program would make the kernel panic.
  busybox=$(of_host busybox busybox-static)
  ! ldd "$busybox" >/dev/null 2>&1 || fail "$busybox needs libraries: install busybox-static, which does not"
  mkdir -p "$tree"/{root,tmp,etc,var/tmp,sbin,bin,usr/bin,host}
  install xtask/src/vm/init.sh "$tree/init"
  printf '%s\n' root:x:0:0:root:/root:/bin/sh nobody:x:65534:65534:nobody:/:/bin/sh >"$tree/etc/passwd"
  printf '%s\n' root:x:0: nogroup:x:65534: >"$tree/etc/group"
  printf '%s\n' '127.0.0.1 localhost' '::1 localhost' >"$tree/etc/hosts"
  add /bin/busybox "$busybox"
  # Busybox's versions lack features, and start other busybox programs: its shell and `nsenter` run its own `ip`, whatever PATH says.
  for program in ip:iproute2 tc:iproute2 nft:nftables nsenter:util-linux setpriv:util-linux unshare:util-linux; do
    add "/host/${program%:*}" "$(of_host "${program%:*}" "${program#*:}")"
  done
  add /host/sh "$(of_host dash dash)"
  ln --symbolic /host/sh "$tree/bin/sh"
  for program; do add "${program%%=*}" "${program#*=}"; done
  # Tests look for the profiles where they are in the checkout, by paths through this folder and back.
  mkdir -p "$tree$root/tunnel-daemon"
  for profile in deploy/seccomp/{server,agent}.json; do install -D --mode=755 "$profile" "$tree$root/$profile"; done
fi
cd "$tree"
find . -mindepth 1 | sort | busybox cpio -o -H newc -R 0:0 >"$out" 2>/dev/null
