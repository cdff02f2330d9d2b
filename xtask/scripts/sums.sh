#!/usr/bin/env bash
# sums.sh FOLDER list | sign KEY | verify PUBLIC | try: SHA256SUMS over the artefacts in a folder, and its ed25519 signature. Without KEY
# a throwaway key signs. `sign` also verifies, with the commands that the documentation names, and leaves the public key in the file
# that PUBLIC names, if it does. `try` does all that with a copy, and sees that a changed byte is found.
. "$(dirname "$0")/common.sh"
cd "$1"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

list() {
  find . -maxdepth 1 -type f ! -name 'SHA256SUMS*' -printf '%P\n' | sort | xargs sha256sum >SHA256SUMS
}

verify() {
  openssl pkeyutl -verify -pubin -rawin -inkey "$1" -in SHA256SUMS -sigfile SHA256SUMS.sig >/dev/null &&
    sha256sum --check --strict --quiet SHA256SUMS
}

sign() {
  local key=${1:-$scratch/throwaway.pem} public=${PUBLIC:-$scratch/public.pem}
  [[ ${1:-} ]] || openssl genpkey -algorithm ed25519 -out "$key"
  openssl pkeyutl -sign -rawin -inkey "$key" -in SHA256SUMS -out SHA256SUMS.sig
  [[ $(stat --format=%s SHA256SUMS.sig) == 64 ]] || fail "$key is no key of ed25519"
  openssl pkey -pubout -in "$key" -out "$public"
  verify "$public"
}

refuses_a_changed() {
  cp "$1" "$scratch/sound"
  printf '\0' | dd of="$1" conv=notrunc status=none
  ! verify "$scratch/public.pem" >/dev/null 2>&1 || fail "a changed $1 is verified"
  # Else the next one would be refused because of this one.
  cp "$scratch/sound" "$1"
}

case $2 in
  list) list ;;
  sign) sign "${3:-}" ;;
  verify) verify "$3" ;;
  try)
    mkdir "$scratch/copy"
    cp -- * "$scratch/copy"
    cd "$scratch/copy"
    sign
    refuses_a_changed "$(find . -maxdepth 1 -name 'adit*' | sort | tail -n 1)"
    refuses_a_changed SHA256SUMS
    verify "$scratch/public.pem"
    ;;
  *) fail "no mode $2" ;;
esac
