//! One end of one link with its endpoints, driven as the API contract requires.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use adit_core::failure::DialFailure;
use adit_core::ids::{DialId, TunnelKey};
use adit_core::session::{
    Action, DialRequest, Event, Link, LinkConfig, Moment, ProcessBudget, Role, Transmit,
};
use adit_core::wire::decode::Decoder;
use adit_core::wire::encode::MessageBuf;
use adit_core::wire::packet::{Packet, PacketType};

use crate::endpoint::Endpoint;
use crate::ledger::Ledger;
use crate::pipe::Pipe;
use crate::record::{Record, Who};
use crate::rng::Rng;

/// A dial in progress at an agent.
#[derive(Debug)]
struct Dialing {
    key: TunnelKey,
    uid: u64,
    /// `None`: the dial never ends.
    ends_at: Option<Moment>,
    refused: bool,
}

/// State that the ends of a world share during one turn.
pub(crate) struct Turn<'a> {
    pub(crate) now: Moment,
    pub(crate) records: &'a mut Vec<Record>,
    pub(crate) rng: &'a mut Rng,
    /// Endpoints may skip a turn. Not allowed when turns are seconds apart, or readers would look stalled.
    pub(crate) lazy: bool,
}

#[derive(Debug)]
pub(crate) struct End {
    pub(crate) link: Link,
    pub(crate) failed: bool,
    config: LinkConfig,
    decoder: Decoder,
    endpoints: BTreeMap<(u32, u32), Endpoint>,
    dialing: Vec<Dialing>,
    /// Server: dials not yet on the wire. Agent: answers not yet on the wire. Data follows them.
    unwritten: BTreeSet<u64>,
    unanswered: usize,
}

fn place(key: TunnelKey) -> (u32, u32) {
    (key.slot, key.generation)
}

fn record_of(records: &mut [Record], uid: u64) -> &mut Record {
    &mut records[usize::try_from(uid).unwrap()]
}

impl End {
    pub(crate) fn new(config: LinkConfig, budget: &Arc<ProcessBudget>) -> Self {
        Self {
            link: Link::new(config, Arc::clone(budget), "peer".into()),
            failed: false,
            config,
            decoder: Decoder::default(),
            endpoints: BTreeMap::new(),
            dialing: Vec::new(),
            unwritten: BTreeSet::new(),
            unanswered: 0,
        }
    }

    fn who(&self) -> Who {
        match self.config.role {
            Role::Server => Who::Client,
            Role::Agent => Who::Target,
        }
    }

    pub(crate) fn dial(&mut self, turn: &mut Turn<'_>) {
        let uid = turn.records.len() as u64;
        let mut record = Record::new(uid, self.config.credit);
        // Ids are never reused: an answer that crossed a cancellation would belong to the wrong dial.
        let dial = DialId(i64::try_from(uid).unwrap());
        let request = DialRequest {
            dial,
            spare: dial,
            protocol: String::from("tcp"),
            address: uid.to_string(),
        };
        match self.link.dial(request, turn.now) {
            Ok(key) => {
                let endpoint = Endpoint::new(key, &mut record, Who::Client, turn.rng);
                self.endpoints.insert(place(key), endpoint);
                self.unwritten.insert(uid);
            }
            Err(failure) => {
                // `LinkBusy`: the link is retired until its stream takes packets again.
                assert!(
                    matches!(
                        failure,
                        DialFailure::TooManyPending { per_agent: true } | DialFailure::LinkBusy
                    ),
                    "{failure:?}"
                );
                record.outcomes += 1;
            }
        }
        turn.records.push(record);
        self.apply(turn);
    }

    /// Reads, lets endpoints and dials act, checks deadlines, writes: the order of the driver.
    pub(crate) fn step(
        &mut self,
        turn: &mut Turn<'_>,
        from_peer: &mut Pipe,
        to_peer: &mut Pipe,
        ledger: &mut Ledger,
    ) {
        self.read(turn, from_peer);
        self.finish_dials(turn);
        for at in self.endpoints.keys().copied().collect::<Vec<_>>() {
            if turn.rng.once_in(3) && turn.lazy {
                continue;
            }
            if let Some(endpoint) = self.endpoints.get_mut(&at) {
                let record = record_of(turn.records, endpoint.uid);
                if endpoint.act(&mut self.link, record, turn.now, turn.rng) {
                    self.unwritten.remove(&endpoint.uid);
                    self.endpoints.remove(&at);
                }
            }
            self.apply(turn);
        }
        self.link.handle_tick(turn.now);
        self.apply(turn);
        self.write(turn, to_peer, ledger);
        self.apply(turn);
    }

