//! Entry of `cargo xtask`, the command for people and CI: one file per subcommand, only dispatch here.
//!
//! A new subcommand needs a script or a `mod`, a variant with a doc line for `--help`, and an arm of the match.

mod chart;
mod ci;
mod dist;
mod docs;
mod e2e;
mod ebpf;
mod monitoring;
mod perf;
mod release;
mod script;
mod stack;
mod test;
mod tidy;
mod vm;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use xtask_kit::{steps, workspace};

use crate::steps::Outcome;
use crate::workspace::Workspace;

/// Builds, checks, tests and generates everything in this repository.
#[derive(Parser)]
#[command(
    name = "cargo xtask",
    bin_name = "cargo xtask",
    disable_help_subcommand = true
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run every test of the workspace: units, simulation, loopback, interop, corpus replay, doc tests.
    Test(test::Args),
    /// Run what CI runs, in the same order.
    Ci(ci::Args),
    /// Check what compilers do not: module docs, links, dependencies, leaks of local paths.
    Tidy,
    /// Generate the protobuf messages and the client glue from the .proto file.
    Codegen(script::Args),
    /// Write the pages below docs/reference, which say what the code says.
    Docs,
    /// Build the eBPF object that the daemon embeds (needs a nightly toolchain with rust-src, and bpf-linker).
    Ebpf(ebpf::Args),
    /// Fuzz the parsers for a bounded time (needs a nightly toolchain).
    Fuzz(script::Args),
    /// Try out the interleavings of the relay's hand-over.
    Loom,
    /// Run the relay's unit tests in miri (needs a nightly toolchain with it).
    Miri,
    /// Measure against other peers in one run; writes a table, JSON and pictures to target/perf (`--quick`: the short form).
    Perf(perf::Args),
    /// Build `adit` without any library, and run the demo with it.
    Static,
    /// Check the Helm chart with all combinations of values, and write its README and the plain manifests (needs Go).
    Chart(chart::Args),
    /// Write the addresses of Cargo.toml (home page, sources, registry) into all files that name them.
    Names,
    /// Run our server as the egress of a real API server, with agents that it knows by its tokens (needs Go).
    E2e,
    /// Run every query of alerts and dashboard against a Prometheus that scrapes servers and agents (needs `prometheus`).
    Monitoring,
    /// Run the commands of install pages in a blank Debian (after `dist`).
    Pages,
    /// Check the workflows of GitHub (needs Go).
    Workflows,
    /// Make the artefacts of a release below target/dist: static binary, images, package, sums (`--check`: try all of them).
    Dist(dist::Args),
    /// Make and verify a release below target/release-VERSION; nothing is published.
    Release(release::Args),
    /// Boot distribution kernels in virtual machines and run our programs and tests there.
    Vm(vm::Args),
    /// Install the git hooks of this repository.
    Setup(script::Args),
    /// Started by `dist --check` for itself, in a mount namespace.
    #[command(hide = true)]
    ImageTrial(dist::ImageTrial),
    /// Started by `dist --check` for itself: becomes a program without rights.
    #[command(hide = true)]
    Confined(dist::Confined),
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let outcome = Workspace::here().and_then(|workspace| run(&workspace, cli)?.expect_done());
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(workspace: &Workspace, cli: Cli) -> anyhow::Result<Outcome> {
    let script = |name| script::outcome(&mut script::command(workspace, name));
    match cli.command {
        Command::Chart(args) => return chart::run(workspace, args),
        Command::Ebpf(args) => return ebpf::run(workspace, &args),
        Command::E2e => return e2e::run(workspace),
        Command::Monitoring => return monitoring::run(workspace),
        Command::Codegen(args) => return script::run(workspace, "codegen", &args),
        Command::Fuzz(args) => return script::run(workspace, "fuzz", &args),
        Command::Setup(args) => return script::run(workspace, "setup", &args),
        Command::Loom => return script("loom"),
        Command::Miri => return script("miri"),
        Command::Names => return script("names"),
        Command::Pages => return script("pages"),
        Command::Static => return script("static"),
        Command::Workflows => return script("workflows"),
        Command::Test(args) => test::run(workspace, &args),
        Command::Ci(args) => ci::run(workspace, &args),
        Command::Tidy => tidy::run(workspace),
        Command::Docs => docs::run(workspace),
        Command::Perf(args) => perf::run(workspace, &args),
        Command::Dist(args) => dist::run(workspace, &args),
        Command::Release(args) => release::run(workspace, &args),
        Command::ImageTrial(args) => dist::try_images(workspace, &args),
        Command::Confined(args) => dist::confine(&args),
        Command::Vm(args) => vm::run(workspace, &args),
    }?;
    Ok(Outcome::Done)
}

/// Runs a command line as if typed after `cargo xtask`.
///
/// # Errors
/// The line is not a valid command, or the command fails.
fn run_line(workspace: &Workspace, line: &str) -> anyhow::Result<Outcome> {
    let words = std::iter::once("xtask").chain(line.split_whitespace());
    run(workspace, Cli::try_parse_from(words)?)
}
