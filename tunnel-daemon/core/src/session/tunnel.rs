//! State of one tunnel on a link, both directions.

use std::collections::VecDeque;

use bytes::Bytes;

use super::budget::Queued;
use super::{Moment, READS_WITHIN};
use crate::ids::{ConnId, DialId};

/// Why a tunnel ended, for the endpoint, the access event and metrics.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum TunnelEnd {
    /// The peer closed the tunnel; the text is usually empty.
    Closed {
        /// The peer's `CLOSE_RSP` text.
        error: String,
    },
    /// The peer asked for a close (`CLOSE_REQ`): received bytes are delivered first.
    PeerClosing,
    /// This side closed the tunnel and the peer confirmed, or no confirmation was due.
    Confirmed,
    /// The link was lost.
    LinkLost,
    /// The tunnel's lane was lost.
    LaneLost,
    /// The peer reset the tunnel.
    Reset {
        /// The peer's reason; may be empty.
        error: String,
    },
    /// A shared byte budget was exceeded and this tunnel was chosen to end.
    Budget,
    /// The tunnel exceeded its share without progress for too long.
    Stalled,
    /// The tunnel was half-closed and idle for too long.
    HalfClosedIdle,
    /// The peer sent more than its credit, or an invalid `WINDOW`.
    CreditViolation,
    /// The peer sent a message over the size limit.
    Oversize,
    /// This side closed the tunnel and the peer did not confirm in time.
    Unconfirmed,
    /// After a close, bytes for the endpoint were discarded because the endpoint made no progress.
    LingerExpired,
    /// This process shuts down.
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

    /// Whether bytes received before the end are still delivered to the endpoint.
    #[must_use]
    pub fn delivers_rest(&self) -> bool {
        matches!(
            self,
            Self::Closed { .. } | Self::PeerClosing | Self::Confirmed | Self::Unconfirmed
        )
    }

    /// Whether the end is a regular close for the endpoint.
    #[must_use]
    pub fn is_in_order(&self) -> bool {
        self.delivers_rest() && !matches!(self, Self::Closed { error } if !error.is_empty())
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Phase {
    /// A pending dial; `written` once the peer may have seen it.
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

/// The end of the outgoing direction, sent after its queued bytes.
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
    /// `None`: the link has no credit, so sending is not limited.
    pub(super) credit: Option<u64>,
    pub(super) end: OutEnd,
    pub(super) end_sent: bool,
    pub(super) in_ready: bool,
    pub(super) in_ends: bool,
    /// When the close was queued, or bytes were last sent to the peer.
    pub(super) progress_at: Moment,
    /// Agent: the peer sent CLOSE_REQ (`close_asked`), and again before the answer (`close_asked_again`).
    pub(super) close_asked: bool,
    pub(super) close_asked_again: bool,
    /// Server: a RESET must precede the close.
    pub(super) reset_due: bool,
    /// Agent: the connection id if this dial succeeds.
    pub(super) conn_reserved: i64,
}

/// Peer -> endpoint. All counts are cumulative; held bytes and open credit are differences.
#[derive(Debug)]
pub(super) struct Incoming {
    pub(super) received: u64,
    pub(super) drained: u64,
    /// With credit: total bytes that the peer may send, and the window that is kept open beyond `drained`.
    pub(super) granted: u64,
    pub(super) window: u64,
    pub(super) window_at: Moment,
    /// Since `window_at` the endpoint has nearly run out of bytes: it takes them as fast as they arrive.
    pub(super) was_hungry: bool,
    pub(super) progress_at: Moment,
    pub(super) fin: bool,
    /// Credit not yet announced. Greater than 0 while the tunnel is in the window queue.
    pub(super) window_due: u64,
}

#[derive(Debug)]
pub(super) struct Tunnel {
    pub(super) phase: Phase,
    pub(super) out: Outgoing,
    pub(super) inc: Incoming,
    /// The end was reported to the endpoint; no further bytes are delivered.
    pub(super) ended: bool,
    /// The endpoint is gone (or never existed); only the protocol still needs this entry.
    pub(super) endpoint_gone: bool,
    /// The endpoint closed the tunnel before it went; its bytes or the confirmation are pending.
    pub(super) lingers: bool,
    pub(super) watched: bool,
    /// The endpoint has reached EOF, but its last bytes are not queued yet.
    pub(super) end_waits: bool,
    pub(super) close_deadline: Option<Moment>,
    pub(super) active_at: Moment,
}

impl Incoming {
    /// Credit granted beyond the drained bytes; 0 on links without credit.
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

    /// Whether bytes wait for an endpoint that does not read.
    pub(super) fn is_unread(&self, now: Moment) -> bool {
        self.held() > 0 && now.since(self.inc.progress_at) > READS_WITHIN
    }

    pub(super) fn conn(&self) -> Option<ConnId> {
        match self.phase {
            Phase::Open { conn } => Some(conn),
            Phase::Dialing { .. } | Phase::Done => None,
        }
    }

    /// Whether a close is queued or sent and not yet confirmed.
    pub(super) fn is_closing(&self) -> bool {
        matches!(self.out.end, OutEnd::CloseReq | OutEnd::CloseRsp(_)) && self.phase != Phase::Done
    }

    /// Whether exactly one direction has ended, or the endpoint has reached EOF with bytes not yet queued.
    pub(super) fn half_closed(&self) -> bool {
        matches!(self.phase, Phase::Open { .. })
            && match self.out.end {
                OutEnd::None => self.inc.fin || self.end_waits,
                OutEnd::Fin => !self.inc.fin,
                OutEnd::CloseReq | OutEnd::CloseRsp(_) => false,
            }
    }
}
