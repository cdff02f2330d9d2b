//! State of one tunnel on a link, both directions.

use std::collections::VecDeque;

use bytes::Bytes;

use super::budget::Queued;
use super::{Moment, READS_WITHIN};
use crate::ids::{ConnId, DialId};

/// Why a tunnel ended, for the endpoint, the access event and metrics.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum TunnelEnd {
    /// The peer closed it; the text is usually empty.
    Closed {
        /// The peer's `CLOSE_RSP` text.
        error: String,
    },
    /// The peer asked to close it (`CLOSE_REQ`): deliver what was received, then close.
    PeerClosing,
    /// This side closed it and the peer confirmed, or had nothing to confirm.
    Confirmed,
    /// The link is gone.
    LinkLost,
    /// The lane that carried it is gone.
    LaneLost,
    /// The peer cut it off; the text says why, if it said so.
    Reset {
        /// The peer's words.
        error: String,
    },
    /// A shared byte budget ran full and this was the largest stalled tunnel.
    Budget,
    /// Over its share without progress for too long.
    Stalled,
    /// Half-closed and silent for too long.
    HalfClosedIdle,
    /// The peer sent more than its credit, or a useless `WINDOW`.
    CreditViolation,
    /// The peer sent a message over the size limit.
    Oversize,
    /// This side closed it and the peer never confirmed.
    Unconfirmed,
    /// It was closed, and bytes for the endpoint were given up because the endpoint made no progress.
    LingerExpired,
    /// This process ends.
    Shutdown,
}

impl TunnelEnd {
    /// Value of the `reason` label.
    #[must_use]
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Closed { error } if error.is_empty() => "peer_closed",
            Self::Closed { .. } => "peer_error",
            Self::PeerClosing => "peer_closed",
            Self::Confirmed => "closed",
            Self::LinkLost => "link_lost",
            Self::LaneLost => "lane_lost",
            Self::Reset { .. } => "peer_reset",
            Self::Budget => "budget",
            Self::Stalled => "stalled",
            Self::HalfClosedIdle => "half_closed_idle",
            Self::CreditViolation => "credit_violation",
            Self::Oversize => "oversize",
            Self::Unconfirmed => "unconfirmed",
            Self::LingerExpired => "linger_expired",
            Self::Shutdown => "shutdown",
        }
    }

    /// Whether bytes received before the end still belong to the endpoint.
    #[must_use]
    pub fn delivers_rest(&self) -> bool {
        matches!(
            self,
            Self::Closed { .. } | Self::PeerClosing | Self::Confirmed | Self::Unconfirmed
        )
    }

    /// Whether it looks to the endpoint as if the other side had closed its connection and nothing else.
    #[must_use]
    pub fn is_in_order(&self) -> bool {
        self.delivers_rest() && !matches!(self, Self::Closed { error } if !error.is_empty())
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Phase {
    /// The dial is on its way; `written` once the peer may have seen it.
    Dialing {
        dial: DialId,
        deadline: Option<Moment>,
        written: bool,
    },
    Open {
        conn: ConnId,
    },
    /// No packet for this connection is expected or sent any more.
    Done,
}

/// What follows the queued bytes of the outgoing direction.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum OutEnd {
    None,
    Fin,
    CloseReq,
    CloseRsp(String),
}

/// Endpoint -> peer.
#[derive(Debug)]
pub(super) struct Outgoing {
    pub(super) queue: VecDeque<Bytes>,
    pub(super) bytes: Queued,
    /// `None`: the peer has no credit, send at will.
    pub(super) credit: Option<u64>,
    pub(super) end: OutEnd,
    pub(super) end_sent: bool,
    pub(super) in_ready: bool,
    pub(super) in_ends: bool,
    /// The close was asked for, or bytes left for the peer since.
    pub(super) progress_at: Moment,
    /// Agent: the peer asked to close, and asked once more before it was answered.
    pub(super) close_asked: bool,
    pub(super) close_asked_again: bool,
    /// Server: before its close, the peer is told that the tunnel was cut off.
    pub(super) reset_due: bool,
    /// Agent: the id this dial gets if it succeeds.
    pub(super) conn_reserved: i64,
}

