//! How a tunnel ended: a coarse value for the metric, a finer one for the access event.

use adit_core::session;

use super::Label;

label! {
    /// How a tunnel ended; also the `end` of its access event.
    EndClass {
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
        /// The server whose agent carried the tunnel was lost.
        PeerLost = "peer_lost",
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

    /// Why a tunnel ended, in finer steps than [`EndClass`].
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
        /// The server that has the agent was lost.
        PeerLost = "peer_lost",
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
    pub fn end(self) -> EndClass {
        match self {
            Self::PeerClosed
            | Self::Closed
            | Self::Unconfirmed
            | Self::ClientClosed
            | Self::TargetClosed => EndClass::Clean,
            Self::ClientGone | Self::ClientStalled => EndClass::ClientGone,
            Self::PeerError | Self::PeerReset | Self::TargetReset => EndClass::TargetReset,
            Self::LinkLost => EndClass::LinkLost,
            Self::LaneLost | Self::KeysUsedUp => EndClass::LaneLost,
            Self::PeerLost => EndClass::PeerLost,
            Self::Budget => EndClass::Budget,
            Self::Stalled => EndClass::Stalled,
            Self::HalfClosedIdle => EndClass::HalfClosedIdle,
            Self::CreditViolation => EndClass::CreditViolation,
            Self::Oversize => EndClass::Oversize,
            Self::ClientProtocol => EndClass::ProtocolError,
            Self::LingerExpired => EndClass::LingerExpired,
            Self::Shutdown => EndClass::Shutdown,
            Self::RelayFailed | Self::RelayDriverFailed | Self::Panicked => EndClass::Other,
        }
    }

    /// The reason of a tunnel whose agent is at another server.
    #[must_use]
    pub fn of_peer(self) -> Self {
        match self {
            Self::LinkLost | Self::LaneLost => Self::PeerLost,
            other => other,
        }
    }

    /// The reason at an agent, whose peer is the client's end of the tunnel, and whose socket is the target's.
    #[must_use]
    pub fn at_target(self) -> Self {
        match self {
            Self::PeerError | Self::PeerReset => Self::ClientGone,
            Self::ClientGone => Self::TargetReset,
            other => other,
        }
    }
}

/// The reason named by [`session::TunnelEnd::reason`].
impl From<&session::TunnelEnd> for EndReason {
    fn from(end: &session::TunnelEnd) -> Self {
        let name = end.reason();
        let mut all = Self::ALL.iter().copied();
        all.find(|reason| reason.as_str() == name)
            .unwrap_or(Self::PeerClosed)
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
                reason.end() == EndClass::Clean,
                "{end:?}"
            );
        }
    }
}
