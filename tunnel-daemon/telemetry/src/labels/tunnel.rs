//! How a tunnel ended: a coarse value for the metric, a finer one for the access event.

use adit_core::session;

use super::{DialFailureReason, Label, NodeRefusal};

label! {
    /// How a tunnel ended; also the `end` of its access event.
    TunnelEnd {
        /// Both ends closed in order.
        Clean = "clean",
        /// The client disconnected: it cancelled its stream or reset its connection.
        ClientGone = "client_gone",
        /// The target reset the connection or failed.
        TargetReset = "target_reset",
        /// The agent's link that carried the tunnel was lost.
        LinkLost = "link_lost",
        /// The lane that carried the tunnel was lost.
        LaneLost = "lane_lost",
        /// A shared byte budget ran full, and the tunnel was the largest stalled tunnel.
        Budget = "budget",
        /// The tunnel exceeded its byte share and made no progress for too long.
        Stalled = "stalled",
        /// The tunnel was half-closed and silent for too long.
        HalfClosedIdle = "half_closed_idle",
        /// The peer exceeded its credit or broke the rules of credit.
        CreditViolation = "credit_violation",
        /// A packet was larger than the protocol allows.
        Oversize = "oversize",
        /// Another protocol violation; adit_protocol_offences_total counts violations by kind.
        ProtocolError = "protocol_error",
        /// The bytes that remained after a close made no progress.
        LingerExpired = "linger_expired",
        /// This process is shutting down.
        Shutdown = "shutdown",
        /// A cause without its own value: report it.
        Other = "other",
    }
}

label! {
    /// Why a tunnel ended, in finer steps than [`TunnelEnd`].
    EndReason {
        /// The agent closed the tunnel without an error.
        PeerClosed = "peer_closed",
        /// This process closed the tunnel and the peer confirmed, or both directions ended.
        Closed = "closed",
        /// This process closed the tunnel, and the peer did not confirm in time.
        Unconfirmed = "unconfirmed",
        /// A gRPC client closed first.
        ClientClosed = "client_closed",
        /// The target of a gRPC client closed first.
        TargetClosed = "target_closed",
        /// The client disconnected without a close.
        ClientGone = "client_gone",
        /// The client disconnected after it had read nothing for a long time.
        ClientStalled = "client_stalled",
        /// The agent closed the tunnel with an error.
        PeerError = "peer_error",
        /// The agent reset the tunnel.
        PeerReset = "peer_reset",
        /// The connection to the target failed.
        TargetReset = "target_reset",
        /// The link was lost.
        LinkLost = "link_lost",
        /// The lane was lost.
        LaneLost = "lane_lost",
        /// The keys of kernel TLS reached their limit.
        KeysUsedUp = "keys_used_up",
        /// A shared byte budget ran full.
        Budget = "budget",
        /// The tunnel exceeded its byte share and made no progress for too long.
        Stalled = "stalled",
        /// The tunnel was half-closed and silent for too long.
        HalfClosedIdle = "half_closed_idle",
        /// The peer broke the rules of credit.
        CreditViolation = "credit_violation",
        /// A packet was larger than the protocol allows.
        Oversize = "oversize",
        /// A gRPC client broke the protocol.
        ClientProtocol = "client_protocol",
        /// The bytes that remained after a close made no progress.
        LingerExpired = "linger_expired",
        /// This process stopped.
        Shutdown = "shutdown",
        /// The relay thread failed.
        RelayFailed = "relay_failed",
        /// The kernel delivered no events to a relay thread.
        RelayDriverFailed = "relay_driver_failed",
        /// The task of the tunnel panicked, which is a bug.
        Panicked = "panicked",
    }
}

impl EndReason {
    /// The reason for a tunnel whose task was dropped before the tunnel ended: only a panic or the end of the process does
    /// that.
    #[must_use]
    pub fn of_drop() -> Self {
        if std::thread::panicking() {
            Self::Panicked
        } else {
            Self::Shutdown
        }
    }

