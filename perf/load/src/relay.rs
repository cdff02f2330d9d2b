//! The bare relay: a port for each target, and the forwarding loop of `adit-relay` between. No protocol, no TLS: what
//! is left is what passing bytes on costs on this machine, the yardstick of the guard.

use std::io::Write as _;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;

use adit_relay::{Pair, Preference, Relay, RelayConfig, RelayHandle, Thresholds, probe};
use anyhow::Context as _;
use serde::Serialize;

use crate::way::{Target, Targets};

#[derive(Serialize)]
struct Addresses {
    echo: SocketAddr,
    source: SocketAddr,
    sink: SocketAddr,
}

/// What moves bytes; what is not said is chosen as the daemon chooses it.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// Driver of the loop.
    #[arg(long, value_enum, default_value_t = EngineName::Auto)]
    engine: EngineName,
    /// How bytes move.
    #[arg(long, value_enum, default_value_t = MoverName::Auto)]
    mover: MoverName,
}

/// Driver of the loop.
#[derive(Clone, Copy, clap::ValueEnum)]
enum EngineName {
    Auto,
    Epoll,
    IoUring,
}

/// How bytes move.
#[derive(Clone, Copy, clap::ValueEnum)]
enum MoverName {
    Auto,
    Copy,
    Splice,
}

impl Options {
    fn config(&self) -> anyhow::Result<RelayConfig> {
        let preference = match self.engine {
            EngineName::Auto => Preference::Auto,
            EngineName::Epoll => Preference::Epoll,
            EngineName::IoUring => Preference::IoUring,
        };
        let mut config = RelayConfig::new(probe(preference)?);
        config.thresholds = match self.mover {
            MoverName::Auto => Thresholds::default(),
            MoverName::Copy => Thresholds::copy_only(),
            MoverName::Splice => Thresholds::splice_at_once(),
        };
        Ok(config)
    }
}

/// Serves until standard input closes.
///
/// # Errors
/// No port or thread to be had.
pub(crate) fn serve(targets: &Targets, options: &Options) -> anyhow::Result<()> {
    let config = options.config()?;
    let relay = Relay::start(&config).context("starting the relay")?;
    let port = |target| forward(relay.handle(), targets.address(target));
    let addresses = Addresses {
        echo: port(Target::Echo)?,
        source: port(Target::Source)?,
        sink: port(Target::Sink)?,
    };
    println!("{}", serde_json::to_string(&addresses)?);
    std::io::stdout().flush()?;
    crate::tie::until_stdin_closes()
}

/// Accepts on a port of its own, in a thread that lives as long as the process.
fn forward(relay: RelayHandle, to: SocketAddr) -> anyhow::Result<SocketAddr> {
    let listener = TcpListener::bind(("127.0.0.1", 0)).context("listening")?;
    let address = listener.local_addr()?;
    std::thread::Builder::new()
        .name("accept".to_owned())
        .spawn(move || {
            for client in listener.incoming() {
                // A connection that cannot be relayed is closed, which its client counts as a failure.
                if let Err(error) = client.and_then(|client| pass_on(&relay, client, to)) {
                    eprintln!("adit-load relay: {error}");
                }
            }
        })?;
    Ok(address)
}

fn pass_on(relay: &RelayHandle, client: TcpStream, to: SocketAddr) -> std::io::Result<()> {
    let target = TcpStream::connect(to)?;
    for stream in [&client, &target] {
        stream.set_nodelay(true)?;
        stream.set_nonblocking(true)?;
    }
    let pair = Pair::new(OwnedFd::from(client), OwnedFd::from(target));
    relay
        .submit(pair, Box::new(drop))
        .map(drop)
        .map_err(|refused| std::io::Error::other(refused.why))
}
