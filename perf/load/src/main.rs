//! `adit-load`: the load generator and helper programs of `cargo xtask perf`.
//!
//! One process serves the targets, another generates the load; both work with any server and agent between them. The bare relay
//! and the throttle are references for results: a path without a protocol, and a path slowed on purpose.

mod agents;
mod certs;
mod long_path;
mod measure;
mod outcome;
mod parent_death;
mod plan;
mod probe;
mod process;
mod quantile;
mod relay;
mod reviews;
mod target;
mod throttle;
mod way;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context as _;
use clap::{Parser, Subcommand};
use rustix::process::{Resource, getrlimit, setrlimit};

use crate::agents::AgentPort;
use crate::measure::Load;
use crate::process::Process;
use crate::way::{Dialer, Targets, Way};

/// Measures a path to targets, serves the targets, and relays for comparison.
#[derive(Parser)]
#[command(name = "adit-load", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Serve the targets, print their addresses as JSON, and end when standard input closes.
    Target {
        /// Address to listen on; every target takes a free port of it.
        #[arg(long, default_value = "127.0.0.1")]
        host: std::net::IpAddr,
    },
    /// Write a throw-away CA and pairs for a server and an agent, good for a day.
    Certs {
        /// Folder to write to.
        folder: PathBuf,
        /// Another name or address the server is reached by, beside those of loopback; repeatable.
        #[arg(long = "name")]
        names: Vec<String>,
    },
    /// Review tokens of agents as the Kubernetes API would, write a kubeconfig and an agent's token, print the address as JSON, and
    /// end when standard input closes.
    Reviews {
        /// Folder to write to.
        folder: PathBuf,
    },
    /// Measure, and print one JSON object.
    Run(RunArgs),
    /// Relay a port to each target without any protocol, print the ports as JSON, and end when standard input closes.
    Relay {
        /// Addresses of the targets, as `target` printed them.
        #[arg(long)]
        targets: Targets,
        /// What moves bytes.
        #[command(flatten)]
        options: relay::Options,
    },
    /// Wait until an echo comes back, for at most 20 seconds.
    Probe {
        /// Addresses of the targets.
        #[arg(long)]
        targets: Targets,
    },
    /// Wait until a server says that it is ready, for at most 20 seconds.
    Ready {
        /// Its health port.
        #[arg(long)]
        address: SocketAddr,
    },
    /// Connect two network namespaces by a path with a delay, a rate and losses, print the name of the device at its ends
    /// as JSON, and end when standard input closes.
    LongPath {
        /// Namespace of one end, as in /proc/PID/ns/net.
        #[arg(long)]
        near: PathBuf,
        /// Namespace of the other end.
        #[arg(long)]
        far: PathBuf,
        /// What the path is like.
        #[command(flatten)]
        shape: long_path::Shape,
    },
    /// Pass a unix socket on to another one with a copy and a pause for each piece: a slowdown that must be noticed.
    Throttle {
        /// Socket to listen on.
        #[arg(long)]
        listen: PathBuf,
        /// Socket to pass on to.
        #[arg(long)]
        to: PathBuf,
    },
    /// Become another program that the kernel kills as soon as the process that started it is gone.
    Tie {
        /// Process that must still be the parent.
        #[arg(long)]
        parent: u32,
        /// The program and its arguments.
        #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
        program: Vec<String>,
    },
}

#[derive(clap::Args)]
struct RunArgs {
    /// How targets are reached.
    #[arg(long, value_enum)]
    way: Way,
    /// Unix socket of the frontend; `tcp` needs none.
    #[arg(long)]
    frontend: Option<PathBuf>,
    /// Where each target is reached: its own address, or for `tcp` the port that leads to it.
    #[arg(long)]
    targets: Targets,
    /// Where the targets tell what arrived, reached without the measured path.
    #[arg(long)]
    control: SocketAddr,
    /// Where agents connect to the server, for the measurement of that name.
    #[arg(long, requires = "certs")]
    agents: Option<SocketAddr>,
    /// Folder with the pair of an agent and its CA, as `certs` writes it.
    #[arg(long, value_name = "FOLDER")]
    certs: Option<PathBuf>,
    /// Agents prove themselves by a token each, for `reviews`, and not by their certificate.
    #[arg(long, requires = "agents")]
    tokens: bool,
    /// Process whose memory and CPU time count, as ROLE=PID; any number.
    #[arg(long = "process", value_name = "ROLE=PID")]
    processes: Vec<Process>,
    /// What to measure, as JSON; fields left out keep their defaults.
    #[arg(long, default_value = "{}")]
    plan: String,
}

fn main() -> ExitCode {
    match play(Cli::parse().command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // One line, because the report shows it in a table cell.
            eprintln!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

fn play(role: Command) -> anyhow::Result<()> {
    raise_descriptors()?;
    match role {
        Command::Target { host } => target::serve(host),
        Command::Certs { folder, names } => certs::write(&folder, &names),
        Command::Reviews { folder } => reviews::serve(&folder),
        Command::Run(args) => block_on(run(args)),
        Command::Relay { targets, options } => relay::serve(&targets, &options),
        Command::Probe { targets } => probe::wait(&targets),
        Command::Ready { address } => probe::wait_ready(address),
        Command::LongPath { near, far, shape } => long_path::serve(&near, &far, &shape),
        Command::Throttle { listen, to } => block_on(throttle::serve(listen, to)),
        Command::Tie { parent, program } => parent_death::become_program(parent, &program),
    }
}

/// Raises the soft limit of descriptors to the hard limit, for this process and the program it becomes: thousands of idle
/// tunnels must not fail at the default.
fn raise_descriptors() -> anyhow::Result<()> {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    setrlimit(Resource::Nofile, limit).context("raising the limit of descriptors")
}

fn block_on(work: impl Future<Output = anyhow::Result<()>>) -> anyhow::Result<()> {
    tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .context("starting the runtime")?
        .block_on(work)
}

async fn run(args: RunArgs) -> anyhow::Result<()> {
    let plan = serde_json::from_str(&args.plan).context("reading --plan")?;
    let dialer = Dialer::new(args.way, args.frontend, args.targets)?;
    let agents = args.agents.zip(args.certs);
    let load = Load {
        plan: &plan,
        dialer,
        control: args.control,
        agents: agents.map(|(address, certs)| AgentPort {
            address,
            certs,
            tokens: args.tokens,
        }),
        processes: args.processes,
    };
    let outcome = measure::run(load).await?;
    println!("{}", serde_json::to_string(&outcome)?);
    Ok(())
}
