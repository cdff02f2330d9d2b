//! `cargo xtask ci`: everything a change must pass, in the order that fails soonest.

use std::process::Command;
use std::time::Duration;

use crate::steps::{self, Steps, run_command};
use crate::workspace::Workspace;
use crate::{codegen, ebpf, fuzz, loom, miri, perf, static_binary, test, tidy, vm};

/// Longest time for a step that builds the workspace.
const BUILD: Duration = Duration::from_secs(20 * 60);
/// What all of it is meant to take on two cores from a fresh clone. A slow host is no failure, but is said.
const GOAL: Duration = Duration::from_secs(75 * 60);
/// Longest time for the demo, once built.
const DEMO: Duration = Duration::from_secs(5 * 60);
/// The first command of the README.
const DEMO_COMMAND: [&str; 4] = ["run", "--release", "--", "demo"];
/// Time for each fuzz target.
const FUZZ_SECONDS: u64 = 30;

/// How much of it to run.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Only what a push should wait for: no integration tests, models, fuzzing, documentation or demo.
    #[arg(long)]
    quick: bool,
}

/// Runs the steps and sums them up. All run, even after a failure.
///
/// # Errors
/// When one of them failed.
pub(crate) fn run(workspace: &Workspace, args: &Args) -> anyhow::Result<()> {
    let mut steps = Steps::new();
    let cargo = |args: &[&str], limit: Duration| run_command(&mut workspace.cargo(args), limit);

    steps.run("fmt", || {
        cargo(&["fmt", "--all", "--check"], BUILD)?;
        // A workspace of its own.
        let manifest = "ebpf-programs/programs/Cargo.toml";
        cargo(&["fmt", "--manifest-path", manifest, "--check"], BUILD)
    });
    steps.run("tidy", || tidy::run(workspace));
    steps.run("codegen --check", || {
        codegen::run(workspace, &codegen::Args { check: true })
    });
    steps.run("ebpf --check", || {
        ebpf::run(workspace, &ebpf::Args::only_check())
    });
    steps.run("clippy", || {
        cargo(
            &[
                "clippy",
                "--quiet",
                "--workspace",
                "--all-targets",
                "--",
                "-D",
                "warnings",
            ],
            BUILD,
        )
    });
    steps.run("test", || {
        test::run(workspace, &test::Args::for_ci(args.quick))
    });
    if args.quick {
        return steps.finish();
    }

    steps.run("doc", || {
        let mut doc = workspace.cargo(&["doc", "--quiet", "--workspace", "--no-deps"]);
        run_command(doc.env("RUSTDOCFLAGS", "-D warnings"), BUILD)
    });
    steps.run("loom", || loom::run(workspace));
    match miri::availability() {
        Ok(()) => steps.run("miri", || miri::run(workspace)),
        Err(why) => steps.skip("miri", &why),
    }
    match fuzz::availability(workspace) {
        Ok(()) => steps.run("fuzz", || {
            fuzz::run(workspace, &fuzz::Args::all_for(FUZZ_SECONDS))
        }),
        Err(why) => steps.skip("fuzz", &why),
    }
    aarch64(workspace, &mut steps);
    kernel(workspace, &mut steps);
    deny(workspace, &mut steps);
    // Without `--package`, as the demo below is run: alone it would have other features of what it uses, and be built twice.
    steps.run("build --release", || {
        cargo(&["build", "--quiet", "--release", "--bin", "adit"], BUILD)
    });
    steps.run("tunnels by the thousand, bytes by the GiB", || {
        test::at_scale(workspace)
    });
    steps.run("demo --once", || {
        cargo(&[&DEMO_COMMAND[..], &["--once"]].concat(), DEMO)
    });
    steps.run("static", || static_binary::run(workspace));
    isolation(workspace, &mut steps);
    accounting(workspace, &mut steps);
    steps.run("perf guard", || {
        perf::run(workspace, &perf::Args::parse("--guard --quick --planted")?)
    });
    // Behind the guard, which has built the commit before: here nothing is.
    match perf::commit_before(workspace) {
        Ok((commit, binary)) => steps.run(&format!("interop with commit {commit}"), || {
            test::beside(workspace, &binary)
        }),
        Err(why) => steps.skip("interop with the commit before", &format!("{why:#}")),
    }
    if steps.elapsed() > GOAL {
        let minutes = GOAL.as_secs() / 60;
        println!("ci: SLOW: this took longer than the {minutes} minutes it is meant to take");
    }
    steps.finish()
}

