//! A network namespace for a program, with free ports and known surroundings.
//!
//! It has loopback, an address that drops packets, and a name server that rejects all names. That takes root, or the right
//! to create user namespaces, and the commands `unshare`, `ip` and `mount`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::go::{self, Program};

/// Prepares the namespace from inside. `$1` is our peer program, `$2` a directory; the program to run follows.
///
/// A dial to the black hole gets no answer, not even an error. Its packets go to a veth peer that discards them, and a
/// static neighbour entry avoids ARP. A `blackhole` route would refuse the dial.
const SETUP: &str = r#"
set -e
peer=$1 dir=$2
shift 2
ip link set lo up
ip link add hole type veth peer name nobody
ip address add 198.18.0.1/15 dev hole
ip link set hole up
ip link set nobody up
ip neighbour replace 198.18.0.254 lladdr 02:00:00:00:00:01 dev hole nud permanent
echo nameserver 127.0.0.1 > "$dir/resolv.conf"
mount --bind "$dir/resolv.conf" /etc/resolv.conf
export TMPDIR="$dir"
exec "$peer" offline "$@"
"#;

/// Program and arguments that run `words` in a new namespace. All processes in it end together.
pub(crate) fn enclosed(words: &[String], dir: &Path) -> (PathBuf, Vec<String>) {
    // `--kill-child` kills the first process with `unshare`, and the end of the PID namespace kills all others.
    let mut args: Vec<String> = ["--net", "--mount", "--pid", "--fork", "--kill-child"]
        .map(str::to_owned)
        .to_vec();
    if !rustix::process::geteuid().is_root() {
        args.extend(["--user".to_owned(), "--map-root-user".to_owned()]);
    }
    args.extend(["sh", "-c", SETUP, "namespace"].map(str::to_owned));
    args.push(go::binary(Program::Peer).display().to_string());
    args.push(dir.display().to_string());
    args.extend_from_slice(words);
    (PathBuf::from("unshare"), args)
}

/// Tries to create such a namespace. Returns the error, or `None` on success.
pub(crate) fn missing(dir: &Path) -> Option<String> {
    let dir = dir.join("probe");
    fs::create_dir_all(&dir).expect("the test's directory is writable");
    let (program, args) = enclosed(&["true".to_owned()], &dir);
    match Command::new(program).args(args).output() {
        Ok(output) if output.status.success() => None,
        Ok(output) => Some(String::from_utf8_lossy(&output.stderr).trim().to_owned()),
        Err(error) => Some(format!("running unshare: {error}")),
    }
}