/// Peer -> endpoint. All counts are cumulative; differences are what is held or granted.
#[derive(Debug)]
pub(super) struct Incoming {
    pub(super) received: u64,
    pub(super) drained: u64,
    /// With credit: how far the peer may send, and the window that is kept open beyond `drained`.
    pub(super) granted: u64,
    pub(super) window: u64,
    pub(super) window_at: Moment,
    /// Since then the endpoint has had next to nothing left: it takes bytes as fast as they come.
    pub(super) was_hungry: bool,
    pub(super) progress_at: Moment,
    pub(super) fin: bool,
    /// Credit not yet announced; its presence in the window queue is `> 0`.
    pub(super) window_due: u64,
}

#[derive(Debug)]
pub(super) struct Tunnel {
    pub(super) phase: Phase,
    pub(super) out: Outgoing,
    pub(super) inc: Incoming,
    /// The endpoint has been told the end; nothing is delivered any more.
    pub(super) ended: bool,
    /// The endpoint is gone (or never came); only the protocol keeps this entry.
    pub(super) endpoint_gone: bool,
    /// The endpoint had closed it before: what it had said is on its way until the peer confirms.
    pub(super) lingers: bool,
    pub(super) watched: bool,
    /// The endpoint will send no more than it has yet to hand over.
    pub(super) end_waits: bool,
    pub(super) close_deadline: Option<Moment>,
    pub(super) active_at: Moment,
}

impl Incoming {
    /// Credit granted and not yet used up by drained bytes; 0 where the peer knows no credit.
    pub(super) fn open_credit(&self) -> u64 {
        self.granted.saturating_sub(self.drained)
    }
}

impl Tunnel {
    pub(super) fn new(
        phase: Phase,
        queued: Queued,
        credit: bool,
        window: u64,
        now: Moment,
    ) -> Self {
        Self {
            phase,
            out: Outgoing {
                queue: VecDeque::new(),
                bytes: queued,
                credit: credit.then_some(0),
                end: OutEnd::None,
                end_sent: false,
                in_ready: false,
                in_ends: false,
                progress_at: now,
                close_asked: false,
                close_asked_again: false,
                reset_due: false,
                conn_reserved: 0,
            },
            inc: Incoming {
                received: 0,
                drained: 0,
                granted: window,
                window,
                window_at: now,
                was_hungry: false,
                progress_at: now,
                fin: false,
                window_due: 0,
            },
            ended: false,
            endpoint_gone: false,
            lingers: false,
            watched: false,
            end_waits: false,
            close_deadline: None,
            active_at: now,
        }
    }

    pub(super) fn held(&self) -> u64 {
        self.inc.received - self.inc.drained
    }

    /// Whether bytes wait for an endpoint that takes none.
    pub(super) fn is_unread(&self, now: Moment) -> bool {
        self.held() > 0 && now.since(self.inc.progress_at) > READS_WITHIN
    }

    pub(super) fn conn(&self) -> Option<ConnId> {
        match self.phase {
            Phase::Open { conn } => Some(conn),
            Phase::Dialing { .. } | Phase::Done => None,
        }
    }

    /// Whether a close is queued or sent and the protocol is not over.
    pub(super) fn is_closing(&self) -> bool {
        matches!(self.out.end, OutEnd::CloseReq | OutEnd::CloseRsp(_)) && self.phase != Phase::Done
    }

    /// Whether one direction has ended and the other has not, or is known to end behind bytes that wait.
    pub(super) fn half_closed(&self) -> bool {
        matches!(self.phase, Phase::Open { .. })
            && match self.out.end {
                OutEnd::None => self.inc.fin || self.end_waits,
                OutEnd::Fin => !self.inc.fin,
                OutEnd::CloseReq | OutEnd::CloseRsp(_) => false,
            }
    }
}
