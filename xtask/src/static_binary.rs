//! `cargo xtask static`: builds `adit` without shared libraries, and runs the demo with it.

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, ensure};

use crate::steps::run_command;
use crate::workspace::Workspace;

/// Time limit to build all packages once more.
const BUILD: Duration = Duration::from_secs(20 * 60);
/// Time limit of the demo.
const DEMO: Duration = Duration::from_secs(5 * 60);

/// Builds the program and runs `adit demo --once`.
///
/// # Errors
/// The program does not build or needs a library, or the demo fails.
pub(crate) fn run(workspace: &Workspace) -> anyhow::Result<()> {
    let program = build(workspace)?;
    let out = Command::new("ldd")
        .arg(&program)
        .output()
        .context("run ldd")?;
    let said = [out.stdout, out.stderr].concat();
    let said = String::from_utf8_lossy(&said).into_owned();
    ensure!(
        said.contains("statically linked") || said.contains("not a dynamic executable"),
        "{} needs libraries:\n{said}",
        program.display()
    );
    run_command(
        Command::new(&program).args(["demo", "--once", "--plain"]),
        DEMO,
    )?;
    println!("static: {}", program.display());
    Ok(())
}

/// Naming a target applies the flags to the program alone, so build scripts and macros are reused. Dependencies are built again
/// for the target, and no test measures their speed: without optimisation and debug information that takes half as long.
fn build(workspace: &Workspace) -> anyhow::Result<PathBuf> {
    let host = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
    let mut cargo = workspace.cargo(&["build", "--quiet", "--package", "adit", "--bin", "adit"]);
    cargo
        .args(["--target", &host])
        .args(["--config", r#"profile.dev.package."*".opt-level=0"#])
        .args(["--config", "profile.dev.debug=false"])
        .env("RUSTFLAGS", "-C target-feature=+crt-static");
    run_command(&mut cargo, BUILD)?;
    Ok(workspace.target().join(host).join("debug/adit"))
}
