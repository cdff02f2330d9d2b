//! A file system and a network of a test's own: it runs in a process that is started for it.

use std::fs::{self, Permissions};
use std::net::Ipv4Addr;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::Command;

use crate::namespace::Node;

/// Runs the test of this name, which is one only where the variable is set, with mounts, a network and process ids of its own. Returns
/// what it has said.
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

/// Folders of this process alone, in which installations have their files; the rest of the host is seen as it is.
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

/// Writes a file that everybody may read, and the folders to it.
pub(crate) fn put(path: &str, content: &[u8]) {
    let folder = Path::new(path).parent().expect("it is absolute");
    fs::create_dir_all(folder).expect("a folder");
    fs::write(path, content).expect("a file");
    fs::set_permissions(path, Permissions::from_mode(0o644)).expect("it is ours");
}

/// Gives a name its address, for every program here.
pub(crate) fn add_host(address: Ipv4Addr, name: &str) {
    let hosts = fs::read_to_string("/etc/hosts").unwrap_or_default();
    put(
        "/etc/hosts",
        format!("{hosts}\n{address} {name}\n").as_bytes(),
    );
}

/// Adds an address to this host, to which the node has a route.
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
