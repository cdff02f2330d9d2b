//! `cargo xtask perf`: upstream and our release binary under the same load, side by side in one run.
//!
//! Server, agent, target and load tool are processes of their own. The makers take turns round by round, so that
//! whatever else the machine does hits both. Absolute numbers belong to this machine; the ratio is what counts.

mod report;
mod stack;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use anyhow::{Context as _, bail, ensure};

use report::{Results, Sample};
use stack::{Maker, Mode, Stack};

/// What the command line asked for.
struct Plan {
    rounds: usize,
    /// Length of each timed measurement, as Go spells durations.
    lasting: &'static str,
    makers: Vec<Maker>,
    modes: Vec<Mode>,
    only: Option<String>,
    /// Fail when a row is worse than upstream, or stalled readers slow the echo of others.
    check: bool,
    adit: Option<PathBuf>,
}

/// Paths of the programs that are run.
struct Programs {
    load: PathBuf,
    upstream_server: PathBuf,
    upstream_agent: PathBuf,
    adit: Option<PathBuf>,
}

/// Runs the command.
pub(crate) fn run(args: &[String]) -> anyhow::Result<()> {
    let plan = Plan::parse(args)?;
    let root = Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .context("xtask is inside the repository")?;
    let out = root.join("target/perf");
    fs::create_dir_all(&out)?;
    let programs = Programs::build(root, &out, &plan)?;

    let begin = Instant::now();
    let mut results = Results::default();
    for round in 1..=plan.rounds {
        for mode in &plan.modes {
            for maker in &plan.makers {
                eprintln!(
                    "round {round}/{}: {} {}",
                    plan.rounds,
                    maker.name(),
                    mode.flag()
                );
                let sample = measure(&programs, *maker, *mode, &plan)
                    .with_context(|| format!("{} in {} mode", maker.name(), mode.flag()))?;
                results.add(*maker, *mode, sample);
            }
        }
    }
    let table = results.markdown(&heading(root, &plan, begin));
    fs::write(out.join("perf.md"), &table)?;
    fs::write(out.join("perf.json"), results.json()?)?;
    println!("{table}");
    eprintln!("written to {}", out.join("perf.md").display());
    let worse = results.worse();
    ensure!(
        !plan.check || worse.is_empty(),
        "worse than upstream: {}",
        worse.join(", ")
    );
    let disturbed = results.disturbed();
    ensure!(
        !plan.check || disturbed.is_empty(),
        "beside stalled readers: {}",
        disturbed.join(", ")
    );
    Ok(())
}

impl Plan {
    fn parse(args: &[String]) -> anyhow::Result<Self> {
        let mut plan = Self {
            rounds: 5,
            lasting: "4s",
            makers: vec![Maker::Upstream, Maker::Adit],
            modes: vec![Mode::Grpc, Mode::HttpConnect],
            only: None,
            check: false,
            adit: None,
        };
        for arg in args {
            match arg.split_once('=').unwrap_or((arg, "")) {
                ("--quick", _) => (plan.rounds, plan.lasting) = (3, "800ms"),
                ("--rounds", count) => {
                    plan.rounds = count.parse().context("--rounds wants a number")?
                }
                ("--makers", "upstream") => plan.makers = vec![Maker::Upstream],
                ("--makers", "adit") => plan.makers = vec![Maker::Adit],
                ("--modes", "grpc") => plan.modes = vec![Mode::Grpc],
                ("--modes", "http-connect") => plan.modes = vec![Mode::HttpConnect],
                ("--only", names) => plan.only = Some(names.to_owned()),
                ("--adit", path) => plan.adit = Some(PathBuf::from(path)),
                ("--check", _) => plan.check = true,
                _ => bail!(
                    "perf does not know {arg}: use --quick, --rounds=N, --makers=upstream|adit, \
                     --modes=grpc|http-connect, --only=idle,echo,dials,bulk,isolation, --adit=PATH, --check"
                ),
            }
        }
        ensure!(plan.rounds > 0, "--rounds wants at least 1");
        Ok(plan)
    }
}

