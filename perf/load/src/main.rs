//! `adit-load`: the load generator and helper programs of `cargo xtask perf`.
//!
//! One process serves the targets, another generates the load; both work with any server and agent between them. The bare relay
//! and the throttle are references for results: a path without a protocol, and a path slowed on purpose.

mod agents;
mod certs;
mod long_path;
mod measure;
mod parent_death;
mod probe;
mod process;
mod relay;
mod reviews;
mod target;
mod throttle;
mod way;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;

use adit_perf_plan::Shape;
use anyhow::Context as _;
use clap::{Parser, Subcommand};
use rustix::process::{Resource, getrlimit, setrlimit};

use crate::measure::Load;
use crate::way::Targets;

/// Asks a server whether it is ready: it has an agent.
const READYZ: &str = "GET /readyz HTTP/1.0\r\nHost: localhost\r\n\r\n";

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
    Run(Box<Load>),
    /// Relay a port to each target without any protocol, print the ports as JSON, and end when standard input closes.
    Relay {
        /// Addresses of the targets, as `target` printed them.
        #[arg(long, value_parser = from_json::<Targets>)]
        targets: Targets,
        /// What moves bytes.
        #[command(flatten)]
        options: relay::Options,
    },
    /// Wait until an echo comes back, for at most 20 seconds.
    Probe { address: SocketAddr },
    /// Wait until a server says on its health port that it is ready, for at most 20 seconds.
    Ready { address: SocketAddr },
    /// Connect two network namespaces by a path with a delay, a rate and losses, print the name of the device at its ends
    /// as JSON, and end when standard input closes.
    LongPath {
        /// Namespace of one end, as in /proc/PID/ns/net.
        #[arg(long)]
        near: PathBuf,
        /// Namespace of the other end.
        #[arg(long)]
        far: PathBuf,
        /// What the path is like, as JSON.
        #[arg(long, value_parser = from_json::<Shape>)]
        shape: Shape,
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

fn from_json<T: serde::de::DeserializeOwned>(text: &str) -> serde_json::Result<T> {
    serde_json::from_str(text)
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
        Command::Run(load) => block_on(async {
            let sample = measure::run(&load).await?;
            println!("{}", serde_json::to_string(&sample)?);
            Ok(())
        }),
        Command::Relay { targets, options } => relay::serve(&targets, &options),
        Command::Probe { address } => probe::until("no echo", address, "?", "?"),
        Command::Ready { address } => probe::until("not ready", address, READYZ, " 200 "),
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
