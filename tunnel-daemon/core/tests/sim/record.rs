//! Records of every tunnel, whichever link carries it, and counts of every event.

use std::collections::BTreeMap;
use std::sync::OnceLock;

use adit_core::session::TunnelEnd;
use bytes::Bytes;

use crate::rng::{Rng, mix};

const PATTERN_BYTES: usize = 1 << 20;

/// An endpoint of a tunnel.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Who {
    Client,
    Target,
}

/// One endpoint's history.
#[derive(Debug, Default)]
pub(crate) struct Seen {
    /// Bytes the link took from this endpoint.
    pub(crate) sent: u64,
    /// Bytes that were delivered to this endpoint and consumed by it.
    pub(crate) taken: u64,
    pub(crate) fin: bool,
    pub(crate) closed: bool,
    pub(crate) end: Option<TunnelEnd>,
}

/// Count of each event: without events the simulation proves nothing.
#[derive(Debug, Default)]
pub(crate) struct Tally(BTreeMap<String, u64>);

impl Tally {
    fn note(&mut self, what: String) {
        *self.0.entry(what).or_default() += 1;
    }

    /// Asserts that every kind of end, excuse and whole delivery has occurred.
    pub(crate) fn check(&self) {
        for what in [
            "whole to the target",
            "whole to the client",
            "client: budget",
            "client: stalled",
            "client: half_closed_idle",
            "client: link_lost",
            "client: peer_error",
            "client: unconfirmed",
            "opened true, excused None",
            "opened false, excused None",
        ] {
            assert!(self.0.contains_key(what), "never seen: {what}: {self:#?}");
        }
    }
}

/// One tunnel, from the dial to the last byte.
#[derive(Debug)]
pub(crate) struct Record {
    pub(crate) uid: u64,
    pub(crate) credit: bool,
    /// Number of `DialDone`, `DialFailed` and refusals by `dial`; none if the client left first.
    pub(crate) outcomes: u32,
    pub(crate) left_first: bool,
    pub(crate) opened: bool,
    /// Why some bytes of this tunnel need not arrive.
    pub(crate) excuse: Option<&'static str>,
    pub(crate) client: Seen,
    pub(crate) target: Seen,
}

impl Record {
    pub(crate) fn new(uid: u64, credit: bool) -> Self {
        Self {
            uid,
            credit,
            outcomes: 0,
            left_first: false,
            opened: false,
            excuse: None,
            client: Seen::default(),
            target: Seen::default(),
        }
    }

    pub(crate) fn seen(&mut self, who: Who) -> &mut Seen {
        match who {
            Who::Client => &mut self.client,
            Who::Target => &mut self.target,
        }
    }

    /// Records the end that an endpoint received.
    pub(crate) fn note_end(&mut self, who: Who, end: TunnelEnd) {
        match &end {
            TunnelEnd::CreditViolation
            | TunnelEnd::Oversize
            | TunnelEnd::LingerExpired
            | TunnelEnd::LaneLost
            | TunnelEnd::Shutdown => {
                panic!("tunnel {}: honest ends, yet {who:?} got {end:?}", self.uid)
            }
            // The client left without a close, or a rule ended its tunnel.
            TunnelEnd::Reset { .. } => {
                assert!(
                    who == Who::Target && self.credit && self.excuse.is_some(),
                    "{self:?}"
                );
            }
            TunnelEnd::Budget | TunnelEnd::Stalled => {
                assert!(!self.credit, "tunnel {}: {end:?} with credit", self.uid);
                self.excuse = Some("budget");
            }
            TunnelEnd::LinkLost => self.excuse = Some("link lost"),
            TunnelEnd::HalfClosedIdle => {
                assert!(self.client.fin || self.target.fin, "{self:?}");
                self.excuse = Some("half-closed");
            }
            TunnelEnd::Closed { error } if !error.is_empty() => {
                assert!(
                    self.excuse.is_some() || self.target.closed,
                    "{error}: {self:?}"
                );
            }
            TunnelEnd::Unconfirmed => {
                assert!(who == Who::Client && (self.client.closed || self.client.fin));
            }
            TunnelEnd::Closed { .. } | TunnelEnd::PeerClosing | TunnelEnd::Confirmed => (),
        }
        let seen = self.seen(who);
        assert!(seen.end.is_none(), "{who:?} was told the end twice");
        seen.end = Some(end);
    }

    /// Checks all invariants once nothing moves any more. Counts the events of this tunnel.
    pub(crate) fn check(&self, tally: &mut Tally) {
        let expected = u32::from(!self.left_first);
        assert_eq!(self.outcomes, expected, "outcomes of one dial: {self:?}");
        assert!(self.client.taken <= self.target.sent && self.target.taken <= self.client.sent);
        let ends = [("client", &self.client.end), ("target", &self.target.end)];
        for (who, end) in ends {
            if let Some(end) = end {
                tally.note(format!("{who}: {}", end.reason()));
            }
        }
        tally.note(format!("opened {}, excused {:?}", self.opened, self.excuse));
        if !self.opened || self.excuse.is_some() {
            return;
        }
        // Without credit there is no half-close on the wire: a FIN closes both directions.
        let ends = |seen: &Seen| seen.fin || seen.closed;
        let shuts = |seen: &Seen| seen.closed || (seen.fin && !self.credit);
        if ends(&self.client) && !shuts(&self.target) {
            assert_eq!(
                self.client.sent, self.target.taken,
                "client to target: {self:?}"
            );
            tally.note(String::from("whole to the target"));
        }
        if ends(&self.target) && !shuts(&self.client) {
            assert_eq!(
                self.target.sent, self.client.taken,
                "target to client: {self:?}"
            );
            tally.note(String::from("whole to the client"));
        }
    }
}

fn pattern() -> &'static Bytes {
    static PATTERN: OnceLock<Bytes> = OnceLock::new();
    PATTERN.get_or_init(|| {
        let mut rng = Rng::new(0x0ad1);
        (0..PATTERN_BYTES / 8)
            .flat_map(|_| rng.next().to_le_bytes())
            .collect()
    })
}

fn place(uid: u64, from: Who, offset: u64) -> usize {
    let start = mix(uid * 2 + u64::from(from == Who::Target));
    usize::try_from(start.wrapping_add(offset) % PATTERN_BYTES as u64).unwrap()
}

/// At most `max` of the bytes this endpoint sends from `offset` on; each tunnel has its own stream.
pub(crate) fn stream_bytes(uid: u64, from: Who, offset: u64, max: usize) -> Bytes {
    let at = place(uid, from, offset);
    pattern().slice(at..PATTERN_BYTES.min(at + max))
}

/// Whether `bytes` are exactly the bytes that this endpoint sends from `offset` on.
pub(crate) fn is_stream(uid: u64, from: Who, offset: u64, bytes: &[u8]) -> bool {
    let mut done = 0;
    while done < bytes.len() {
        let expected = stream_bytes(uid, from, offset + done as u64, bytes.len() - done);
        if bytes[done..done + expected.len()] != expected {
            return false;
        }
        done += expected.len();
    }
    true
}
