//! `cargo xtask e2e`: our server as the egress of a real API server.

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use crate::steps::{Outcome, first_line, run_command};
use crate::test;
use crate::workspace::Workspace;

/// Where the Go module with the programs is.
const MODULE: &str = "tunnel-daemon/tests/e2e/go";
/// What is built of it.
const PACKAGES: [&str; 5] = [
    "./cmd/etcd",
    "./cmd/execs",
    "./cmd/node",
    "k8s.io/kubernetes/cmd/kube-apiserver",
    "k8s.io/kubernetes/cmd/kubectl",
];
/// Longest time for that, from nothing.
const BUILD: Duration = Duration::from_secs(30 * 60);

/// Builds the control plane and runs the tests with it.
///
/// # Errors
/// When something does not build, or a test fails.
pub(crate) fn run(workspace: &Workspace) -> anyhow::Result<Outcome> {
    if first_line(Command::new("go").arg("version")).is_none() {
        return Ok(Outcome::Skipped("no Go toolchain on PATH".to_owned()));
    }
    let programs = workspace.target().join("e2e");
    build(workspace, &programs)?;
    test::end_to_end(workspace, &programs)?;
    Ok(Outcome::Done)
}

/// Go knows itself what is to be built anew.
fn build(workspace: &Workspace, programs: &PathBuf) -> anyhow::Result<()> {
    std::fs::create_dir_all(programs)?;
    println!("e2e: building etcd, kube-apiserver, kubectl and a node");
    let mut go = Command::new("go");
    go.current_dir(workspace.path(MODULE))
        .args(["build", "-trimpath", "-ldflags=-s -w", "-o"])
        .arg(programs)
        .args(PACKAGES);
    run_command(&mut go, BUILD)
}
