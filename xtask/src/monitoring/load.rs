//! Clients and targets: echoes, dials that are refused, and a client that does not read.

use std::io::Write as _;
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use anyhow::ensure;

use crate::stack::{connect, echo, echo_target, target};

/// Sent and echoed on each tunnel.
static PAYLOAD: [u8; 64 << 10] = [7; 64 << 10];
/// Between two rounds.
const PAUSE: Duration = Duration::from_millis(50);

/// What all clients share.
#[derive(Default)]
struct Shared {
    is_over: AtomicBool,
    echoed: AtomicUsize,
    refused: AtomicUsize,
}

/// It goes on until dropped.
pub(super) struct Load(Arc<Shared>);

impl Load {
    /// Starts targets, and clients at each of the sockets.
    ///
    /// # Errors
    /// No port is free.
    pub(super) fn start(frontends: &[PathBuf]) -> anyhow::Result<Self> {
        let source = target(|mut stream| {
            loop {
                stream.write_all(&PAYLOAD)?;
            }
        })?;
        let (echo, closed) = (
            echo_target()?,
            TcpListener::bind("127.0.0.1:0")?.local_addr()?,
        );
        let shared = Arc::new(Shared::default());
        for frontend in frontends {
            let (frontend, shared) = (frontend.clone(), Arc::clone(&shared));
            thread::spawn(move || client(&frontend, &shared, [echo, source, closed]));
        }
        Ok(Self(shared))
    }

    /// Whether there were tunnels and refused dials.
    ///
    /// # Errors
    /// There were none.
    pub(super) fn check(&self) -> anyhow::Result<()> {
        let of = |count: &AtomicUsize| count.load(Ordering::Relaxed);
        let (echoed, refused) = (of(&self.0.echoed), of(&self.0.refused));
        println!("monitoring: {echoed} tunnels and {refused} refused dials");
        ensure!(
            echoed > 0 && refused > 0,
            "the load did not reach its targets"
        );
        Ok(())
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.0.is_over.store(true, Ordering::Relaxed);
    }
}

/// Opens tunnels one after the other. Before agents are there, they fail.
fn client(frontend: &Path, shared: &Shared, [echoes, source, closed]: [SocketAddr; 3]) {
    let mut paused = None;
    while !shared.is_over.load(Ordering::Relaxed) {
        if echo(frontend, echoes, &PAYLOAD).is_ok() {
            shared.echoed.fetch_add(1, Ordering::Relaxed);
        }
        if connect(frontend, closed).is_ok_and(|(status, _stream)| status == 502) {
            shared.refused.fetch_add(1, Ordering::Relaxed);
        }
        paused = paused.or_else(|| {
            let opened = connect(frontend, source).ok();
            opened.filter(|(status, _stream)| *status == 200)
        });
        thread::sleep(PAUSE);
    }
}