/// Whether what has no C in it compiles for the other processor of data centres, where rustup has or can fetch its library.
/// The program itself needs a C cross compiler for its cryptography.
fn aarch64(workspace: &Workspace, steps: &mut Steps) {
    const TARGET: &str = "aarch64-unknown-linux-gnu";
    let mut add = Command::new("rustup");
    add.args(["--quiet", "target", "add", TARGET]);
    if let Err(error) = run_command(&mut add, steps::MINUTES_5) {
        return steps.skip(
            "check for aarch64",
            &format!("no library of {TARGET}: {error:#}"),
        );
    }
    let mut packages = Vec::new();
    for package in ["adit-core", "adit-relay", "adit-ebpf-abi"] {
        packages.extend(["--package", package]);
    }
    let compiler = Command::new("aarch64-linux-gnu-gcc")
        .arg("--version")
        .output();
    if compiler.is_ok() {
        packages.extend(["--package", "adit"]);
    } else {
        println!("check for aarch64: SKIPPED for adit itself: no aarch64-linux-gnu-gcc");
    }
    steps.run("check for aarch64", || {
        let mut check = workspace.cargo(&["check", "--quiet", "--target", TARGET]);
        run_command(check.args(packages), BUILD)
    });
}

/// Boots one kernel. A laptop may lack what that takes; CI installs it, but may be unable to fetch a kernel.
fn kernel(workspace: &Workspace, steps: &mut Steps) {
    match vm::availability() {
        // `.ci/run` has said why it could not be installed.
        Err(why) => steps.skip("vm", &why),
        Ok(()) => match vm::kernel_for_ci(workspace) {
            Ok(()) => steps.run("vm", || vm::run(workspace, &vm::Args::for_ci())),
            Err(error) => steps.skip("vm", &format!("no kernel could be fetched: {error:#}")),
        },
    }
}

/// Whether stalled readers leave others alone, in the dialects whose load can be made here.
fn isolation(workspace: &Workspace, steps: &mut Steps) {
    if let Err(why) = perf::go_toolchain() {
        steps.skip("isolation of grpc-go", &why);
    }
    steps.run("isolation", || {
        let line = "--quick --rounds=7 --seconds=0.8 --peers=adit --only=isolation --check";
        perf::run(workspace, &perf::Args::parse(line)?)
    });
}

/// Whether accounting costs an echo or a transfer more than it may, where the kernel lets it be measured.
fn accounting(workspace: &Workspace, steps: &mut Steps) {
    const STEP: &str = "overhead of accounting";
    match perf::why_not_accounted(workspace) {
        Ok(None) => steps.run(STEP, || {
            let line =
                "--scenario=account-cgroups --rounds=5 --seconds=0.4 --only=echo,bulk --check";
            perf::run(workspace, &perf::Args::parse(line)?)
        }),
        Ok(Some(why)) => steps.skip(STEP, &why),
        Err(error) => steps.run(STEP, || Err(error)),
    }
}

/// Checks advisories, licences and sources where `cargo-deny` is installed: it needs its database from the network.
fn deny(workspace: &Workspace, steps: &mut Steps) {
    let found = Command::new("cargo-deny")
        .arg("--version")
        .output()
        .is_ok_and(|out| out.status.success());
    if found {
        steps.run("deny", || {
            run_command(&mut workspace.cargo(&["deny", "check"]), steps::MINUTES_5)
        });
    } else {
        steps.skip("deny", "cargo-deny is not installed");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_demo_is_run_as_the_readme_says() {
        let readme = Workspace::here().unwrap().text("README.md").unwrap();
        let command = format!("\ncargo {} ", DEMO_COMMAND.join(" "));
        assert!(readme.unwrap().contains(&command), "{command}");
    }
}
