//! How a tunnel on a raw lane went: why it is over, how many bytes passed, and what moved them.

use std::io;

use adit_relay::{Basis, KeysUsedUp, Outcome, PairEnd, Side};

use adit_telemetry::AditMetrics;
use adit_telemetry::labels::{Driver, DriverReason, EndReason, Engine};

/// Why a tunnel on a raw lane is over.
#[derive(Debug)]
pub enum RawLaneEnd {
    /// Both ends said that they send no more, and every byte was delivered.
    Finished,
    /// The client's or target's socket failed.
    SocketFailed(io::Error),
    /// The other end of the lane cut it off.
    LaneReset,
    /// The keys of the lane have sealed as many records as they may, and the kernel takes no new ones.
    KeysUsedUp,
    /// The lane failed, or its other end is gone.
    LaneLost,
    /// Half-closed, and not a byte for too long.
    HalfClosedIdle,
    /// This process ends.
    Shutdown,
    /// The relay thread failed.
    RelayFailed,
    /// The relay thread gets no events from the kernel any more.
    RelayWithoutEvents(io::Error),
}

impl RawLaneEnd {
    /// The reason in metrics and the access log, on a server.
    #[must_use]
    pub fn reason(&self) -> EndReason {
        match self {
            Self::Finished => EndReason::Closed,
            Self::SocketFailed(_) => EndReason::ClientGone,
            Self::LaneReset => EndReason::PeerReset,
            Self::KeysUsedUp => EndReason::KeysUsedUp,
            Self::LaneLost => EndReason::LaneLost,
            Self::HalfClosedIdle => EndReason::HalfClosedIdle,
            Self::Shutdown => EndReason::Shutdown,
            Self::RelayFailed => EndReason::RelayFailed,
            Self::RelayWithoutEvents(_) => EndReason::RelayDriverFailed,
        }
    }

    /// The same on an agent, where the socket is a target's.
    #[must_use]
    pub fn reason_at_target(&self) -> EndReason {
        match self {
            Self::SocketFailed(_) => EndReason::TargetReset,
            other => other.reason().at_target(),
        }
    }
}

/// How a tunnel went.
#[derive(Debug)]
#[must_use = "an outcome carries the byte counts for metrics and the access log"]
pub struct RawLaneOutcome {
    /// Bytes of the client's or target's socket that the lane took.
    pub from_socket: u64,
    /// Bytes of the lane that the client's or target's socket took.
    pub to_socket: u64,
    /// How it ended.
    pub end: RawLaneEnd,
    /// What moved its bytes, the larger part.
    pub engine: Engine,
    /// What drove that.
    pub driver: Driver,
    /// Why that did.
    pub driver_reason: DriverReason,
}

/// What this process cuts a tunnel for.
#[derive(Clone, Copy, Debug)]
pub(super) enum Cut {
    LaneLost,
    HalfClosedIdle,
    Shutdown,
}

impl From<Cut> for RawLaneEnd {
    fn from(cut: Cut) -> Self {
        match cut {
            Cut::LaneLost => Self::LaneLost,
            Cut::HalfClosedIdle => Self::HalfClosedIdle,
            Cut::Shutdown => Self::Shutdown,
        }
    }
}

/// What the outcome of a relay thread is for the tunnel; counts what was moved. `overhead` bytes that the lane took were not its own.
pub(super) fn conclude(
    outcome: Outcome,
    driver_reason: DriverReason,
    overhead: u64,
    cause: Option<Cut>,
    metrics: &AditMetrics,
) -> RawLaneOutcome {
    let Outcome {
        to_b,
        to_a,
        end,
        engine,
    } = outcome;
    let end = match end {
        PairEnd::Finished => RawLaneEnd::Finished,
        PairEnd::Failed {
            side: Side::A,
            error,
            ..
        } => RawLaneEnd::SocketFailed(error),
        PairEnd::Failed { error, .. } if KeysUsedUp::is_cause_of(&error) => RawLaneEnd::KeysUsedUp,
        PairEnd::Failed { error, .. } => match error.kind() {
            io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => RawLaneEnd::LaneReset,
            _ => RawLaneEnd::LaneLost,
        },
        PairEnd::Cancelled => cause.unwrap_or(Cut::Shutdown).into(),
        PairEnd::Stopped => RawLaneEnd::Shutdown,
        PairEnd::Panicked => RawLaneEnd::RelayFailed,
        PairEnd::DriverFailed { error } => RawLaneEnd::RelayWithoutEvents(error),
    };
    let spliced = to_a.spliced_bytes + to_b.spliced_bytes;
    let copied = (to_a.bytes + to_b.bytes).saturating_sub(spliced + overhead);
    metrics.relay_bytes(Engine::Copy).inc_by(copied);
    metrics.relay_bytes(Engine::Splice).inc_by(spliced);
    RawLaneOutcome {
        from_socket: to_b.bytes.saturating_sub(overhead),
        to_socket: to_a.bytes,
        end,
        engine: if spliced > copied {
            Engine::Splice
        } else {
            Engine::Copy
        },
        driver: driver_label(engine),
        driver_reason,
    }
}

/// The label of what decided for an engine.
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
    fn a_relay_thread_without_events_is_a_reason_of_its_own() {
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
        let reasons = (outcome.end.reason(), outcome.end.reason_at_target());
        let expected = EndReason::RelayDriverFailed;
        assert_eq!(reasons, (expected, expected));
    }
}
