//! Signals that ask a running server or agent for something: SIGHUP rereads files, SIGUSR1 switches debug logging.

use std::convert::Infallible;
use std::io;

use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::signals::{hangup, received};
use adit_net::inherited::InheritedSockets;
use adit_telemetry::DebugLog;
use adit_tls::reread::Reread;

/// Handles for these requests. Clones share them.
#[derive(Clone, Default)]
pub struct Controls {
    /// Tells all followers of files to reread them.
    pub reread: Reread,
    /// The log's level.
    pub debug: DebugLog,
    /// Sockets that the service manager opened.
    pub inherited: InheritedSockets,
}

/// Signals that request something other than an end. From here on none of them ends the process.
pub(super) struct Requests {
    /// `None`: the process was started to ignore SIGHUP, as by `nohup`.
    hangup: Option<Signal>,
    user1: Signal,
    user2: Signal,
}

impl Requests {
    /// Replaces the signals' default handlers.
    ///
    /// # Errors
    /// The system refuses the handlers.
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self {
            hangup: hangup()?,
            user1: signal(SignalKind::user_defined1())?,
            user2: signal(SignalKind::user_defined2())?,
        })
    }

    /// Serves requests, and switches debug logging off when its time is over.
    pub(super) async fn serve(mut self, controls: &Controls) -> Infallible {
        let ends = controls.debug.run();
        tokio::pin!(ends);
        loop {
            tokio::select! {
                () = received(&mut self.hangup) => {
                    tracing::info!("SIGHUP received: reading files again");
                    controls.reread.ask();
                }
                _ = self.user1.recv() => {
                    if let Err(error) = controls.debug.toggle("SIGUSR1") {
                        tracing::warn!(%error, "debug logging cannot be switched");
                    }
                }
                _ = self.user2.recv() => tracing::info!("SIGUSR2 received: it has no effect"),
                () = &mut ends => (),
            }
        }
    }
}

/// Keeps a helper process of a server or agent alive when these signals are sent to all processes of the program's name.
///
/// # Errors
/// The system refuses the handlers.
pub(super) fn outlive_requests() -> io::Result<()> {
    // The handlers stay for the life of the process.
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .build()?;
    let _entered = runtime.enter();
    Requests::new().map(drop)
}
