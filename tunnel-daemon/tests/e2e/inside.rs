//! A separate file system and network for a test, which runs in a process of its own.

use std::fs::{self, Permissions};
use std::net::Ipv4Addr;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::Command;

use crate::namespace::Node;

/// Runs the test of this name with its own mounts, network and PID namespace. The test runs only if the variable is set.
/// Returns its output.
pub(crate) fn inside_of(test: &str, variable: &str, value: &str) -> String {
    let output = Command::new("unshare")
        .args([
            "--mount",
            "--net",
            "--pid",
            "--fork",
            "--kill-child",
            "--mount-proc",
        ])
        .arg(std::env::current_exe().expect("a program"))
        .args(["--exact", test, "--nocapture"])
        .env(variable, value)
        .output()
        .expect("unshare starts");
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    println!("{said}{}", String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{value}");
    assert!(said.contains("1 passed"), "{test} did not run: {said}");
    said
}

/// Mounts overlays for folders in which installations have their files. The rest of the host stays visible.
pub(crate) fn own_folders() {
    run("ip", &["link", "set", "lo", "up"]);
    run("mount", &["-t", "tmpfs", "tmpfs", "/mnt"]);
    for folder in ["etc", "var", "run"] {
        let [upper, work] = ["upper", "work"].map(|kind| format!("/mnt/{folder}-{kind}"));
        fs::create_dir(&upper).expect("a folder");
        fs::create_dir(&work).expect("a folder");
        let options = format!("lowerdir=/{folder},upperdir={upper},workdir={work}");
        let at = format!("/{folder}");
        run("mount", &["-t", "overlay", "overlay", "-o", &options, &at]);
    }
}

/// Writes a world-readable file, and creates its parent folders.
pub(crate) fn put(path: &str, content: &[u8]) {
    let folder = Path::new(path).parent().expect("it is absolute");
    fs::create_dir_all(folder).expect("a folder");
    fs::write(path, content).expect("a file");
    fs::set_permissions(path, Permissions::from_mode(0o644)).expect("it is ours");
}

/// Maps a host name to an address for all programs here.
pub(crate) fn add_host(address: Ipv4Addr, name: &str) {
    let hosts = fs::read_to_string("/etc/hosts").unwrap_or_default();
    put(
        "/etc/hosts",
        format!("{hosts}\n{address} {name}\n").as_bytes(),
    );
}

/// Adds an address to this host, and a route to it on the node.
pub(crate) fn add_address(address: &str, node: &Node) {
    run(
        "ip",
        &["address", "add", &format!("{address}/32"), "dev", "lo"],
    );
    node.command(&["ip", "route", "add", address, "via", &node.host.to_string()]);
}

pub(crate) fn run(program: &str, args: &[&str]) {
    let status = Command::new(program).args(args).status();
    assert!(
        status.is_ok_and(|status| status.success()),
        "{program} {args:?}"
    );
}