    fn read(&mut self, turn: &mut Turn<'_>, pipe: &mut Pipe) {
        // Far more than one turn writes: a wire with 30 s of backlog is a stalled link, not a slow endpoint.
        let mut pieces = turn.rng.within(0..=400);
        while pieces > 0 {
            pieces -= 1;
            let max = turn.rng.pick(&[1, 17, 2_000, 100_000, 100_000]);
            let Some(bytes) = pipe.receive(max, turn.now) else {
                return;
            };
            self.decoder.push(bytes);
            while let Some(received) = self.decoder.next().unwrap() {
                self.link.handle_packet(received, turn.now);
                let isolation = self.config.isolation;
                if !self.config.credit {
                    assert!(
                        self.link.held_bytes() <= isolation.link_budget_bytes,
                        "over the link's budget: {}",
                        self.link.held_bytes()
                    );
                }
                self.apply(turn);
            }
        }
    }

    fn finish_dials(&mut self, turn: &mut Turn<'_>) {
        let mut at = 0;
        while at < self.dialing.len() {
            if self.dialing[at].ends_at.is_none_or(|t| t > turn.now) {
                at += 1;
                continue;
            }
            let dial = self.dialing.remove(at);
            let outcome = if dial.refused {
                Err(String::from("connect: connection refused"))
            } else {
                Ok(())
            };
            let wanted = self.link.dialed(dial.key, outcome, turn.now);
            assert_eq!(wanted, !dial.refused, "a cancelled dial was announced");
            self.unanswered += 1;
            if wanted {
                let record = record_of(turn.records, dial.uid);
                let endpoint = Endpoint::new(dial.key, record, Who::Target, turn.rng);
                self.endpoints.insert(place(dial.key), endpoint);
            }
            self.apply(turn);
        }
    }

    fn write(&mut self, turn: &mut Turn<'_>, pipe: &mut Pipe, ledger: &mut Ledger) {
        let mut messages = turn.rng.within(0..=20);
        while messages > 0 && !self.failed && pipe.has_room() && self.link.wants_transmit() {
            messages -= 1;
            let Some(transmit) = self.link.poll_transmit(turn.now) else {
                assert!(!self.link.wants_transmit());
                return;
            };
            ledger.transmitted(self.config.role, &transmit);
            let message = match transmit {
                Transmit::Control(packet) => {
                    if let Packet::DialReq { address, .. } = &packet {
                        self.unwritten.remove(&address.parse().unwrap());
                    }
                    if packet.kind() == PacketType::DialRsp {
                        self.unanswered = self.unanswered.saturating_sub(1);
                    }
                    MessageBuf::packet(packet)
                }
                Transmit::Data {
                    key,
                    conn,
                    parts,
                    bytes,
                    ..
                } => {
                    assert!(
                        self.unwritten.is_empty() && self.unanswered == 0,
                        "data passed a dial or its answer"
                    );
                    assert!(bytes > 0 && bytes <= self.config.packet_bytes_max);
                    assert_eq!(bytes, parts.iter().map(|part| part.len()).sum::<usize>());
                    if let Some(endpoint) = self.endpoints.get_mut(&place(key)) {
                        endpoint.transmitted(bytes);
                    }
                    MessageBuf::data(conn, parts)
                }
            };
            pipe.send(message, turn.now);
        }
    }

