//! How a tunnel on a raw lane ended: the reason, the byte counts, and the engine that moved them.

use std::{fmt, io};

use adit_relay::{Basis, KeysUsedUp, Outcome, PairEnd, Side};

use adit_telemetry::AditMetrics;
use adit_telemetry::labels::{Driver, DriverReason, EndReason, Engine};

/// Why a tunnel on a raw lane ended. [`EndReason::ClientGone`]: the socket failed, which is a client's or a target's.
#[derive(Debug)]
pub struct RawLaneEnd {
    /// The reason in metrics and the access log, on a server.
    pub reason: EndReason,
    /// The kernel's error, if there is one.
    pub error: Option<io::Error>,
}

impl From<EndReason> for RawLaneEnd {
    fn from(reason: EndReason) -> Self {
        Self {
            reason,
            error: None,
        }
    }
}

/// For logs of either end: the reason, and the kernel's error if there is one.
impl fmt::Display for RawLaneEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.error, self.reason) {
            (Some(error), EndReason::ClientGone) => write!(f, "socket failed: {error}"),
            (Some(error), reason) => write!(f, "{reason}: {error}"),
            (None, reason) => write!(f, "{reason}"),
        }
    }
}

/// How a tunnel ended.
#[derive(Debug)]
#[must_use = "an outcome carries the byte counts for metrics and the access log"]
pub struct RawLaneOutcome {
    /// Bytes of the client's or target's socket that the lane took.
    pub from_socket: u64,
    /// Bytes of the lane that the client's or target's socket took.
    pub to_socket: u64,
    /// How it ended.
    pub end: RawLaneEnd,
    /// What moved the larger part of its bytes.
    pub engine: Engine,
    /// The I/O driver of that engine.
    pub driver: Driver,
    /// Why this driver was chosen.
    pub driver_reason: DriverReason,
}

/// Converts a relay thread's outcome; counts the bytes moved. `cause`: why this process cut the tunnel. `overhead` bytes that the lane took were not the tunnel's own.
pub(super) fn conclude(
    outcome: Outcome,
    driver_reason: DriverReason,
    overhead: u64,
    cause: Option<EndReason>,
    metrics: &AditMetrics,
) -> RawLaneOutcome {
    let Outcome {
        to_b,
        to_a,
        end,
        engine,
    } = outcome;
    let (reason, error) = match end {
        PairEnd::Finished => (EndReason::Closed, None),
        PairEnd::Failed {
            side: Side::A,
            error,
            ..
        } => (EndReason::ClientGone, Some(error)),
        PairEnd::Failed { error, .. } if KeysUsedUp::is_cause_of(&error) => {
            (EndReason::KeysUsedUp, None)
        }
        PairEnd::Failed { error, .. } => match error.kind() {
            io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => {
                (EndReason::PeerReset, None)
            }
            _ => (EndReason::LaneLost, None),
        },
        PairEnd::Cancelled => (cause.unwrap_or(EndReason::Shutdown), None),
        PairEnd::Stopped => (EndReason::Shutdown, None),
        PairEnd::Panicked => (EndReason::RelayFailed, None),
        PairEnd::DriverFailed { error } => (EndReason::RelayDriverFailed, Some(error)),
    };
    let spliced = to_a.spliced_bytes + to_b.spliced_bytes;
    let copied = (to_a.bytes + to_b.bytes).saturating_sub(spliced + overhead);
    metrics.relay_bytes.of(Engine::Copy).inc_by(copied);
    metrics.relay_bytes.of(Engine::Splice).inc_by(spliced);
    RawLaneOutcome {
        from_socket: to_b.bytes.saturating_sub(overhead),
        to_socket: to_a.bytes,
        end: RawLaneEnd { reason, error },
        engine: if spliced > copied {
            Engine::Splice
        } else {
            Engine::Copy
        },
        driver: driver_label(engine),
        driver_reason,
    }
}

/// The label for the reason an engine was chosen.
#[must_use]
pub fn reason_label(basis: Basis) -> DriverReason {
    match basis {
        Basis::Asked => DriverReason::Asked,
        Basis::Measured => DriverReason::Measured,
        Basis::Forbidden => DriverReason::Forbidden,
        Basis::Kernel => DriverReason::Kernel,
        Basis::Resources => DriverReason::Resources,
        Basis::Unknown => DriverReason::Other,
    }
}

/// The label of an engine.
#[must_use]
pub fn driver_label(engine: adit_relay::Engine) -> Driver {
    match engine {
        adit_relay::Engine::Epoll => Driver::Epoll,
        adit_relay::Engine::IoUring => Driver::IoUring,
    }
}

#[cfg(test)]
mod tests {
    use adit_relay::Flow;

    use super::*;
    use adit_telemetry::ServerMetrics;

    #[test]
    fn a_failed_relay_driver_is_an_end_reason_of_its_own() {
        let outcome = Outcome {
            to_b: Flow {
                bytes: 7,
                ..Flow::default()
            },
            to_a: Flow::default(),
            end: PairEnd::DriverFailed {
                error: io::Error::from_raw_os_error(libc::EBADF),
            },
            engine: adit_relay::Engine::Epoll,
        };
        let metrics = ServerMetrics::new(&[]);
        let outcome = conclude(outcome, DriverReason::Asked, 0, None, metrics.adit());
        assert_eq!(outcome.from_socket, 7);
        let reasons = (outcome.end.reason, outcome.end.reason.at_target());
        let expected = EndReason::RelayDriverFailed;
        assert_eq!(reasons, (expected, expected));
    }
}
