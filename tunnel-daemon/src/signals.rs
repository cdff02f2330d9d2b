//! Signals that end the process: SIGINT, SIGTERM, and SIGHUP for a process on a terminal.

use std::future::pending;

use tokio::signal::unix::{Signal, SignalKind, signal};

/// Waits for the next of these signals, which end the process.
pub struct Signals {
    interrupt: Signal,
    terminate: Signal,
    hangup: Option<Signal>,
}

impl Signals {
    /// Replaces the default handlers of SIGINT and SIGTERM.
    ///
    /// # Errors
    /// The system refuses the handlers.
    pub fn new() -> std::io::Result<Self> {
        Ok(Self {
            interrupt: signal(SignalKind::interrupt())?,
            terminate: signal(SignalKind::terminate())?,
            hangup: None,
        })
    }

    /// Also handles SIGHUP, unless the process was started to outlive its terminal, as by `nohup`.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn of_terminal() -> std::io::Result<Self> {
        Ok(Self {
            hangup: hangup()?,
            ..Self::new()?
        })
    }

    /// Completes at the next signal.
    pub async fn next(&mut self) {
        let Self {
            interrupt,
            terminate,
            hangup,
        } = self;
        tokio::select! {
            _ = interrupt.recv() => (),
            _ = terminate.recv() => (),
            () = received(hangup) => (),
        }
    }
}

/// Replaces the default handler of SIGHUP; `None`: this process was started to ignore it, as by `nohup`.
///
/// # Errors
/// The system refuses the handler.
pub(super) fn hangup() -> std::io::Result<Option<Signal>> {
    let taken = (!is_hangup_ignored()).then(|| signal(SignalKind::hangup()));
    taken.transpose()
}

/// Completes at the next such signal; `None` never comes.
pub(super) async fn received(signal: &mut Option<Signal>) {
    match signal {
        Some(signal) => _ = signal.recv().await,
        None => pending().await,
    }
}

/// Whether this process was started to outlive its terminal.
fn is_hangup_ignored() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    ignores_hangup(&status)
}

/// Reads the SigIgn mask of a `/proc/PID/status`; its lowest bit is signal 1 (SIGHUP).
fn ignores_hangup(status: &str) -> bool {
    let mask = status
        .lines()
        .find_map(|line| line.strip_prefix("SigIgn:"))
        .and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    mask.is_some_and(|mask| mask & 1 == 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nohup_is_recognised_by_the_ignored_sighup() {
        for (mask, expected) in [
            ("0000000000001001", true),
            ("0000000000001000", false),
            ("none", false),
        ] {
            let status = format!("SigBlk:\t0000000000000001\nSigIgn:\t{mask}\nSigCgt:\t1\n");
            assert_eq!(ignores_hangup(&status), expected, "{mask}");
        }
        assert!(!ignores_hangup(""));
    }
}
