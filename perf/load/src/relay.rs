//! The bare relay: a port for each target, and a forwarding loop between them: adit-relay's, or another for comparison. It has
//! no protocol and no TLS: it shows this machine's cost of forwarding bytes, the guard's reference.

mod ring_splice;
mod tokio_copy;
mod tokio_uring_copy;

use std::io::Write as _;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::Arc;

use adit_relay::{Pair, Preference, Relay, RelayConfig, Thresholds, probe};
use anyhow::Context as _;
use serde::Serialize;

use crate::way::{Target, Targets};

/// Buffer or pipe of a direction in loops other than adit-relay's: the size to which adit-relay's buffers grow.
const BUFFER_BYTES: usize = 256 * 1024;
/// Connections waiting for a thread; the accepting thread blocks beyond that.
const WAITING_MAX: usize = 64;

/// Takes a client and the connection to its target. Both sockets have TCP_NODELAY, and block unless the loop changes that.
type Connections = Box<dyn Fn(TcpStream, TcpStream) -> std::io::Result<()> + Send + Sync>;

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
    /// As the daemon chooses.
    Auto,
    /// Of adit-relay.
    Epoll,
    /// Of adit-relay.
    IoUring,
    /// Tasks of tokio that copy.
    Tokio,
    /// Tasks of tokio-uring that copy.
    TokioUring,
    /// The ring itself splices.
    RingSplice,
}

/// How bytes move.
#[derive(Clone, Copy, clap::ValueEnum)]
enum MoverName {
    Auto,
    Copy,
    Splice,
}

impl Options {
    fn start(&self) -> anyhow::Result<Connections> {
        let preference = match self.engine {
            EngineName::Auto => Preference::Auto,
            EngineName::Epoll => Preference::Epoll,
            EngineName::IoUring => Preference::IoUring,
            EngineName::Tokio => return tokio_copy::start(),
            EngineName::TokioUring => return tokio_uring_copy::start(),
            EngineName::RingSplice => return ring_splice::start(),
        };
        let mut config = RelayConfig::new(probe(preference)?);
        config.thresholds = match self.mover {
            MoverName::Auto => Thresholds::default(),
            MoverName::Copy => Thresholds::copy_only(),
            MoverName::Splice => Thresholds::splice_at_once(),
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
                .map_err(|refused| std::io::Error::other(refused.why))
        }))
    }
}

/// Relays until standard input closes.
///
/// # Errors
/// A port or thread is not available.
pub(crate) fn serve(targets: &Targets, options: &Options) -> anyhow::Result<()> {
    let relay: Arc<Connections> = Arc::new(options.start()?);
    let port = |target| forward(Arc::clone(&relay), targets.address(target));
    let addresses = Addresses {
        echo: port(Target::Echo)?,
        source: port(Target::Source)?,
        sink: port(Target::Sink)?,
    };
    println!("{}", serde_json::to_string(&addresses)?);
    std::io::stdout().flush()?;
    crate::parent_death::until_stdin_closes()
}

/// Runs a loop in a thread that lives as long as the process.
fn in_thread(run: impl FnOnce() + Send + 'static) -> std::io::Result<()> {
    let thread = std::thread::Builder::new().name("relay".to_owned());
    thread.spawn(run).map(drop)
}

/// Accepts on a new port, in a thread that lives as long as the process.
fn forward(relay: Arc<Connections>, to: SocketAddr) -> anyhow::Result<SocketAddr> {
    let listener = TcpListener::bind(("127.0.0.1", 0)).context("listening")?;
    let address = listener.local_addr()?;
    std::thread::Builder::new()
        .name("accept".to_owned())
        .spawn(move || {
            for client in listener.incoming() {
                // Close a connection that cannot be relayed: its client counts that as a failure.
                if let Err(error) = client.and_then(|client| pass_on(&relay, client, to)) {
                    eprintln!("adit-load relay: {error}");
                }
            }
        })?;
    Ok(address)
}

fn pass_on(relay: &Connections, client: TcpStream, to: SocketAddr) -> std::io::Result<()> {
    let target = TcpStream::connect(to)?;
    for stream in [&client, &target] {
        stream.set_nodelay(true)?;
    }
    relay(client, target)
}
