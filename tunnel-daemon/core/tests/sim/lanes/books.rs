//! Records of every tunnel, whichever lane carries it, and counts of every event.

use std::collections::BTreeMap;
use std::time::Duration;

use adit_core::session::Moment;

use crate::record::Who;
use crate::rng::Rng;

/// Events of a lane or a tunnel.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum Seen {
    WholeToTarget,
    WholeToClient,
    WholeOfAgent,
    UsedAgain,
    Pong,
    NoPong,
    Refused,
    /// The agent's OPEN crossed the server's OPEN and yielded.
    Yielded,
    /// The agent had cancelled its OPEN by then, so it never heard of the server's OPEN.
    Unheard,
    /// An unsent OPEN was taken back.
    TakenBack,
    GivenUp,
    /// An OPEN whose bytes the peer's kernel had not acknowledged after 2 s.
    Unacknowledged,
    /// No lane was idle, so the tunnel used the link.
    OnLink,
    Wanted,
    Drained,
    ResetByPeer,
    /// A close that was not confirmed within 10 s.
    Unconfirmed,
    HalfClosedSilent,
    /// Bytes queued before the end of a tunnel made no progress.
    NoProgress,
    /// A RESET without an answer for 5 s.
    ResetUnanswered,
    /// A reader that paused for 10 s or more.
    LongPause,
    /// A connection that was lost with a tunnel on it.
    LostTunnel,
    PipeWhole,
    /// Raw bytes in the same read as the last frame.
    EarlyBytes,
    PipeWithFrames,
    PipeGivenUp,
}

/// Minimum count of each event over all seeds: without events the simulation proves nothing.
const LEAST: &[(Seen, u64)] = &[
    (Seen::WholeToTarget, 1_000),
    (Seen::WholeToClient, 1_000),
    (Seen::WholeOfAgent, 200),
    (Seen::UsedAgain, 2_000),
    (Seen::Pong, 2_000),
    (Seen::NoPong, 10),
    (Seen::Refused, 200),
    (Seen::Yielded, 100),
    (Seen::Unheard, 5),
    (Seen::TakenBack, 100),
    (Seen::GivenUp, 100),
    (Seen::Unacknowledged, 20),
    (Seen::OnLink, 100),
    (Seen::Wanted, 100),
    (Seen::Drained, 10),
    (Seen::ResetByPeer, 100),
    (Seen::Unconfirmed, 20),
    (Seen::HalfClosedSilent, 10),
    (Seen::NoProgress, 10),
    (Seen::ResetUnanswered, 20),
    (Seen::LongPause, 100),
    (Seen::LostTunnel, 100),
    (Seen::PipeWhole, 50),
    (Seen::EarlyBytes, 20),
    (Seen::PipeWithFrames, 20),
    (Seen::PipeGivenUp, 20),
];

/// Count of each event.
#[derive(Debug, Default)]
pub(crate) struct Coverage(BTreeMap<Seen, u64>);

impl Coverage {
    pub(super) fn note(&mut self, what: Seen) {
        *self.0.entry(what).or_default() += 1;
    }

    pub(super) fn add(&mut self, other: &Self) {
        for (what, count) in &other.0 {
            *self.0.entry(*what).or_default() += count;
        }
    }

    /// Asserts that every event has occurred often enough.
    pub(crate) fn check(&self) {
        for (what, least) in LEAST {
            let count = self.0.get(what).copied().unwrap_or(0);
            let often = count >= *least;
            assert!(often, "{what:?}: {count} of {least} times: {self:#?}");
        }
    }
}

/// Result of an attempt to open a tunnel, as the opener sees it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Outcome {
    Opened,
    Refused,
    /// Agent: the server's OPEN crossed, and the agent's attempt yielded.
    Yielded,
    /// Server: the agent's OPEN crossed, and the agent cancelled it.
    Unheard,
    GaveUp,
    /// The lane was lost or reset.
    Lost,
}