impl Programs {
    /// Builds all of them; Go and cargo skip what is up to date.
    fn build(root: &Path, out: &Path, plan: &Plan) -> anyhow::Result<Self> {
        let interop = root.join("tunnel-daemon/tests/interop/go");
        let bin = out.join("bin");
        fs::create_dir_all(&bin)?;
        let upstream = |role: &str| {
            let out = bin.join(format!("upstream-{role}"));
            if plan.makers.contains(&Maker::Upstream) {
                let package = format!("sigs.k8s.io/apiserver-network-proxy/cmd/{role}");
                return go_build(&interop, &package, &out);
            }
            Ok(out)
        };
        let programs = Self {
            load: go_build(&root.join("perf/load"), ".", &bin.join("load"))?,
            upstream_server: upstream("server")?,
            upstream_agent: upstream("agent")?,
            adit: match &plan.adit {
                Some(path) => Some(path.clone()),
                None if plan.makers.contains(&Maker::Adit) => Some(release_build(root)?),
                None => None,
            },
        };
        Ok(programs)
    }

    /// Program and leading arguments of a role, `server` or `agent`.
    fn role(&self, maker: Maker, role: &str) -> anyhow::Result<(PathBuf, Vec<String>)> {
        match (maker, role) {
            (Maker::Upstream, "server") => Ok((self.upstream_server.clone(), Vec::new())),
            (Maker::Upstream, _) => Ok((self.upstream_agent.clone(), Vec::new())),
            (Maker::Adit, _) => {
                let adit = self.adit.clone().context("our binary was not built")?;
                Ok((adit, vec![role.to_owned(), "--compat".to_owned()]))
            }
        }
    }
}

fn go_build(folder: &Path, package: &str, to: &Path) -> anyhow::Result<PathBuf> {
    let go = std::env::var_os("ADIT_GO").unwrap_or_else(|| "go".into());
    let status = Command::new(go)
        .args(["build", "-trimpath", "-o"])
        .arg(to)
        .arg(package)
        .current_dir(folder)
        .env("CGO_ENABLED", "0")
        .env("GOWORK", "off")
        .status()
        .context("running go: install Go 1.26 or name it in ADIT_GO")?;
    ensure!(
        status.success(),
        "go build {package} failed in {}",
        folder.display()
    );
    Ok(to.to_owned())
}

fn release_build(root: &Path) -> anyhow::Result<PathBuf> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let status = Command::new(cargo)
        .args(["build", "--release", "--package", "adit", "--bin", "adit"])
        .current_dir(root)
        .status()
        .context("running cargo")?;
    ensure!(status.success(), "cargo build --release failed");
    Ok(root.join("target/release/adit"))
}

/// One maker in one mode: a fresh stack, one run of the load tool.
fn measure(programs: &Programs, maker: Maker, mode: Mode, plan: &Plan) -> anyhow::Result<Sample> {
    let stack = Stack::start(
        &programs.load,
        programs.role(maker, "server")?,
        programs.role(maker, "agent")?,
        mode,
    )?;
    let mut command = stack.load(&programs.load);
    command.arg(format!("--for={}", plan.lasting));
    if let Some(only) = &plan.only {
        command.arg(format!("--only={only}"));
    }
    let output = command.output().context("running the load tool")?;
    ensure!(
        output.status.success(),
        "the load tool failed: {}{}",
        String::from_utf8_lossy(&output.stderr),
        stack.logs()
    );
    serde_json::from_slice(&output.stdout).context("the load tool prints one JSON object")
}

/// What a reader needs to trust the numbers: command, commit, machine, kernel, time.
fn heading(root: &Path, plan: &Plan, begin: Instant) -> String {
    let line = |program: &str, args: &[&str]| {
        let output = Command::new(program).args(args).current_dir(root).output();
        output
            .map(|out| String::from_utf8_lossy(&out.stdout).trim().to_owned())
            .unwrap_or_default()
    };
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    format!(
        "`cargo xtask perf`, {} rounds of {} a measurement, medians; commit {}, {} cores, {}, {} s in all.\n\
         Upstream is v0.36.0, built from its Go module. Server, agent, target and load share this machine.\n",
        plan.rounds,
        plan.lasting,
        line("git", &["rev-parse", "--short", "HEAD"]),
        cores,
        line("uname", &["-sr"]),
        begin.elapsed().as_secs(),
    )
}
