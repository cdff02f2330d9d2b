//! The bare relay: a port for each target, and a forwarding loop between them: adit-relay's, or tokio-uring's for comparison. It
//! has no protocol and no TLS: it shows this machine's cost of forwarding bytes, the guard's reference.

mod tokio_uring_copy;

use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::Arc;

use adit_relay::{Pair, Preference, Relay, RelayConfig, Thresholds, probe};
use anyhow::Context as _;

use crate::way::Targets;

/// What moves bytes; what is not said is chosen as the daemon chooses it.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// Driver of the loop: auto, epoll, io-uring, or tasks of tokio-uring that copy.
    #[arg(long, default_value = "auto")]
    engine: String,
    /// How bytes move.
    #[arg(long, value_parser = ["auto", "copy", "splice"], default_value = "auto")]
    mover: String,
}

/// Takes a client and the connection to its target, both blocking.
type Connections = Box<dyn Fn(TcpStream, TcpStream) -> io::Result<()> + Send + Sync>;

impl Options {
    fn start(&self) -> anyhow::Result<Connections> {
        if self.engine == "tokio-uring" {
            return Ok(tokio_uring_copy::start());
        }
        let engine: Preference = self.engine.parse().map_err(anyhow::Error::msg)?;
        let mut config = RelayConfig::new(probe(engine)?);
        config.thresholds = match self.mover.as_str() {
            "copy" => Thresholds::copy_only(),
            "splice" => Thresholds::splice_at_once(),
            _auto => Thresholds::default(),
        };
        let relay = Relay::start(&config).context("starting the relay")?;
        Ok(Box::new(move |client, target| {
            for stream in [&client, &target] {
                stream.set_nonblocking(true)?;
            }
            let pair = Pair::new(OwnedFd::from(client), OwnedFd::from(target));
            let submitted = relay.handle().submit(pair, Box::new(drop));
            submitted
                .map(drop)
                .map_err(|refused| io::Error::other(refused.why))
        }))
    }
}

/// Relays until standard input closes.
///
/// # Errors
/// A port or thread is not available.
pub(crate) fn serve(targets: &Targets, options: &Options) -> anyhow::Result<()> {
    let relay = Arc::new(options.start()?);
    let port = |to| forward(Arc::clone(&relay), to);
    let ports = Targets {
        echo: port(targets.echo)?,
        source: port(targets.source)?,
        sink: port(targets.sink)?,
    };
    println!("{}", serde_json::to_string(&ports)?);
    crate::parent_death::until_stdin_closes()
}

/// Accepts on a new port, in a thread that lives as long as the process.
fn forward(relay: Arc<Connections>, to: SocketAddr) -> anyhow::Result<SocketAddr> {
    let listener = TcpListener::bind(("127.0.0.1", 0)).context("listening")?;
    let address = listener.local_addr()?;
    std::thread::spawn(move || {
        for client in listener.incoming() {
            // Close a connection that cannot be relayed: its client counts that as a failure.
            if let Err(error) = client.and_then(|client| pass_on(&relay, client, to)) {
                eprintln!("adit-load relay: {error}");
            }
        }
    });
    Ok(address)
}

fn pass_on(relay: &Connections, client: TcpStream, to: SocketAddr) -> io::Result<()> {
    let target = TcpStream::connect(to)?;
    for stream in [&client, &target] {
        stream.set_nodelay(true)?;
    }
    relay(client, target)
}
