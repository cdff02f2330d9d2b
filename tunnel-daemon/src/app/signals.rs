//! SIGINT and SIGTERM, counted.

use tokio::signal::unix::{Signal, SignalKind, signal};

/// Waits for the next of either signal.
pub struct Signals {
    interrupt: Signal,
    terminate: Signal,
}

impl Signals {
    /// Takes both signals over from their defaults.
    ///
    /// # Errors
    /// When the system refuses the handlers.
    pub fn new() -> std::io::Result<Self> {
        Ok(Self {
            interrupt: signal(SignalKind::interrupt())?,
            terminate: signal(SignalKind::terminate())?,
        })
    }

    /// Completes at the next signal.
    pub async fn next(&mut self) {
        tokio::select! {
            _ = self.interrupt.recv() => (),
            _ = self.terminate.recv() => (),
        }
    }
}
