//! The dashboard by Grafana's own schema: a Go program reads it with the types that Grafana generates from that schema.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use crate::steps::{MINUTES_5, Outcome, go, go_toolchain, output_of, run_command};
use crate::workspace::Workspace;

/// The Go module with the program; it names the version of the schema.
const MODULE: &str = "xtask/grafana";
/// Longest time to build it from nothing.
const BUILD: Duration = Duration::from_secs(15 * 60);

/// Reads a dashboard strictly.
///
/// # Errors
/// The program cannot be built, or a field is unknown, missing or of another type.
pub(super) fn check(workspace: &Workspace, dashboard: &Path) -> anyhow::Result<Outcome> {
    if let Err(why) = go_toolchain() {
        return Ok(Outcome::Skipped(why));
    }
    let folder = workspace.target().join("grafana");
    std::fs::create_dir_all(&folder)?;
    let program = folder.join("check");
    let mut go = go()?;
    go.current_dir(workspace.path(MODULE))
        .args(["build", "-trimpath", "-o"])
        .arg(&program)
        .arg(".");
    run_command(&mut go, BUILD)?;
    output_of(Command::new(&program).arg(dashboard), MINUTES_5)?;
    Ok(Outcome::Done)
}