/// What one endpoint of a tunnel sent and received.
#[derive(Debug, Default)]
pub(super) struct Side {
    pub(super) sent: u64,
    pub(super) heard: u64,
    /// It has sent its end.
    pub(super) finished: bool,
    /// It takes no more bytes.
    pub(super) deaf: bool,
    /// It has received the peer's end.
    pub(super) told: bool,
}

/// One tunnel, from its OPEN to the last byte. The client is the opener; the target is the other end.
#[derive(Debug)]
pub(super) struct Record {
    pub(super) by_agent: bool,
    pub(super) raw: bool,
    /// No fault hit this tunnel, so all its bytes must arrive.
    tame: bool,
    outcome: Option<Outcome>,
    /// How often the target end received the OPEN.
    pub(super) asked: u32,
    pub(super) accepted: bool,
    pub(super) reset_by_target: bool,
    /// The OPEN was taken back before it was sent.
    pub(super) never_left: bool,
    /// An end reset the tunnel, or its connection was lost.
    pub(super) cut: bool,
    client: Side,
    target: Side,
}

impl Record {
    pub(super) fn new(by_agent: bool, raw: bool, tame: bool) -> Self {
        Self {
            by_agent,
            raw,
            tame,
            outcome: None,
            asked: 0,
            accepted: false,
            reset_by_target: false,
            never_left: false,
            cut: false,
            client: Side::default(),
            target: Side::default(),
        }
    }

    pub(super) fn side(&mut self, who: Who) -> &mut Side {
        match who {
            Who::Client => &mut self.client,
            Who::Target => &mut self.target,
        }
    }

    pub(super) fn conclude(&mut self, outcome: Outcome) {
        let before = self.outcome.replace(outcome);
        assert_eq!(before, None, "two outcomes: {self:?}");
    }

    /// Checks all invariants once nothing moves any more.
    pub(super) fn check(&self, coverage: &mut Coverage) {
        assert!(self.asked <= 1, "asked twice: {self:?}");
        assert!(!self.never_left || self.asked == 0, "{self:?}");
        match self.outcome.expect("every dial has an outcome") {
            Outcome::Opened => assert!(self.accepted, "{self:?}"),
            Outcome::Refused => assert!(!self.accepted || self.reset_by_target, "{self:?}"),
            Outcome::Yielded => assert_eq!(self.asked, 0, "{self:?}"),
            Outcome::Unheard => assert!(self.asked == 0 || self.reset_by_target, "{self:?}"),
            Outcome::GaveUp | Outcome::Lost => (),
        }
        let opened = self.outcome == Some(Outcome::Opened);
        let directions = [
            (&self.client, &self.target, Seen::WholeToTarget),
            (&self.target, &self.client, Seen::WholeToClient),
        ];
        for (from, to, whole) in directions {
            assert!(to.heard <= from.sent, "{self:?}");
            if opened && from.finished && !self.cut && !to.deaf {
                assert!(to.told && to.heard == from.sent, "not whole: {self:?}");
                coverage.note(whole);
                if self.by_agent {
                    coverage.note(Seen::WholeOfAgent);
                }
            }
        }
        if self.tame {
            let whole = self.client.told && self.target.told;
            assert!(opened && !self.cut && whole, "of no use: {self:?}");
        }
    }
}

/// State that all ends of a world share during one turn.
#[derive(Debug)]
pub(super) struct Turn {
    pub(super) now: Moment,
    pub(super) rng: Rng,
    pub(super) records: Vec<Record>,
    pub(super) coverage: Coverage,
    /// New tunnels run without faults and end cleanly.
    pub(super) tame: bool,
    /// Something happened, so the other ends may act.
    pub(super) moved: bool,
    /// The server asked the agent for more lanes.
    pub(super) wanted: bool,
}

impl Turn {
    pub(super) fn new(rng: Rng) -> Self {
        Self {
            now: Moment::default(),
            rng,
            records: Vec::new(),
            coverage: Coverage::default(),
            tame: false,
            moved: false,
            wanted: false,
        }
    }

    /// A random moment at most `most` milliseconds from now.
    pub(super) fn within_millis(&mut self, most: u64) -> Moment {
        let millis = self.rng.within(0..=most);
        self.now.after(Duration::from_millis(millis))
    }
}