    /// The coarse value.
    #[must_use]
    pub fn end(self) -> TunnelEnd {
        match self {
            Self::PeerClosed
            | Self::Closed
            | Self::Unconfirmed
            | Self::ClientClosed
            | Self::TargetClosed => TunnelEnd::Clean,
            Self::ClientGone | Self::ClientStalled => TunnelEnd::ClientGone,
            Self::PeerError | Self::PeerReset | Self::TargetReset => TunnelEnd::TargetReset,
            Self::LinkLost => TunnelEnd::LinkLost,
            Self::LaneLost | Self::KeysUsedUp => TunnelEnd::LaneLost,
            Self::Budget => TunnelEnd::Budget,
            Self::Stalled => TunnelEnd::Stalled,
            Self::HalfClosedIdle => TunnelEnd::HalfClosedIdle,
            Self::CreditViolation => TunnelEnd::CreditViolation,
            Self::Oversize => TunnelEnd::Oversize,
            Self::ClientProtocol => TunnelEnd::ProtocolError,
            Self::LingerExpired => TunnelEnd::LingerExpired,
            Self::Shutdown => TunnelEnd::Shutdown,
            Self::RelayFailed | Self::RelayDriverFailed | Self::Panicked => TunnelEnd::Other,
        }
    }

    /// The reason at an agent, whose peer is the client's end of the tunnel.
    #[must_use]
    pub fn at_target(self) -> Self {
        match self {
            Self::PeerError | Self::PeerReset => Self::ClientGone,
            other => other,
        }
    }
}

impl From<&session::TunnelEnd> for EndReason {
    fn from(end: &session::TunnelEnd) -> Self {
        use session::TunnelEnd as End;
        match end {
            End::Closed { error } if error.is_empty() => Self::PeerClosed,
            End::Closed { .. } => Self::PeerError,
            End::PeerClosing => Self::PeerClosed,
            End::Confirmed => Self::Closed,
            End::LinkLost => Self::LinkLost,
            End::LaneLost => Self::LaneLost,
            End::Reset { .. } => Self::PeerReset,
            End::Budget => Self::Budget,
            End::Stalled => Self::Stalled,
            End::HalfClosedIdle => Self::HalfClosedIdle,
            End::CreditViolation => Self::CreditViolation,
            End::Oversize => Self::Oversize,
            End::Unconfirmed => Self::Unconfirmed,
            End::LingerExpired => Self::LingerExpired,
            End::Shutdown => Self::Shutdown,
        }
    }
}

/// The `detail` of an access event.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Detail {
    /// Why a tunnel ended.
    End(EndReason),
    /// Why a dial failed, in upstream's words.
    Dial(DialFailureReason),
    /// Why a tunnel requested by an agent was not opened.
    Node(NodeRefusal),
}

impl Detail {
    /// The value's spelling.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::End(reason) => reason.as_str(),
            Self::Dial(reason) => reason.as_str(),
            Self::Node(why) => why.as_str(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use super::*;

    struct Dropped<'a>(&'a mut Option<EndReason>);

    impl Drop for Dropped<'_> {
        fn drop(&mut self) {
            *self.0 = Some(EndReason::of_drop());
        }
    }

    #[test]
    fn a_tunnel_dropped_by_a_panic_is_not_taken_for_a_shutdown() {
        let mut reason = None;
        drop(Dropped(&mut reason));
        assert_eq!(reason, Some(EndReason::Shutdown));
        let panicked = catch_unwind(AssertUnwindSafe(|| {
            let _dropped = Dropped(&mut reason);
            std::panic::resume_unwind(Box::new("on purpose"));
        }));
        assert!(panicked.is_err());
        assert_eq!(reason, Some(EndReason::Panicked));
    }

    #[test]
    fn every_tunnel_end_has_its_reason_as_label() {
        use session::TunnelEnd as End;
        let error = || "refused".to_owned();
        let ends = [
            End::Closed {
                error: String::new(),
            },
            End::Closed { error: error() },
            End::PeerClosing,
            End::Confirmed,
            End::LinkLost,
            End::LaneLost,
            End::Reset { error: error() },
            End::Budget,
            End::Stalled,
            End::HalfClosedIdle,
            End::CreditViolation,
            End::Oversize,
            End::Unconfirmed,
            End::LingerExpired,
            End::Shutdown,
        ];
        for end in &ends {
            let reason = EndReason::from(end);
            assert_eq!(reason.as_str(), end.reason());
            assert_eq!(
                end.is_in_order(),
                reason.end() == TunnelEnd::Clean,
                "{end:?}"
            );
        }
    }
}