    fn apply(&mut self, turn: &mut Turn<'_>) {
        let who = self.who();
        while let Some(action) = self.link.poll_action() {
            match action {
                Action::StartDial { key, address, .. } => self.start_dial(key, &address, turn),
                Action::CancelDial { key } => self.dialing.retain(|dial| dial.key != key),
                Action::DialDone { key, conn } => {
                    assert_ne!(conn.0, 0);
                    let endpoint = self.endpoint(key);
                    endpoint.open = true;
                    let record = record_of(turn.records, endpoint.uid);
                    record.opened = true;
                    record.outcomes += 1;
                }
                Action::DialFailed { key, outcome } => {
                    let endpoint = self
                        .endpoints
                        .remove(&place(key))
                        .expect("a dial that is known");
                    record_of(turn.records, endpoint.uid).outcomes += 1;
                    self.unwritten.remove(&endpoint.uid);
                    if !outcome.written {
                        assert!(
                            matches!(
                                outcome.failure,
                                DialFailure::SendTimedOut
                                    | DialFailure::LinkBusy
                                    | DialFailure::LinkLost
                            ),
                            "an answer to a dial that never left: {outcome:?}"
                        );
                    }
                }
                Action::Deliver { key, bytes } => {
                    assert!(!bytes.is_empty());
                    self.endpoint(key).deliver(&bytes);
                }
                Action::PeerFin { key } => self.endpoint(key).peer_fin(),
                Action::Ended { key, end } => {
                    let endpoint = self.endpoint(key);
                    let record = record_of(turn.records, endpoint.uid);
                    endpoint.ended(end.clone());
                    record.note_end(who, end);
                }
                Action::Abort { key, .. } => {
                    let endpoint = self.endpoint(key);
                    endpoint.abort();
                    let record = record_of(turn.records, endpoint.uid);
                    record.excuse.get_or_insert("cut");
                    assert!(
                        !record.credit || record.excuse != Some("cut"),
                        "an endpoint that reads was cut: {record:?}"
                    );
                }
                Action::Failed(_) => self.failed = true,
                Action::Count(Event::Offence(_) | Event::UnknownType(_)) => {
                    panic!("honest ends do not offend")
                }
                Action::Count(_) | Action::PeerDraining | Action::Retired | Action::Revived => (),
            }
        }
    }

    fn endpoint(&mut self, key: TunnelKey) -> &mut Endpoint {
        self.endpoints
            .get_mut(&place(key))
            .expect("actions name tunnels whose endpoint is there")
    }

    fn start_dial(&mut self, key: TunnelKey, address: &str, turn: &mut Turn<'_>) {
        let never = self.never_answers(turn.rng);
        let takes = turn.rng.pick(&[0, 0, 3, 200, 5_000, 24_990]);
        self.dialing.push(Dialing {
            key,
            uid: address.parse().unwrap(),
            ends_at: (!never).then(|| turn.now.after(Duration::from_millis(takes))),
            refused: turn.rng.once_in(6),
        });
    }

    /// A dial may hang forever only if the server has a dial timeout.
    fn never_answers(&self, rng: &mut Rng) -> bool {
        rng.once_in(10) && self.config.dial_timeout.is_some()
    }

    /// The link is lost for this end. Half of the time its endpoints outlive the link for a while, as in the driver.
    pub(crate) fn lost(&mut self, turn: &mut Turn<'_>) {
        for endpoint in self.endpoints.values() {
            record_of(turn.records, endpoint.uid)
                .excuse
                .get_or_insert("link lost");
        }
        self.link.lost(turn.now);
        self.apply(turn);
        assert_eq!(self.link.pending_dials(), 0);
        assert!(self.dialing.is_empty(), "a dial outlived its link");
        let keys: Vec<_> = self
            .endpoints
            .values()
            .map(|endpoint| endpoint.key)
            .collect();
        if turn.rng.once_in(2) {
            for key in keys {
                self.link.endpoint_gone(key, turn.now);
            }
            self.check_empty(turn.now);
        }
        self.endpoints.clear();
    }

    pub(crate) fn wind_down(&mut self) {
        self.endpoints.values_mut().for_each(Endpoint::wind_down);
    }

    /// Number of endpoints and of dials in progress.
    pub(crate) fn endpoints(&self) -> usize {
        self.endpoints.len() + self.dialing.len()
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.endpoints.is_empty()
            && self.dialing.is_empty()
            && self.link.tunnels() == 0
            && !self.link.wants_transmit()
    }

    /// The next moment at which an endpoint or a dial of this end acts.
    pub(crate) fn wakes_at(&self, now: Moment) -> Option<Moment> {
        let endpoints = self.endpoints.values().map(Endpoint::wakes_at);
        let dials = self.dialing.iter().filter_map(|dial| dial.ends_at);
        // The link's own deadlines are far apart and may be served late; deadlines of endpoints may not.
        endpoints.chain(dials).filter(|at| *at > now).min()
    }

    /// Asserts that nothing of any tunnel is left on this link.
    pub(crate) fn check_empty(&mut self, now: Moment) {
        assert_eq!(self.link.tunnels(), 0, "tunnels left: {:?}", self.link);
        assert_eq!(self.link.pending_dials(), 0, "dials left");
        assert_eq!(self.link.held_bytes(), 0, "held bytes left");
        let later = now.after(Duration::from_secs(60));
        self.link.handle_tick(later);
        assert_eq!(self.link.poll_transmit(later), None);
        assert_eq!(
            self.link.next_deadline(),
            None,
            "a deadline for nobody: {:?}",
            self.link
        );
    }
}
