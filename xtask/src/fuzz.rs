//! `cargo xtask fuzz`: runs the fuzz targets for a bounded time each. They need a nightly toolchain and
//! cargo-fuzz; the recorded inputs are replayed by plain tests on stable.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};

use crate::steps::{Steps, first_line, in_ci, run_command};
use crate::workspace::Workspace;

/// The folder of the fuzz package: outside the workspace, because it builds with nightly only.
const FOLDER: &str = "tunnel-daemon/fuzz";
/// Time limit to build all targets, or to install cargo-fuzz.
const BUILD: Duration = Duration::from_secs(15 * 60);

/// What to fuzz, and how long.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Time for each target.
    #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    seconds: u64,
    /// Only this target; without it all of them.
    target: Option<String>,
}

/// Whether fuzzing can run here; otherwise the missing tool.
pub(crate) fn availability(workspace: &Workspace) -> Result<(), String> {
    if !workspace.path(FOLDER).join("Cargo.toml").is_file() {
        return Err(format!("{FOLDER} holds no fuzz package"));
    }
    if first_line(nightly().args(["rustc", "--version"])).is_none() {
        return Err(
            "no nightly toolchain: `rustup toolchain install nightly --profile minimal`".to_owned(),
        );
    }
    if !in_ci() && !has_cargo_fuzz(workspace) {
        return Err("cargo-fuzz is not installed: `cargo install cargo-fuzz --locked`".to_owned());
    }
    Ok(())
}

/// Fuzzes the targets. New inputs go below `target/`; adding one to the recorded corpus is a manual step.
///
/// # Errors
/// A tool is missing, the target does not exist or build, or an input makes a target fail.
pub(crate) fn run(workspace: &Workspace, args: &Args) -> anyhow::Result<()> {
    if let Err(why) = availability(workspace) {
        bail!("{why}");
    }
    if !has_cargo_fuzz(workspace) {
        install(workspace)?;
    }
    let mut targets = targets(workspace)?;
    if let Some(only) = &args.target {
        ensure!(
            targets.contains(only),
            "no fuzz target `{only}`; there are: {}",
            targets.join(", ")
        );
        targets = vec![only.clone()];
    }
    let mut steps = Steps::new();
    steps.run("fuzz build", || {
        run_command(cargo_fuzz(workspace).arg("build"), BUILD)
    });
    // A target keeps one core busy.
    let at_once = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    for targets in targets.chunks(at_once) {
        steps.run(&format!("fuzz {}", targets.join(", ")), || {
            fuzz_side_by_side(workspace, targets, args.seconds)
        });
    }
    steps.finish()
}

/// Fuzzes targets concurrently. All run to their end; the error names all that failed.
fn fuzz_side_by_side(
    workspace: &Workspace,
    targets: &[String],
    seconds: u64,
) -> anyhow::Result<()> {
    let failed: Vec<String> = std::thread::scope(|scope| {
        let fuzz = |target: &String| {
            let outcome = fuzz_one(workspace, target, seconds);
            outcome.err().map(|error| format!("{target}: {error:#}"))
        };
        let running: Vec<_> = targets
            .iter()
            .map(|target| scope.spawn(move || fuzz(target)))
            .collect();
        let panicked = |_panic| Some("a thread panicked".to_owned());
        let outcomes = running
            .into_iter()
            .map(|one| one.join().unwrap_or_else(panicked));
        outcomes.flatten().collect()
    });
    ensure!(failed.is_empty(), "{}", failed.join("; "));
    Ok(())
}

fn fuzz_one(workspace: &Workspace, target: &str, seconds: u64) -> anyhow::Result<()> {
    let fresh = workspace.path("target/fuzz-corpus").join(target);
    std::fs::create_dir_all(&fresh).with_context(|| format!("create {}", fresh.display()))?;
    let mut command = cargo_fuzz(workspace);
    // The first folder receives new inputs; the others are read-only.
    command.arg("run").arg(target).arg(&fresh);
    let recorded = workspace.path(FOLDER).join("corpus").join(target);
    if recorded.is_dir() {
        command.arg(&recorded);
    }
    command.arg("--").arg(format!("-max_total_time={seconds}"));
    command.args([
        "-timeout=10",
        "-rss_limit_mb=2048",
        "-print_final_stats=1",
        "-verbosity=0",
    ]);
    run_command(&mut command, Duration::from_secs(seconds) + BUILD)
}

/// The targets of the fuzz package.
fn targets(workspace: &Workspace) -> anyhow::Result<Vec<String>> {
    let folder = format!("{FOLDER}/fuzz_targets");
    let files = workspace.files(&folder)?;
    let names = files
        .iter()
        .filter_map(|file| Path::new(file).file_stem()?.to_str());
    let names: Vec<String> = names.map(str::to_owned).collect();
    ensure!(!names.is_empty(), "{folder} holds no targets");
    Ok(names)
}

/// The toolchain for commands that stable does not support.
pub(crate) const NIGHTLY: &str = "nightly";

/// Runs the nightly toolchain by [`rustup_run`].
pub(crate) fn nightly() -> Command {
    rustup_run(NIGHTLY)
}

/// `rustup run` with a toolchain, without the environment variables that the pinned toolchain sets.
pub(crate) fn rustup_run(toolchain: &str) -> Command {
    let mut command = Command::new("rustup");
    command.args(["run", toolchain]);
    for name in ["CARGO", "RUSTUP_TOOLCHAIN", "RUSTC", "RUSTDOC"] {
        command.env_remove(name);
    }
    command
}

fn cargo_fuzz(workspace: &Workspace) -> Command {
    let mut command = nightly();
    // cargo-fuzz looks for a folder `fuzz` in its working folder; `target/tools` contains the cargo-fuzz of `install`.
    command
        .current_dir(workspace.path("tunnel-daemon"))
        .args(["cargo", "fuzz"]);
    let tools = workspace.path("target/tools/bin");
    let path = std::env::var_os("PATH").unwrap_or_default();
    let joined = std::env::join_paths(std::iter::once(tools).chain(std::env::split_paths(&path)));
    if let Ok(joined) = joined {
        command.env("PATH", joined);
    }
    command
}

fn has_cargo_fuzz(workspace: &Workspace) -> bool {
    first_line(cargo_fuzz(workspace).arg("--version")).is_some()
}

fn install(workspace: &Workspace) -> anyhow::Result<()> {
    let root = workspace.path("target/tools");
    let mut command = workspace.cargo(&["install", "--quiet", "--locked", "cargo-fuzz", "--root"]);
    // Uses a target folder of its own: other steps lock the workspace's.
    command
        .arg(&root)
        .env("CARGO_TARGET_DIR", root.join("build"));
    run_command(&mut command, BUILD).context("install cargo-fuzz")
}
